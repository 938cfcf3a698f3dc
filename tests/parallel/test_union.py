"""The union of each request's selections: numbered by owner as a plain loop does it, the same on every rank."""

from functools import cache, partial

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.capacity import Capacity
from glm_dcp_jax.parallel.union import Union, union_of

REQUESTS, PAGES, TOPK, MOST = 3, 6, 5, 40
LAYOUTS = [Layout(4, 1), Layout(2, 3), Layout(4, 4, 2), Layout(4, 8, 4)]


@cache
def compiled(layout: Layout):
    return jax.jit(partial(union_of, layout=layout, most=MOST))


def expected(positions: np.ndarray, block: Block, layout: Layout, rank: int) -> tuple:
    """What a Union holds, in its order, by loops over requests, rows and columns."""
    requests, rows, topk = positions.shape
    owner, ordinal = np.full((2, requests, rows * topk), -1)
    seen_by, current = np.zeros((requests, rows * topk), int), np.zeros((requests, rows), int)
    counts, mine, selected = [0] * layout.world, [], 0
    for request in range(requests):
        place: dict[int, int] = {}
        start = max(block.positions[request, 0], 0)
        for row, column in np.ndindex(rows, topk):
            position = int(positions[request, row, column])
            if position < 0:
                continue
            if position >= start:
                current[request, block.positions[request] == position] |= 1 << row
                continue
            selected += 1
            if position not in place:
                # One row's list stays where it selected it; several rows' records close up.
                at = place[position] = column if rows == 1 else len(place)
                holder = owner[request, at] = layout.owner(position)
                ordinal[request, at] = counts[holder]
                counts[holder] += 1
                if holder == rank:
                    page = int(block.page_table[request, layout.page_index(position)])
                    mine.append(layout.slot(position, page))
            seen_by[request, place[position]] |= 1 << row
    mine += [-1] * (MOST - len(mine))
    return owner, ordinal, mine, counts, selected, seen_by if rows > 1 else None, current


@st.composite
def selections(draw: st.DrawFn, rows: int, context: int) -> tuple[np.ndarray, Block]:
    """Each request at a length of its own, or padding, or with fewer rows than the block has."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    starts = draw(st.lists(st.integers(-1, context - rows), min_size=REQUESTS, max_size=REQUESTS))
    positions = np.full((REQUESTS, rows), -1, np.int32)
    chosen = np.full((REQUESTS, rows, TOPK), -1, np.int32)
    narrow = draw(st.booleans())  # few positions to choose from: rows overlap
    for request, start in enumerate(starts):
        for row in range(draw(st.integers(1, rows)) if start >= 0 else 0):
            visible = start + row + 1
            positions[request, row] = start + row
            picked = visible - 1 - rng.permutation(min(visible, TOPK + 2) if narrow else visible)[:TOPK]
            chosen[request, row, : len(picked)] = picked
    pages = rng.permutation(np.arange(1, 1 + REQUESTS * PAGES)).reshape(REQUESTS, PAGES).astype(np.int32)
    return chosen, Block(np.zeros_like(positions), positions, pages)


@pytest.mark.parametrize("rows", [1, 2, 4])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_the_union_is_what_loops_make_of_it(rows: int, layout: Layout, data: st.DataObject) -> None:
    chosen, block = data.draw(selections(rows, PAGES * layout.virtual_block))
    rank = data.draw(st.integers(0, layout.world - 1))
    found = compiled(layout)(chosen, block, rank=np.int32(rank))
    right = Union(*expected(chosen, block, layout, rank))
    if rows == 1:  # `owner` of what is not fetched means nothing
        found = found._replace(owner=np.where(found.ordinal < 0, -1, found.owner))
    assert (found.seen_by is None) == (right.seen_by is None)
    for name, array in found._asdict().items():
        if array is not None:
            np.testing.assert_array_equal(array, getattr(right, name), name)


class TestCapacity:
    def of(self, **changes: int) -> Capacity:
        typical = {
            "requests": 1,
            "rows": 1,
            "topk": 2048,
            "local_tokens": 2**18,
            "world": 4,
            "record_bytes": 432,
            "memory": 512 * 2**20,
        }
        return Capacity.of(**typical | changes)

    def test_a_random_selection_fits_with_five_deviations_to_spare(self):
        """2048 of 4 ranks: 512 each, give or take 22.6; rounded up to 64."""
        assert self.of() == Capacity(fast=640, most=2048, each_round=1408, expected=512)
        assert self.of(requests=8).fast == 4096 + 5 * 64

    def test_it_covers_the_worst_case(self):
        for rows in (1, 4, 8):
            for memory in (1, 10_000, 10**6, 10**9):
                found = self.of(rows=rows, memory=memory, requests=3)
                assert found.most == 3 * rows * 2048
                assert found.fast + found.rounds * found.each_round >= found.most

    def test_short_contexts_cannot_overflow(self):
        found = self.of(local_tokens=600)
        assert (found.most, found.fast, found.rounds) == (600, 600, 0)

    def test_memory_bounds_what_is_held_at_once(self):
        found = self.of(requests=64, rows=8, memory=2**26)
        assert 4 * 432 * max(found.each_round, 3 * found.fast) <= 2**26
        assert found.rounds > 1
