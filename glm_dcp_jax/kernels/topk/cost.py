"""What exact top-k moves on GPUs; see `kernels.cost`."""

from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.topk import triton

_PAIR = 8
"""Bytes of a number and a position, as they are sorted."""


def cost(rows: int, columns: int, visible: int, k: int, has_maxima: bool = False) -> Cost:
    """`rows` rows that see `visible` of their `columns` columns, whole groups: what all kernels move, and the sort.

    A sort, of short rows or of what was chosen, counts as one read and one write of what it sorts; the scores of what
    was chosen, which are read and written for it, once more. has_maxima: those of the smallest groups are given.
    """
    levels = triton.Levels.of(columns, k)
    if columns <= triton.SORTED_COLUMNS or levels is None:
        return Cost(4 * rows * columns, _PAIR * rows * min(k, columns))
    *below, top = levels.sizes
    each = [choose_cost(rows, top, min(k, top), scores=not below)]
    groups = visible
    for size in below:
        groups = -(-groups // levels.group)
        each.append(choose_cost(rows, size, k, k, min(k, groups), scores=size == columns))
    if has_maxima and len(below) > 1:
        each.append(maxima_cost(rows, levels.sizes[1], None, sum(levels.sizes[2:])))
    elif below and not has_maxima:
        each.append(maxima_cost(rows, columns, visible, sum(levels.sizes[1:])))
    each.append(sort_cost(rows, min(k, columns)))
    return Cost(sum(part.bytes_read for part in each), sum(part.bytes_written for part in each))


def maxima_cost(rows: int, columns: int, visible: int | None, maxima: int) -> Cost:
    """The kernel that leaves `maxima` numbers a row, of groups of every size. Whole tiles are read.

    visible: of columns that are scores; None: they are maxima themselves.
    """
    if visible is None:
        return Cost(4 * rows * columns, 4 * rows * maxima)
    scores = min(-(-visible // triton.TILE) * triton.TILE, columns)
    programs = rows * -(-columns // triton.TILE)
    return Cost(4 * rows * scores + 4 * programs, 4 * rows * maxima)


def choose_cost(
    rows: int, size: int, k: int, above: int = 0, filled: int | None = None, *, scores: bool
) -> Cost:
    """The kernel that chooses k of a level's `size` items, which are scores or maxima.

    above: how long the list is of the groups chosen before, which gives the items; 0: there is none, and all are read.
    filled: how many groups it lists; None: as many as it has room for.
    """
    items = size if not above else min(triton.group_of(k) * (above if filled is None else filled), size)
    return Cost(4 * rows * (items + above + scores), 4 * rows * k)


def sort_cost(rows: int, chosen: int) -> Cost:
    """Reading the scores of what was chosen, and sorting it by them: of XLA's own."""
    return Cost((4 + 4 + _PAIR) * rows * chosen, 2 * _PAIR * rows * chosen)
