"""Products with stored weights inside Pallas-Triton kernels: tiles of codes are decoded in the program that needs them.

Codes are read in *units*, 32-bit words where sizes allow it (`encode_tiles.as_units`). A unit holds several codes: part
j of a tile is the jth code of every unit. For few rows of x, parts are not woven together: part j is multiplied with
every nth column of x, from the jth on, so that codes go from memory to where a product takes its operand without
passing between threads as values. For many rows it is cheaper to weave the weights than to take x apart.

Weights lead in every product: of its left side, tensor cores take 16 or 64 rows at least, and of its right side, which
a decode step's rows of x are, 16 as this compiler has it. Where there are fewer rows, a program cuts the inputs into
slices and multiplies all of them with one another: of the result, the blocks where slices meet themselves are wanted.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Shaped

from glm_dcp_jax.cache import codecs
from glm_dcp_jax.kernels import code_tiles, encode_tiles, tiles
from glm_dcp_jax.kernels.weights import NVFP4_GROUP, Fp8Weight, PlainWeight, Weight, block_of, shape_of


class Form(NamedTuple):
    """How matrices [outputs, inputs] are stored.

    codes: of a unit. block: rows and columns that share a float32 scale (FP8). dtype: what is multiplied.
    """

    kind: Literal["plain", "fp8", "nvfp4"]
    outputs: int
    inputs: int
    codes: int
    block: tuple[int, int]
    dtype: DTypeLike


def form_of(weight: Weight, x_dtype: DTypeLike) -> Form:
    """How a stack of matrices is stored, to be multiplied with x of this dtype."""
    outputs, inputs = shape_of(weight)[-2:]
    if isinstance(weight, PlainWeight):
        return Form(
            "plain", outputs, inputs, 1, (outputs, inputs), jnp.promote_types(x_dtype, weight.values.dtype)
        )
    if isinstance(weight, Fp8Weight):
        block = block_of(weight)
        return Form("fp8", outputs, inputs, encode_tiles.unit_bytes(inputs, block[1]), block, x_dtype)
    return Form("nvfp4", outputs, inputs, 2 * encode_tiles.WORD, (outputs, inputs), x_dtype)


def as_stored(weight: Weight) -> tuple[Array, ...]:
    """What kernels read: the weight's arrays, codes in units, with one axis over all matrices of the stack.

    Raises ValueError for 2 GiB or more that stay bytes, as `encode_tiles.as_units` does.
    """
    if isinstance(weight, PlainWeight):
        return (_stack(weight.values, 2),)
    codes = jax.lax.bitcast_convert_type(weight.codes, jnp.uint8)
    if isinstance(weight, Fp8Weight):
        units = encode_tiles.as_units(codes, encode_tiles.unit_bytes(codes.shape[-1], block_of(weight)[1]))
        return _stack(units, 2), _stack(weight.scales.astype(jnp.float32), 2)
    scales = encode_tiles.as_units(jax.lax.bitcast_convert_type(weight.scales, jnp.uint8), 1)
    units = encode_tiles.as_units(codes, encode_tiles.WORD)
    return _stack(units, 2), _stack(scales, 2), weight.outer.astype(jnp.float32).reshape(-1)


def matrices_of_group(weight: Weight, axes: int) -> int:
    """How many matrices of `as_stored`'s stack lie between one group and the next; `axes`: of a group's own stack.

    0 where there is no axis over groups.
    """
    stack = shape_of(weight)[:-2]
    return 0 if len(stack) == axes else int(np.prod(stack[1:], dtype=np.int64))


class Cut(NamedTuple):
    """What a program takes.

    outputs: rows of each of its matrices. rows: of x. columns: inputs of a step. slices: of the inputs, that it
    multiplies side by side. splits: programs that share the inputs of an output. matrices: that it multiplies with the
    same rows of x. woven: whether parts are.
    """

    outputs: int
    rows: int
    columns: int
    slices: int = 1
    splits: int = 1
    warps: int = 4
    stages: int = 1
    matrices: int = 1
    woven: bool = False

    def steps(self, form: Form) -> tuple[int, int]:
        """Steps of a block of inputs that share a float32 scale, and of all of them."""
        per_block = -(-form.block[1] // self.columns)
        return per_block, per_block * (form.inputs // form.block[1])

    def turns(self, form: Form) -> int:
        """Times around a program's loop."""
        return -(-self.steps(form)[1] // (self.splits * self.slices))


class Rows(NamedTuple):
    """Rows of x that a program multiplies: which, for each of the cut's rows, and whether there is one.

    x: [rows, inputs].
    """

    x: jax.Ref
    number: Int[Array, " M"]
    real: Bool[Array, " M"]


def multiply(
    rows: Rows,
    stored: Sequence[jax.Ref],
    matrices: Sequence[Int[Array, ""]],
    first_output: Int[Array, ""],
    split: Int[Array, ""] | int,
    form: Form,
    cut: Cut,
    interpret: bool,
) -> list[Float[Array, "outputs M"]]:
    """Rows first_output, first_output + 1, ... of each matrix times the rows of x, over a split's share of inputs."""
    line, column_line = jnp.arange(cut.slices * cut.outputs), jnp.arange(cut.slices * cut.rows)
    own = [
        _Matrix(stored, matrix, first_output + jax.lax.rem(line, cut.outputs), form, cut, interpret)
        for matrix in matrices
    ]
    x_row = _Lines(rows, jax.lax.rem(column_line, cut.rows), form, cut)

    def step_of(turn: Array, lines: Array, each: int) -> Array:
        return (turn * cut.splits + split) * cut.slices + jax.lax.div(lines, each)

    def turn(number: Array, state: tuple[list[Array], list[Array]]) -> tuple[list[Array], list[Array]]:
        totals, scales = state
        step = step_of(number, line, cut.outputs)
        parts = x_row.parts(step_of(number, column_line, cut.rows))
        # Scales of the next turn: the products do not wait for them, and nothing else fetches them early.
        following = [matrix.block_scale(step_of(number + 1, line, cut.outputs)) for matrix in own]
        added = []
        for matrix, total, scale in zip(own, totals, scales, strict=True):
            if form.kind == "fp8":
                zero = jnp.zeros_like(total)
                total += _dots(matrix.parts(step), parts, zero) * scale[:, None]
            else:
                total = _dots(matrix.parts(step), parts, total)
            added.append(total)
        return added, following

    shape = cut.slices * cut.outputs, cut.slices * cut.rows
    start = [jnp.zeros(shape, jnp.float32) for _ in own]
    first = [matrix.block_scale(step_of(jnp.int32(0), line, cut.outputs)) for matrix in own]
    totals, _ = jax.lax.fori_loop(0, cut.turns(form), turn, (start, first))
    return [matrix.finish(_own_slices(total, cut)) for matrix, total in zip(own, totals, strict=True)]


def gated(gate: Float[Array, "*n"], up: Float[Array, "*n"]) -> Float[Array, "*n"]:
    """silu(gate) * up."""
    return gate * jax.nn.sigmoid(gate) * up


def _dots(weights: list[Array], x: list[Array], total: Array) -> Array:
    if len(x) == 1:
        weights = [tiles.weave(weights)]
    for one, other in zip(weights, x, strict=True):
        total = total + tiles.dot(one, other, transpose_b=True)
    return total


def _own_slices(total: Float[Array, "lines columns"], cut: Cut) -> Float[Array, "outputs M"]:
    """The sum over slices of inputs of what their own slice of x made of them."""
    if cut.slices == 1:
        return total
    line, column = (jax.lax.broadcasted_iota(jnp.int32, total.shape, axis) for axis in (0, 1))
    own = jax.lax.div(line, cut.outputs) == jax.lax.div(column, cut.rows)
    total = jnp.where(own, total, 0.0)
    total = jnp.sum(total.reshape(cut.slices, cut.outputs, cut.slices * cut.rows), axis=0)
    return jnp.sum(total.reshape(cut.outputs, cut.slices, cut.rows), axis=1)


class _Inputs(NamedTuple):
    """The inputs that steps [lines] take, in units. real: None if all of them are."""

    start: Int[Array, " lines"]
    real: Bool[Array, "lines units"] | None

    @staticmethod
    def of(step: Int[Array, " lines"], each: int, form: Form, cut: Cut) -> "_Inputs":
        """each: inputs of a unit."""
        per_block, steps = cut.steps(form)
        width, units = form.block[1] // each, cut.columns // each
        whole = form.block[1] % cut.columns == 0
        start, real = step * units, None
        if not whole:
            start = jax.lax.div(step, per_block) * width + jax.lax.rem(step, per_block) * units
        if steps % (cut.splits * cut.slices):
            real = jnp.broadcast_to((step < steps)[:, None], (step.shape[0], units))
        if not whole:
            inside = (jax.lax.rem(step, per_block) * units)[:, None] + jnp.arange(units) < width
            real = inside if real is None else real & inside
        return _Inputs(start, real)


class _Lines(NamedTuple):
    """The right side of the products: a program's rows of x, once for each slice of the inputs."""

    rows: Rows
    place: Int[Array, " lines"]
    form: Form
    cut: Cut

    def parts(self, step: Int[Array, " lines"]) -> list[Float[Array, "lines units"]]:
        """The columns of x that belong to each part of a tile of weights."""
        form, x = self.form, self.rows.x
        real = self._pick(self.rows.real)
        number = jnp.where(real, self._pick(self.rows.number), 0)[:, None]
        inputs = _Inputs.of(step, 1, form, self.cut)
        column = inputs.start[:, None] + jnp.arange(self.cut.columns)[None, :]
        mask = real[:, None] if inputs.real is None else real[:, None] & inputs.real
        values = tiles.load(x, number, column, mask=mask).astype(form.dtype)
        return [values] if self.cut.woven else unweave(values, form.codes)

    def _pick(self, values: Shaped[Array, " M"]) -> Shaped[Array, " lines"]:
        """Each slice sees the same rows."""
        if self.cut.slices == 1:
            return values
        return jnp.broadcast_to(values[None, :], (self.cut.slices, values.shape[0])).reshape(-1)


class _Matrix(NamedTuple):
    """The left side of the products: some outputs of one matrix, once for each slice of the inputs."""

    stored: Sequence[jax.Ref]
    matrix: Int[Array, ""]
    output: Int[Array, " lines"]
    form: Form
    cut: Cut
    interpret: bool

    def parts(self, step: Int[Array, " lines"]) -> list[Float[Array, "lines units"]]:
        """The values of each part's codes; FP8's without their block's scale, NVFP4's without the matrix's."""
        form = self.form
        inputs = _Inputs.of(step, form.codes, form, self.cut)
        units = self._load(self.stored[0], inputs, self.cut.columns // form.codes)
        if form.kind == "plain":
            return [units.astype(form.dtype)]
        if form.kind == "fp8":
            return code_tiles.e4m3_parts(units, form.codes, form.dtype, self.interpret)
        groups = _Inputs.of(step, NVFP4_GROUP, form, self.cut)
        scales = codecs.decode_e4m3(self._load(self.stored[1], groups, self.cut.columns // NVFP4_GROUP))
        scales = tiles.repeat(scales, NVFP4_GROUP // form.codes)
        return code_tiles.e2m1_parts(units, scales, form.dtype, self.interpret)

    def block_scale(self, step: Int[Array, " lines"]) -> Float[Array, " lines"]:
        """FP8's scale of the step's block."""
        if self.form.kind != "fp8":
            return jnp.zeros((1,), jnp.float32)
        scales, per_block = self.stored[1], self.cut.steps(self.form)[0]
        block = jnp.minimum(jax.lax.div(step, per_block), scales.shape[2] - 1)
        row = jnp.minimum(jax.lax.div(self.output, self.form.block[0]), scales.shape[1] - 1)
        return tiles.load(scales, self._matrix(1), row, block)

    def finish(self, total: Float[Array, "outputs M"]) -> Float[Array, "outputs M"]:
        """Times the scale of the whole matrix, where it has one."""
        if self.form.kind != "nvfp4":
            return total
        outer = tiles.load(self.stored[2], self._matrix(1)) * code_tiles.e2m1_missing(self.form.dtype)
        return total * outer[:, None]

    def _load(self, ref: jax.Ref, inputs: _Inputs, count: int) -> Shaped[Array, "lines units"]:
        real = inputs.real
        if self.form.outputs % self.cut.outputs:
            inside = (self.output < self.form.outputs)[:, None]
            real = inside if real is None else real & inside
        column = inputs.start[:, None] + jnp.arange(count)[None, :]
        return tiles.load(ref, self._matrix(2), self.output[:, None], column, mask=real)

    def _matrix(self, axes: int) -> Int[Array, "..."]:
        return jnp.broadcast_to(self.matrix, (1,) * axes)


def unweave(woven: Shaped[Array, "N n"], parts: int) -> list[Shaped[Array, "N n/parts"]]:
    """The parts that `tiles.weave` would make this of."""
    if parts == 1:
        return [woven]
    halves = jnp.unstack(woven.reshape(woven.shape[0], -1, 2), axis=-1)
    even, odd = (unweave(half, parts // 2) for half in halves)
    return [part for pair in zip(even, odd, strict=True) for part in pair]


def _stack(array: Array, axes: int) -> Array:
    """All but the last `axes` axes as one."""
    return array.reshape(int(np.prod(array.shape[:-axes], dtype=np.int64)), *array.shape[-axes:])
