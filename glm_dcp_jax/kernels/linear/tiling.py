"""How kernels that multiply with stored weights cut their work up.

They are to keep what 132 to 188 multiprocessors can read, and to fit into 99 KiB of shared memory, which GPUs of compute
capability 12 give a program.
"""

import jax.numpy as jnp

from glm_dcp_jax.kernels import tiles
from glm_dcp_jax.kernels.weight_tiles import Cut, Form

FEW_ROWS = 16
"""Rows that are padded to one product of the tensor cores; more of them than this are tiles of 32 to 128."""
_MANY_ROWS = 32
_LEAST_PROGRAMS, _MORE_PROGRAMS = 32, 160
"""With fewer programs than the first, or the second where they are large, several share an output's inputs."""


def tile_rows(rows: int) -> int:
    """Rows of a tile, for `rows` rows or about as many in each tile."""
    if rows <= FEW_ROWS:
        return max(tiles.next_power(rows), 4)
    return _MANY_ROWS if rows <= _MANY_ROWS else 64 if rows <= 64 else 128


def cut_of(rows: int, row_tiles: int, form: Form, matrices: int, sliced: bool = True, split: bool = True) -> Cut:
    """For `row_tiles` tiles of `rows` rows, which are a `tile_rows`. sliced, split: whether that may be."""
    columns = _columns(form)
    if jnp.dtype(form.dtype) == jnp.float32:  # multiplied in threads' registers, which hold less
        rows = min(max(rows, tiles.MIN_PRODUCT), 32)
        return Cut(16, rows, columns, 1, 1, warps=4, stages=1, matrices=matrices)
    if rows > _MANY_ROWS:
        outputs = 128 // matrices
        return Cut(outputs, rows, columns, 1, 1, warps=8 if rows > 64 else 4, stages=2, matrices=matrices, woven=True)
    if rows > FEW_ROWS:
        cut = Cut(64, rows, columns, 1, 1, warps=4, stages=3 if matrices == 1 else 2, matrices=matrices, woven=True)
    else:
        steps = form.inputs // columns
        slices = FEW_ROWS // rows
        while not sliced or slices > max(steps // 2, 1):
            slices, sliced = slices // 2 if sliced else 1, True
        # Two warps: with four, Hopper and Blackwell would take their asynchronous products, each of which is waited for.
        stages = 4 if matrices == 1 else 3
        cut = Cut(64 // slices, FEW_ROWS // slices, columns, slices, 1, warps=2, stages=stages, matrices=matrices)
    return cut._replace(splits=_splits(cut, -(-form.outputs // cut.outputs) * row_tiles, form)) if split else cut


def _columns(form: Form) -> int:
    """Inputs of a step: as many as one product's inner side of every part takes at least, or what fills 128 bytes."""
    least = tiles.MIN_PRODUCT * form.codes
    most = max(least, 64 if form.kind == "plain" else 128)
    if jnp.dtype(form.dtype) == jnp.float32:
        return least
    return min(max(tiles.next_power(form.block[1]), least), most)


def _splits(cut: Cut, programs: int, form: Form) -> int:
    steps = cut.steps(form)[1] // cut.slices
    wanted = _LEAST_PROGRAMS * 2 if cut.slices > 1 else _MORE_PROGRAMS
    if programs >= (_LEAST_PROGRAMS if cut.slices > 1 else _MORE_PROGRAMS) or steps < 4:
        return 1
    most = max(min(-(-wanted // programs), steps // 2), 1)
    return -(-steps // -(-steps // most))
