"""Products with stored weights as Pallas-Triton kernels, which read a matrix where it lies in its stack."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, DTypeLike, Float, Int

from glm_dcp_jax.kernels import tiles, weight_tiles
from glm_dcp_jax.kernels.linear.tiling import cut_of, tile_rows
from glm_dcp_jax.kernels.weight_tiles import Cut, Form, Rows
from glm_dcp_jax.kernels.weights import Weight


def linear(
    x: Float[Array, "T I"], weight: Weight, group: Int[Array, ""], out_dtype: DTypeLike, interpret: bool
) -> Float[Array, "T O"]:
    """See the op."""
    (total,) = _products(x, weight, group, 1, out_dtype, interpret)
    return total


def gated_linear(
    x: Float[Array, "T I"], weight: Weight, group: Int[Array, ""], interpret: bool
) -> Float[Array, "T O"]:
    """See the op."""
    parts = _products(x, weight, group, 2, x.dtype, interpret)
    if len(parts) == 1:
        return parts[0]
    gate, up = parts
    return (jax.nn.silu(gate) * up).astype(x.dtype)


def _products(
    x: Float[Array, "T I"],
    weight: Weight,
    group: Int[Array, ""],
    matrices: int,
    out_dtype: DTypeLike,
    interpret: bool,
) -> list[Float[Array, "T O"]]:
    """The result, or, where programs share the inputs of an output, both products of a gated map in float32."""
    form = weight_tiles.form_of(weight, x.dtype)
    rows = x.shape[0]
    if 0 in (rows, form.outputs, form.inputs):
        return [jnp.zeros((rows, form.outputs), out_dtype)]
    tile = tile_rows(rows)
    cut = cut_of(tile, -(-rows // tile), form, matrices)
    split = cut.splits > 1
    results = matrices if split else 1
    out = pl.pallas_call(
        partial(
            _multiply,
            form=form,
            cut=cut,
            stride=weight_tiles.matrices_of_group(weight, matrices - 1),
            interpret=interpret,
        ),
        grid=(-(-form.outputs // cut.outputs), -(-rows // cut.rows), cut.splits),
        out_shape=jax.ShapeDtypeStruct(
            (results, cut.splits, rows, form.outputs), jnp.float32 if split else out_dtype
        ),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        name="linear" if matrices == 1 else "gated_linear",
    )(x, group.reshape(1), *weight_tiles.as_stored(weight))
    if not split:
        return [out[0, 0]]
    totals = [jnp.sum(out[number], axis=0) for number in range(results)]
    return [totals[0].astype(out_dtype)] if matrices == 1 else totals


def _multiply(
    x: jax.Ref, group: jax.Ref, *refs: jax.Ref, form: Form, cut: Cut, stride: int, interpret: bool
) -> None:
    *stored, out = refs
    start, split = pl.program_id(0) * cut.outputs, pl.program_id(2)
    row = pl.program_id(1) * cut.rows + jnp.arange(cut.rows)
    first = tiles.only(group) * stride
    own = [first + number for number in range(cut.matrices)]
    given = Rows(x, row, row < out.shape[2])
    totals = weight_tiles.multiply(given, stored, own, start, split, form, cut, interpret)
    if out.shape[0] < cut.matrices:
        totals = [weight_tiles.gated(*totals)]
    output = (start + jnp.arange(cut.outputs))[:, None]
    mask = (output < form.outputs) & given.real[None, :]
    for number, total in enumerate(totals):
        place = jnp.full((1, 1), number, jnp.int32), jnp.broadcast_to(split, (1, 1)), row[None, :], output
        tiles.store(out, *place, value=total.astype(out.dtype), mask=mask)
