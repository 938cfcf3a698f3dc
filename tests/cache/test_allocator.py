"""The lockstep page allocator against a model of it, and every way to misuse it."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm_dcp_jax.cache.allocator import NULL_PAGE, AllocatorError, OutOfPages, PageAllocator, PageTable
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import ConfigError


def state(allocator: PageAllocator) -> tuple[list[int], list[int]]:
    """All that can be seen: every reference count, and the order in which free pages will be handed out."""
    counts = [allocator.ref_count(page) for page in range(allocator.num_pages)]
    order = allocator.allocate(allocator.num_free)
    allocator.free(order)
    return counts, order


class Lockstep(RuleBasedStateMachine):
    """Two ranks make the same calls; both must do what a list of free pages and a count of references say."""

    @initialize(num_pages=st.integers(2, 20))
    def start(self, num_pages: int) -> None:
        self.ranks = [PageAllocator(num_pages), PageAllocator(num_pages)]
        self.line = list(range(1, num_pages))
        self.references: Counter[int] = Counter()

    def refuse(self, error: type[Exception], method: str, argument: object) -> None:
        """Both ranks refuse the call, and nothing is lost."""
        for rank in self.ranks:
            before = state(rank)
            with pytest.raises(error):
                getattr(rank, method)(argument)
            assert state(rank) == before

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > len(self.line):
            self.refuse(OutOfPages, "allocate", count)
            return
        expected, self.line = self.line[:count], self.line[count:]
        assert [rank.allocate(count) for rank in self.ranks] == [expected, expected]
        self.references.update(expected)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted(self.references)), max_size=6))
        for rank in self.ranks:
            rank.share(pages)
        self.references.update(pages)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        pages = data.draw(st.permutations(sorted(self.references.elements())))
        pages = pages[: data.draw(st.integers(0, len(pages)))]
        for rank in self.ranks:
            rank.free(pages)
        for page in pages:
            self.references[page] -= 1
            if not self.references[page]:
                del self.references[page]
                self.line.append(page)

    @rule(data=st.data())
    def misuse(self, data: st.DataObject) -> None:
        """One wrong id anywhere among right ones spoils the whole call."""
        bad = st.sampled_from([NULL_PAGE, -1, self.ranks[0].num_pages, *self.line])
        pages = data.draw(st.permutations([data.draw(bad), *self.references]))
        self.refuse(AllocatorError, data.draw(st.sampled_from(["free", "share"])), pages)

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def free_more_often_than_held(self, data: st.DataObject) -> None:
        page = data.draw(st.sampled_from(sorted(self.references)))
        pages = data.draw(st.permutations([page, *self.references.elements()]))
        self.refuse(AllocatorError, "free", pages)

    @invariant()
    def both_ranks_agree_with_the_model(self) -> None:
        for rank in self.ranks:
            rank.check()
            assert rank.num_free == len(self.line)
            assert rank.num_used == len(self.references)
            counts = [1] + [self.references[page] for page in range(1, rank.num_pages)]
            assert state(rank) == (counts, self.line)


Lockstep.TestCase.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
TestLockstep = Lockstep.TestCase


def test_ids_ascend_at_first_and_then_the_longest_free_goes_first() -> None:
    allocator = PageAllocator(6)
    assert allocator.allocate(4) == [1, 2, 3, 4]
    allocator.free([3])
    allocator.free([2, 1])
    assert allocator.allocate(4) == [5, 3, 2, 1]


def test_exhaustion_says_what_was_asked_and_what_there_is_and_loses_nothing() -> None:
    allocator = PageAllocator(8)
    allocator.allocate(4)
    before = state(allocator)
    with pytest.raises(
        OutOfPages, match="5 cache pages asked, 3 free of 7; .*--num-gpu-blocks-override"
    ) as caught:
        allocator.allocate(5)
    assert (caught.value.asked, caught.value.free, caught.value.total) == (5, 3, 7)
    assert state(allocator) == before
    assert allocator.allocate(3) == [5, 6, 7]


def test_a_shared_page_is_free_only_after_its_last_holder_has_gone() -> None:
    allocator = PageAllocator(4)
    pages = allocator.allocate(2)
    allocator.share(pages[:1])
    assert [allocator.ref_count(page) for page in pages] == [2, 1]
    allocator.free(pages)
    assert [allocator.ref_count(page) for page in pages] == [1, 0]
    assert (allocator.num_used, allocator.num_free) == (1, 2)
    allocator.free(pages[:1])
    assert (allocator.num_used, allocator.num_free) == (0, 3)


@pytest.mark.parametrize("method", ["free", "share"])
@pytest.mark.parametrize(
    ("pages", "message"),
    [
        ([1, 0], "page 0 is the null page"),
        ([1, 3], "page 3 is free already"),
        ([1, 5], "5 is no page id; these are Python ints from 0 to 4"),
        ([1, -1], "-1 is no page id"),
        ([np.int64(1)], r"np.int64\(1\) is no page id"),
    ],
)
def test_a_wrong_page_is_named_and_nothing_is_lost(method: str, pages: list[int], message: str) -> None:
    allocator = PageAllocator(5)
    allocator.allocate(2)
    before = state(allocator)
    with pytest.raises(AllocatorError, match=message):
        getattr(allocator, method)(pages)
    assert state(allocator) == before


def test_a_double_free_within_one_call_is_seen_before_anything_is_freed() -> None:
    allocator = PageAllocator(5)
    allocator.allocate(2)
    with pytest.raises(AllocatorError, match="page 2 is given back 2 times at once, its references are 1"):
        allocator.free([1, 2, 2])
    assert (allocator.ref_count(1), allocator.ref_count(2)) == (1, 1)


def test_a_negative_count_and_an_unknown_id_are_refused() -> None:
    allocator = PageAllocator(5)
    with pytest.raises(AllocatorError, match="cannot allocate -1 pages"):
        allocator.allocate(-1)
    with pytest.raises(AllocatorError, match="5 is no page id"):
        allocator.ref_count(5)


@pytest.mark.parametrize("num_pages", [1, 0, -3])
def test_a_cache_without_a_single_page_to_hand_out_is_refused(num_pages: int) -> None:
    with pytest.raises(ConfigError, match=f"room for {num_pages} pages; it needs at least 2"):
        PageAllocator(num_pages)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda a: a._free.append(a._free[0]), "twice in the line"),
        (lambda a: a._free.append(1), "page 1: 1 references, in the line"),
        (lambda a: a._free.popleft(), "page 3: 0 references, not in the line"),
        (lambda a: a._free.append(NULL_PAGE), "null page 0 or an unknown page"),
        (lambda a: a._free.append(99), "null page 0 or an unknown page"),
        (lambda a: a._references.__setitem__(NULL_PAGE, 2), "null page 0 or an unknown page"),
        (lambda a: a._references.__setitem__(1, -1), "page 1: -1 references"),
    ],
)
def test_check_notices_damage(damage, message: str) -> None:
    allocator = PageAllocator(5)
    allocator.allocate(2)
    allocator.check()
    damage(allocator)
    with pytest.raises(AllocatorError, match=message):
        allocator.check()


# What a batch of requests does to the cache: request number, and the length it grows to (None: it ends).
histories = st.lists(st.tuples(st.integers(0, 3), st.none() | st.integers(0, 200)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    st.sampled_from([Layout(4), Layout(4, 2), Layout(4, 3, 2), Layout(1, 8), Layout(16, 4, 16)]),
    st.integers(2, 30),
    histories,
)
def test_page_tables_cover_their_lengths_and_never_share_by_accident(layout, num_pages, history) -> None:
    allocators = [PageAllocator(num_pages) for _ in range(2)]
    tables = [[PageTable(allocator, layout) for _ in range(4)] for allocator in allocators]
    lengths = [0] * 4
    for request, length in history:
        for allocator, rank_tables in zip(allocators, tables, strict=True):
            table = rank_tables[request]
            before = list(table.pages)
            if length is None:
                table.release()
                assert table.pages == []
                continue
            try:
                assert before + table.grow(length) == table.pages
            except OutOfPages as error:
                assert (
                    error.asked == layout.pages_for(length) - len(before) > error.free == allocator.num_free
                )
                assert table.pages == before
        grown = length is not None and layout.pages_for(length) <= len(tables[0][request].pages)
        lengths[request] = 0 if length is None else max(lengths[request], length * grown)

        # Every rank holds the same tables; each covers its request with no page to spare; no page is in two.
        assert [table.pages for table in tables[0]] == [table.pages for table in tables[1]]
        held = [page for table in tables[0] for page in table.pages]
        assert len(held) == len(set(held)) == allocators[0].num_used and NULL_PAGE not in held
        for table, needed in zip(tables[0], lengths, strict=True):
            assert needed <= table.capacity < needed + layout.virtual_block
        allocators[0].check()


def test_a_released_table_gives_its_last_page_back_first_and_can_grow_again() -> None:
    allocator = PageAllocator(5)
    table = PageTable(allocator, Layout(block_size=4, world=2))
    assert table.grow(17) == [1, 2, 3]
    table.release()
    table.release()  # an empty table has nothing to give back
    assert allocator.num_used == 0
    assert table.grow(32) == [4, 3, 2, 1]


def test_releasing_a_table_keeps_the_pages_another_request_shares() -> None:
    allocator = PageAllocator(5)
    table = PageTable(allocator, Layout(block_size=4))
    table.grow(12)
    allocator.share(table.pages[:2])
    table.release()
    assert [allocator.ref_count(page) for page in (1, 2, 3)] == [1, 1, 0]
