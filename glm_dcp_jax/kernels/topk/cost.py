"""What exact top-k moves on GPUs; see `kernels.cost`."""

from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.topk import triton

_PAIR = 8
"""Bytes of a score or its number, and a position, as they are sorted."""


def cost(rows: int, columns: int, visible: int, k: int) -> Cost:
    """`rows` rows that see `visible` of their `columns` columns: a read of them in each pass and in the last kernel.

    A sort, of short rows or of what was chosen, counts as one read and one write of what it sorts.
    """
    if columns <= triton.SORTED_COLUMNS:
        return Cost(4 * rows * columns, _PAIR * rows * min(k, columns))
    chunks = triton.Chunks.of(rows, columns)
    # Whole tiles are read, and each program reads what the last pass left of its row.
    scores = min(-(-visible // triton.TILE) * triton.TILE, columns)
    row_state, chunk_state = 4 + 4, 4 + 4 * triton.BINS
    programs = rows * chunks.each_row
    left = programs * (4 + row_state + chunks.each_row * chunk_state)
    chosen = _PAIR * rows * min(k, columns)
    return Cost(
        bytes_read=(triton.PASSES + 1) * (4 * rows * scores + left) + triton.PASSES * 4 * programs + chosen,
        bytes_written=triton.PASSES * (rows * row_state + programs * chunk_state) + 2 * chosen,
    )
