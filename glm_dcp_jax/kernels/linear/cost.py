"""What multiplying with stored weights moves and computes on GPUs; see `kernels.cost`."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import DTypeLike

from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.linear.tiling import cut_of, tile_rows
from glm_dcp_jax.kernels.weight_tiles import Cut, Form
from glm_dcp_jax.kernels.weights import NVFP4_GROUP

_FLOAT32, _INT32 = 4, 4


class Loads(NamedTuple):
    """Bytes that all programs of a kernel load. Memory is read less: they share rows of x, and scales of blocks.

    codes: of weights, NVFP4's scales included. scales: float32. rows: of x. rest: where to find things.
    """

    codes: int
    scales: int
    rows: int
    rest: int

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self)


def code_bytes(form: Form, dtype: DTypeLike = "bfloat16") -> int:
    """Of a matrix, without float32 scales. dtype: of a plain one."""
    codes = form.outputs * form.inputs
    if form.kind == "plain":
        return codes * jnp.dtype(dtype).itemsize
    return codes if form.kind == "fp8" else codes // 2 + codes // NVFP4_GROUP


def scale_bytes(form: Form) -> int:
    """Of a matrix's float32 scales."""
    if form.kind == "plain":
        return 0
    blocks = (form.outputs // form.block[0]) * (form.inputs // form.block[1])
    return _FLOAT32 * (blocks if form.kind == "fp8" else 1)


def tile_loads(cut: Cut, form: Form, row_tiles: int, rows: int, x_itemsize: int, dtype: DTypeLike) -> Loads:
    """Of programs that multiply `row_tiles` tiles, of `rows` rows altogether, with one matrix each, or gate and up."""
    blocks = -(-form.outputs // cut.outputs)
    programs = blocks * cut.splits * row_tiles
    scales = 0
    if form.kind == "fp8":
        scales = programs * cut.matrices * (cut.turns(form) + 1) * cut.slices * cut.outputs * _FLOAT32
    elif form.kind == "nvfp4":
        scales = programs * cut.matrices * _FLOAT32
    codes = row_tiles * cut.matrices * code_bytes(form, dtype)
    return Loads(codes, scales, blocks * rows * form.inputs * x_itemsize, 0)


def tile_flops(cut: Cut, form: Form, row_tiles: int) -> int:
    """Of the same programs, with what is padded, and where slices meet others."""
    programs = -(-form.outputs // cut.outputs) * cut.splits * row_tiles
    product = 2 * cut.slices * cut.outputs * cut.slices * cut.rows * cut.columns
    return programs * cut.turns(form) * cut.matrices * product


def loads(rows: int, form: Form, matrices: int, x_itemsize: int, dtype: DTypeLike = "bfloat16") -> Loads:
    """Of one call of the kernel. matrices: 2 for a gated map. dtype: of a plain weight."""
    cut, row_tiles = _cut(rows, form, matrices)
    found = tile_loads(cut, form, row_tiles, rows, x_itemsize, dtype)
    return found._replace(rest=-(-form.outputs // cut.outputs) * cut.splits * row_tiles * _INT32)


def cost(
    rows: int,
    form: Form,
    matrices: int,
    x_itemsize: int,
    out_itemsize: int,
    dtype: DTypeLike = "bfloat16",
) -> Cost:
    """Of one call of the kernel; where programs share inputs, XLA's sum of their results is not in it.

    Weights and rows count once: programs that read the same ones run side by side, and find them in the cache.
    """
    cut, row_tiles = _cut(rows, form, matrices)
    out = rows * form.outputs
    written = out * out_itemsize if cut.splits == 1 else out * matrices * cut.splits * _FLOAT32
    return Cost(
        bytes_read=matrices * (code_bytes(form, dtype) + scale_bytes(form))
        + rows * form.inputs * x_itemsize
        + _INT32,
        bytes_written=written,
        flops=tile_flops(cut, form, row_tiles),
    )


def _cut(rows: int, form: Form, matrices: int) -> tuple[Cut, int]:
    tile = tile_rows(rows)
    row_tiles = -(-rows // tile)
    cut = cut_of(tile, row_tiles, form, matrices)
    return cut, -(-rows // cut.rows)
