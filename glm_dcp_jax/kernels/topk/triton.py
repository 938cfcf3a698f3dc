"""Exact top-k as Pallas-Triton kernels: a tournament of groups of columns, and a sort of k columns.

Scores become uint32 numbers in their order. Neighbouring columns form groups, neighbouring groups larger groups; each
stands for its largest number. The k best columns lie in the k best groups, of equal ones those of the lowest positions:
k groups before a column's own would hold k columns before it. So one kernel reads all scores and leaves the maxima of
the groups, of every size; those of the smallest may also come with the scores. Then a program a row chooses k of the
largest groups, k of the groups or columns in these, and so on. It holds what it chooses from in registers, and finds
the k-th best number bit by bit.

How much is read and written does not depend on the scores.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, UInt32

from glm_dcp_jax.kernels import tiles
from glm_dcp_jax.kernels.topk import reference

SORTED_COLUMNS = 4096
"""Rows of at most so many columns are sorted whole: up to here XLA's sort is one kernel, in shared memory."""

ITEMS = 16384
"""Columns, or groups, that a program chooses from: 32 in each of 512 threads, in registers."""
GROUP = 8
"""Members of a group, where k leaves room for so many: what reads least from 131,072 columns with k = 2048."""

TILE = 2048
"""Columns that a program reads for the maxima."""
_WORST = 0xFFFFFFFF
"""Sorts behind every column, as numbers are sorted inverted."""


class Levels(NamedTuple):
    """group: how many columns, or groups, make a group of the level above. sizes: how many each level has, columns
    first, padded to whole groups above; the last level's are chosen from all at once.
    """

    group: int
    sizes: tuple[int, ...]

    @staticmethod
    def of(columns: int, k: int) -> "Levels | None":
        """None where rows can't be searched: k is over half of ITEMS, or columns are many millions."""
        group = group_of(k)
        if group < 2:
            return None
        sizes = [columns]
        while sizes[-1] > ITEMS:
            sizes.append(_up(-(-sizes[-1] // group), group))
        return Levels(group, tuple(sizes)) if group ** (len(sizes) - 1) <= TILE else None


def group_of(k: int) -> int:
    """Members of a group where k are chosen; below 2 where k is too large to search."""
    return min(GROUP, ITEMS // tiles.next_power(k))


def select_positions(
    scores: Float[Array, "T L"],
    visible: Int[Array, " T"],
    maxima: UInt32[Array, "T M"] | None = None,
    *,
    k: int,
    interpret: bool,
) -> Int[Array, "T k"]:
    """See the op."""
    rows, columns = scores.shape
    levels = Levels.of(columns, k)
    if columns <= SORTED_COLUMNS or 0 in (rows, k) or levels is None:
        return reference.select_positions(scores, visible, k)
    seen = jnp.clip(visible, 0, columns).astype(jnp.int32)

    def launch(kernel: Any, grid: tuple[int, ...], warps: int, outputs: Any, *inputs: Array) -> Any:
        return pl.pallas_call(
            partial(kernel, group=levels.group),
            grid=grid,
            out_shape=outputs,
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=warps, num_stages=1),
            name=f"topk{kernel.__name__}",
        )(*inputs)

    def maxima_of(values: Array, sizes: tuple[int, ...], *limit: Array) -> list[Array]:
        outputs = [jax.ShapeDtypeStruct((rows, size), jnp.uint32) for size in sizes]
        return (
            launch(_maxima, (rows, -(-values.shape[1] // TILE)), 4, outputs, values, *limit) if sizes else []
        )

    if maxima is None:
        known = maxima_of(scores, levels.sizes[1:], seen)
    else:
        known = [maxima, *maxima_of(maxima, levels.sizes[2:])]
    choose = partial(launch, _choose, (rows,), 16, jax.ShapeDtypeStruct((rows, min(k, columns)), jnp.int32))
    above: list[Array] = []
    for level in reversed(known):
        above = [choose(level, *above)]
    positions = choose(scores, seen, *above)
    values = jnp.take_along_axis(scores, jnp.maximum(positions, 0), axis=1)
    inverted = jnp.where(positions < 0, jnp.uint32(_WORST), ~reference.sortable(values))
    _, positions = jax.lax.sort((inverted, positions), num_keys=2, is_stable=False)
    return jnp.pad(positions, ((0, 0), (0, k - positions.shape[1])), constant_values=-1)


def _maxima(values: jax.Ref, *rest: jax.Ref, group: int) -> None:
    """The largest number of each group in a tile, for groups of every size; 0 of groups that have none visible.

    values: scores, or a level's maxima. rest: of scores, how many are visible; then the results.
    """
    row, tile = _program(0), _program(1)
    limit, *levels = _with_limit(values, row, rest)
    start = tile * TILE
    position = start[:, None] + _members(jnp.arange(TILE // group), group)
    there = position < values.shape[1]
    if limit is not None:
        # By whole tiles: a mask of no known alignment makes loads of one element.
        there &= (start < limit)[:, None]
    number = _numbers(values, row, position, there, limit)
    for level in levels:
        number = jnp.max(number.reshape(-1, group), axis=1)
        of_tile = number.shape[0]
        index = tile * of_tile + jnp.arange(of_tile)
        tiles.store(level, row, index, value=number, mask=index < level.shape[1])


def _choose(values: jax.Ref, *rest: jax.Ref, group: int) -> None:
    """Each row's k best columns, or groups of a level, in the order of their positions; then -1.

    values: scores, or a level's maxima. rest: of scores, how many are visible; the groups chosen above, if any; then
    the result.
    """
    row, (*given, best) = _program(0), rest
    limit, *parents = _with_limit(values, row, given)
    item, there = _items(values, row, parents, group)
    number = _numbers(values, row, item, there, limit)
    k = best.shape[1]
    room = jnp.minimum(k, _count(number > 0))
    threshold = _threshold(number, room)
    above, equal = number > threshold, number == threshold
    ties = room - _count(above)
    # Both are counted at once, in the halves of an integer.
    ones = above.astype(jnp.int32) | (equal.astype(jnp.int32) << 16)
    of_group = jnp.sum(ones, axis=1)
    before = (jnp.cumsum(of_group) - of_group)[:, None] + jnp.cumsum(ones, axis=1) - ones
    tie = before >> 16
    place = (before & 0xFFFF) + jnp.minimum(tie, ties)
    # With what isn't chosen at place k there are registers for everything.
    place = jnp.where(above | (equal & (tie < ties)), place, k)
    tiles.store(best, row[:, None], place, value=item, mask=place < k)
    place = jnp.arange(tiles.next_power(k))
    empty = (place >= room) & (place < k)
    tiles.store(best, row, place, value=jnp.full(place.shape, -1), mask=empty)


def _program(axis: int) -> Int[Array, "1"]:
    return jnp.broadcast_to(pl.program_id(axis), 1)


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _members(groups: Int[Array, " G"], group: int) -> Int[Array, "G group"]:
    return groups[:, None] * group + jnp.arange(group)[None, :]


def _items(values: jax.Ref, row: Array, above: list[jax.Ref], group: int) -> tuple[Array, Array]:
    """What a row's program chooses from: members of the groups chosen above, or everything; and which of it exists."""
    size = values.shape[1]
    count = above[0].shape[1] if above else -(-size // group)
    number = jnp.arange(tiles.next_power(count))
    if above:
        groups = tiles.load(above[0], row, number, mask=number < count, other=-1)
    else:
        groups = jnp.where(number < count, number, -1)
    items = _members(groups, group)
    return items, (groups >= 0)[:, None] & (items < size)


def _with_limit(values: jax.Ref, row: Array, refs: Sequence[jax.Ref]) -> list[Any]:
    """How many of a row's scores are visible, from the first of these arrays, or None for maxima; and the others."""
    return [tiles.load(refs[0], row), *refs[1:]] if values.dtype == jnp.float32 else [None, *refs]


def _numbers(
    values: jax.Ref, row: Array, item: Array, there: Array, limit: Array | None
) -> UInt32[Array, "G group"]:
    """Maxima, or the numbers of scores; 0, which is below all of them, of what isn't there or isn't visible."""
    found = tiles.load(values, row[:, None], item, mask=there)
    if limit is None:
        return found
    return jnp.where(there & (item < limit[:, None]), reference.sortable(found), jnp.uint32(0))


def _threshold(number: UInt32[Array, "G group"], room: Array) -> Array:
    """The largest number that `room` numbers reach: above 0, or, for a room of 0, what no score becomes."""

    def try_bit(step: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1) << (31 - step).astype(jnp.uint32))
        return jnp.where(_count(number >= candidate) >= room, candidate, found)

    return jax.lax.fori_loop(0, 32, try_bit, jnp.uint32(0))


def _count(which: Array) -> Array:
    return jnp.sum(jnp.sum(which.astype(jnp.int32), axis=1))
