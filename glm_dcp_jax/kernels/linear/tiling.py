"""How kernels that multiply with stored weights cut their work up.

They are to keep 132 to 188 multiprocessors reading, and to fit into 99 KiB of shared memory, which is what GPUs of
compute capability 12 give a program.
"""

import jax.numpy as jnp

from glm_dcp_jax.kernels import tiles
from glm_dcp_jax.kernels.weight_tiles import Cut, Form

FEW_ROWS = 16
"""Rows that are padded to one product of the tensor cores; more of them than this are tiles of 32 to 128."""
_MANY_ROWS = 32
_FEW_PROGRAMS, _MORE_PROGRAMS = 32, 160
"""With fewer than the second, several programs share an output's inputs; with slices, fewer than the first."""


def tile_rows(rows: int) -> int:
    """Rows of a tile, for `rows` rows or about as many in each tile."""
    if rows <= FEW_ROWS:
        return max(tiles.next_power(rows), 4)
    return _MANY_ROWS if rows <= _MANY_ROWS else 64 if rows <= 64 else 128


def cut_of(
    rows: int, row_tiles: int, form: Form, matrices: int, sliced: bool = True, split: bool = True
) -> Cut:
    """For `row_tiles` tiles of `rows` rows, a power of two. sliced, split: whether inputs may be."""
    columns = _columns(form)
    if jnp.dtype(form.dtype) == jnp.float32:  # multiplied in threads' registers, which hold less
        least = tiles.MIN_PRODUCT
        return Cut(least, min(max(rows, least), 32), columns, warps=4, stages=1, matrices=matrices)
    if rows > _MANY_ROWS:
        if matrices > 1:  # decoded, they take twice the registers
            columns = max(columns // 2, tiles.MIN_PRODUCT * form.codes)
        return Cut(
            128 // matrices, rows, columns, warps=8, stages=1 + matrices, matrices=matrices, woven=True
        )
    if rows > FEW_ROWS:
        stages = 3 if matrices == 1 else 2
        cut = Cut(64, rows, columns, warps=4, stages=stages, matrices=matrices, woven=True)
    else:
        slices = _slices(rows, form, columns) if sliced else 1
        # Two warps: with four, Hopper and Blackwell would take products that run beside, and wait for each.
        cut = Cut(64 // slices, FEW_ROWS // slices, columns, slices, warps=2, matrices=matrices)
    programs = -(-form.outputs // cut.outputs) * row_tiles
    if split:
        cut = cut._replace(splits=_splits(cut, programs, form))
    return cut if rows > FEW_ROWS else cut._replace(stages=_stages(cut, programs * cut.splits, form))


def _stages(cut: Cut, programs: int, form: Form) -> int:
    """Steps under way, which hide the memory's latency: more where a multiprocessor has one program to itself."""
    alone = programs <= _MORE_PROGRAMS
    if cut.matrices > 1:
        return 5 if alone else 3
    return 8 if alone else 6 if form.kind == "nvfp4" else 4


def _slices(rows: int, form: Form, columns: int) -> int:
    """As many as fill a product with few rows, if each has at least two steps."""
    most = max(form.inputs // columns // 2, 1)
    slices = FEW_ROWS // rows
    while slices > most:
        slices //= 2
    return slices


def _columns(form: Form) -> int:
    """Inputs of a step: as many as one product's inner side of every part takes at least, or what fills 128 bytes."""
    least = tiles.MIN_PRODUCT * form.codes
    most = max(least, 64 if form.kind == "plain" else 128)
    if jnp.dtype(form.dtype) == jnp.float32:
        return least
    return min(max(tiles.next_power(form.block[1]), least), most)


def _splits(cut: Cut, programs: int, form: Form) -> int:
    """Their partial sums cost one more kernel, which small products are not worth."""
    steps = cut.steps(form)[1] // cut.slices
    enough, wanted = (
        (_FEW_PROGRAMS, 2 * _FEW_PROGRAMS) if cut.slices > 1 else (_MORE_PROGRAMS, _MORE_PROGRAMS)
    )
    if programs >= enough or steps < 4:
        return 1
    most = min(-(-wanted // programs), steps // 2)
    return -(-steps // -(-steps // most))
