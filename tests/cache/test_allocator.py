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


def state(allocator: PageAllocator) -> tuple[list[int], list[int], frozenset[int]]:
    """All that can be seen: reference counts, the order in which free pages will be handed out, and what is kept."""
    counts = [allocator.ref_count(page) for page in range(allocator.num_pages)]
    return counts, allocator.free_line, allocator.kept


class Lockstep(RuleBasedStateMachine):
    """Two ranks make the same calls; both must do what lists of free pages and a count of references say."""

    @initialize(num_pages=st.integers(2, 20))
    def start(self, num_pages: int) -> None:
        self.ranks = [PageAllocator(num_pages), PageAllocator(num_pages)]
        self.line = list(range(1, num_pages))
        self.kept_line: list[int] = []
        self.kept: set[int] = set()
        self.forgotten: list[tuple[PageAllocator, int]] = []
        self.references: Counter[int] = Counter()

    def refuse(self, error: type[Exception], method: str, *arguments: object) -> None:
        """Both ranks refuse the call, and nothing is lost."""
        for rank in self.ranks:
            before = state(rank)
            with pytest.raises(error):
                getattr(rank, method)(*arguments)
            assert state(rank) == before

    @rule(count=st.integers(0, 8))
    def allocate(self, count: int) -> None:
        if count > len(self.line) + len(self.kept_line):
            self.refuse(OutOfPages, "allocate", count)
            return
        evicted = self.kept_line[: max(count - len(self.line), 0)]
        expected, self.line = [*self.line[:count], *evicted], self.line[count:]
        self.kept_line = self.kept_line[len(evicted) :]
        self.kept -= set(evicted)
        self.forgotten.clear()
        assert [rank.allocate(count) for rank in self.ranks] == [expected, expected]
        assert self.forgotten == [(rank, page) for rank in self.ranks for page in evicted]
        self.references.update(expected)

    @precondition(lambda self: self.references or self.kept_line)
    @rule(data=st.data())
    def share(self, data: st.DataObject) -> None:
        pages = data.draw(st.lists(st.sampled_from(sorted({*self.references, *self.kept_line})), max_size=6))
        for rank in self.ranks:
            rank.share(pages)
        self.references.update(pages)
        self.kept_line = [page for page in self.kept_line if page not in pages]

    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        page = data.draw(st.integers(-1, self.ranks[0].num_pages))
        if page not in self.references or page in self.kept:
            self.refuse(AllocatorError, "keep", page, lambda page: None)
            return
        for rank in self.ranks:
            rank.keep(page, lambda page, rank=rank: self.forgotten.append((rank, page)))
        self.kept.add(page)

    @rule(data=st.data())
    def unkeep(self, data: st.DataObject) -> None:
        page = data.draw(st.integers(-1, self.ranks[0].num_pages))
        if page not in self.kept:
            self.refuse(AllocatorError, "unkeep", page)
            return
        for rank in self.ranks:
            rank.unkeep(page)
        self.kept.remove(page)
        if page in self.kept_line:
            self.kept_line.remove(page)
            self.line.append(page)

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
                (self.kept_line if page in self.kept else self.line).append(page)

    @rule(data=st.data(), method=st.sampled_from(["free", "share"]))
    def misuse(self, data: st.DataObject, method: str) -> None:
        """One wrong id anywhere among right ones spoils the whole call."""
        nobodys = [*self.line, *(self.kept_line if method == "free" else [])]
        bad = st.sampled_from([NULL_PAGE, -1, self.ranks[0].num_pages, *nobodys])
        pages = data.draw(st.permutations([data.draw(bad), *self.references]))
        self.refuse(AllocatorError, method, pages)

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
            assert rank.num_free == len(self.line) + len(self.kept_line)
            assert rank.num_used == len(self.references)
            counts = [1] + [self.references[page] for page in range(1, rank.num_pages)]
            assert state(rank) == (counts, self.line + self.kept_line, self.kept)


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


def test_a_kept_page_is_found_again_until_it_is_handed_out() -> None:
    allocator, forgotten = PageAllocator(5), []
    allocator.allocate(3)
    for page in (1, 2):
        allocator.keep(page, forgotten.append)
    allocator.free([1, 2, 3])
    assert allocator.free_line == [4, 3, 1, 2]
    allocator.share([1])
    allocator.share([1])
    assert (allocator.ref_count(1), allocator.num_used, forgotten) == (2, 1, [])
    allocator.free([1, 1])
    assert allocator.allocate(3) == [4, 3, 2]
    assert (forgotten, allocator.kept) == ([2], {1})


def test_what_is_not_kept_any_more_goes_before_what_is() -> None:
    allocator = PageAllocator(4)
    allocator.allocate(3)
    for page in (1, 2, 3):
        allocator.keep(page, pytest.fail)
    allocator.free([1, 2, 3])
    for page in (3, 2, 1):
        allocator.unkeep(page)
    assert allocator.allocate(3) == [3, 2, 1]


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda a: a.keep(1, print), "page 1 is kept already; `unkeep` it before"),
        (lambda a: a.keep(2, print), "page 2 is free already, only its content is kept"),
        (lambda a: a.keep(3, print), "page 3 is free already"),
        (lambda a: a.keep(NULL_PAGE, print), "page 0 is the null page"),
        (lambda a: a.keep(9, print), "9 is no page id"),
        (lambda a: a.unkeep(3), "page 3 is not kept"),
        (lambda a: a.free([2]), "page 2 is free already, only its content is kept: a double free"),
    ],
)
def test_keeping_the_wrong_page_is_refused(misuse, message: str) -> None:
    allocator = PageAllocator(5)
    for page in allocator.allocate(2):
        allocator.keep(page, print)
    allocator.free([2])
    before = state(allocator)
    with pytest.raises(AllocatorError, match=message):
        misuse(allocator)
    assert state(allocator) == before


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
        (lambda a: a._kept.update({3: print}), "in the wrong line"),
        (lambda a: a._kept_free.update({3: None}), "twice in the line"),
        (lambda a: a._kept_free.update({a._free.pop(): None}), "in the wrong line"),
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
            assert table.capacity == len(table.pages) * layout.virtual_block
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


def test_a_table_begins_with_pages_of_another_and_holds_what_is_to_be_copied() -> None:
    allocator = PageAllocator(8)
    first, second = (PageTable(allocator, Layout(block_size=4)) for _ in range(2))
    first.grow(12)
    second.begin(first.pages[:2], source_page=first.pages[2])
    assert second.grow(12) == [4] and second.pages == [1, 2, 4]
    first.release()
    assert [allocator.ref_count(page) for page in (1, 2, 3)] == [1, 1, 1]
    second.drop_source_page()
    assert (allocator.ref_count(3), second.source_page) == (0, None)
    second.release()
    assert allocator.free_line == [5, 6, 7, 3, 4, 2, 1]


def test_a_table_that_ends_before_its_copy_gives_the_source_back_too() -> None:
    allocator = PageAllocator(8)
    first, second = (PageTable(allocator, Layout(block_size=4)) for _ in range(2))
    first.grow(8)
    second.begin(first.pages[:1], source_page=first.pages[1])
    second.release()
    assert [allocator.ref_count(page) for page in (1, 2)] == [1, 1]
    assert (second.pages, second.source_page) == ([], None)


def test_a_table_that_is_not_empty_or_a_page_of_nobody_is_refused() -> None:
    allocator = PageAllocator(8)
    first, second = (PageTable(allocator, Layout(block_size=4)) for _ in range(2))
    first.grow(8)
    with pytest.raises(AllocatorError, match="only while it is empty; release it first"):
        first.begin([1])
    with pytest.raises(AllocatorError, match="page 5 is free already"):
        second.begin([1], source_page=5)
    assert (second.pages, second.source_page, allocator.ref_count(1)) == ([], None, 1)
