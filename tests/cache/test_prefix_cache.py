"""The prefix cache: what is found, which pages come back, what is evicted, and how it may be misused."""

import hashlib
import os
import random
import subprocess
import sys
import time
from os.path import commonprefix

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.allocator import AllocatorError, OutOfPages, PageAllocator, PageTable
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.prefix_cache import BlockKeys, Match, PrefixCache

BLOCK_OF_4 = Layout(4)


def cache_of(num_pages: int, layout: Layout = BLOCK_OF_4, **options) -> PrefixCache:
    return PrefixCache(PageAllocator(num_pages), layout, **options)


def admit(cache: PrefixCache, keys: BlockKeys) -> tuple[PageTable, Match]:
    """Gives a sequence what is cached of it, all but its last token, and the pages that are missing."""
    match = cache.match(keys, len(keys.tokens) - 1)
    table = cache.acquire(match)
    table.grow(len(keys.tokens))
    return table, match


def serve(cache: PrefixCache, tokens, salt: str = "") -> Match:
    """A sequence from its admission to its end, with every token computed."""
    keys = cache.keys(tokens, salt)
    table, match = admit(cache, keys)
    table.drop_source_page()
    cache.register(table, keys, len(keys.tokens))
    table.release()
    cache.check()
    return match


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(*[st.sampled_from([0, 1, 255, 256, 65536, 2**31 - 1])] * 4), max_size=12),
    st.lists(st.sampled_from([0, 1, 255, 256, 65536, 2**31 - 1]), min_size=1, max_size=5),
)
def test_a_partial_hit_is_the_longest_of_all_siblings(blocks, wanted) -> None:
    cache = cache_of(20)
    for block in blocks:
        serve(cache, block)
    keys = cache.keys(wanted)
    longest = max((len(commonprefix([list(block), wanted])) for block in blocks), default=0)
    assert cache.match(keys, len(wanted)).length == longest


@pytest.mark.parametrize("lookahead", [0, 1])
@pytest.mark.parametrize(("world", "blocks"), [(1, 15), (2, 7), (4, 3), (8, 1)])
class TestHitsOverRanks:
    def test_a_hit_has_the_same_tokens_on_any_number_of_ranks(self, world, blocks, lookahead) -> None:
        """1,050 tokens fill 1,024 tokens' blocks at each W; what a page has beyond 1,000 is left out."""
        cache = cache_of(200, Layout(64, world), lookahead=lookahead)
        prefix = list(range(1000))
        assert serve(cache, prefix + [7] * 50) == Match(queried=1049)
        match = serve(cache, prefix + [8] * 50)
        assert match.length == 1000 - lookahead
        assert len(match.pages) == blocks and match.source_page is not None
        assert match.partial_tokens == 1000 - lookahead - blocks * 64 * world
        assert serve(cache, prefix + [7] * 50).length == 1024
        assert serve(cache, prefix + [7] * 24).length == 1023, "its last token is computed"
        assert (cache.stats.queries, cache.stats.hits) == (3 * 1049 + 1023, 3047 - lookahead)

    def test_a_prefix_is_computed_once_for_32_requests(self, world, blocks, lookahead) -> None:
        cache = cache_of(400, Layout(64, world), lookahead=lookahead)
        prompts = [[*range(1000), *[1000 + number] * 100] for number in range(32)]
        computed = sum(len(prompt) - serve(cache, prompt).length for prompt in prompts)
        assert computed == 1100 + 31 * (100 + lookahead)

    def test_less_than_a_block_is_never_registered(self, world, blocks, lookahead) -> None:
        cache = cache_of(10, Layout(64, world), lookahead=lookahead)
        short = list(range(64 * world - 1 + lookahead))
        serve(cache, short)
        assert cache.match(cache.keys(short), len(short)).length == 0
        serve(cache, [*short, 5])
        assert cache.match(cache.keys(short), len(short)).length == 64 * world - 1


class TestKeys:
    def test_a_key_is_the_hash_of_its_parent_and_its_tokens(self) -> None:
        keys = cache_of(4).keys(range(10))
        root = keys.parent(0)
        first = hashlib.sha256(root + np.arange(4, dtype=np.int32).tobytes()).digest()
        second = hashlib.sha256(first + np.arange(4, 8, dtype=np.int32).tobytes()).digest()
        assert (len(keys), list(keys)) == (2, [first, second])
        assert (keys.parent(1), keys.parent(2)) == (first, second)

    def test_lookahead_puts_the_token_behind_a_block_into_its_key(self) -> None:
        keys = cache_of(4, lookahead=1).keys(range(8))
        assert list(keys) == [
            hashlib.sha256(keys.parent(0) + np.arange(5, dtype=np.int32).tobytes()).digest()
        ]

    def test_token_by_token_is_the_same_as_at_once(self) -> None:
        cache = cache_of(4, lookahead=1)
        at_once, grown = cache.keys(range(23)), cache.keys()
        for token in range(23):
            grown.extend([token])
            assert list(grown) == list(at_once)[: len(grown)]
        assert len(grown) == 5

    def test_all_that_changes_bytes_changes_the_keys(self) -> None:
        caches = [
            cache_of(4),
            cache_of(4, context="fp8_ds_mla"),
            cache_of(4, lookahead=1),
            cache_of(4, Layout(2, 2)),
            cache_of(4, Layout(4, 1, 2)),
        ]
        keys = [cache.keys(range(9))[0] for cache in caches] + [cache_of(4).keys(range(9), salt="a")[0]]
        assert len(set(keys)) == len(keys)
        assert cache_of(9).keys(range(9))[0] == keys[0]

    def test_a_token_that_is_no_int32_is_refused_with_all_that_came_with_it(self) -> None:
        keys = cache_of(4).keys([1, 2])
        with pytest.raises(OverflowError):
            keys.extend([3, 2**31])
        assert list(keys.tokens) == [1, 2]

    @pytest.mark.parametrize("block", [-1, 2])
    def test_a_block_that_is_not_full_has_no_key(self, block) -> None:
        with pytest.raises(IndexError, match=f"block {block} has no key; 2 blocks"):
            cache_of(4).keys(range(10))[block]

    def test_another_salt_finds_nothing(self) -> None:
        cache = cache_of(9)
        serve(cache, range(9), salt="mine")
        assert cache.match(cache.keys(range(9)), 9).length == 0
        assert cache.match(cache.keys(range(9), "mine"), 9).length == 8


class TestLookahead:
    def test_a_continuation_never_gets_a_row_that_another_one_wrote(self) -> None:
        """The row before a fork is computed and registered for either side, and each side finds its own."""
        cache = cache_of(20, lookahead=1)
        shared, one, other = list(range(4)), [7] * 5, [8] * 5
        serve(cache, shared + one)
        match = serve(cache, shared + other)
        assert (match.length, match.pages, match.partial_tokens) == (3, (), 3)
        first, second = (cache.match(cache.keys(shared + tail), 8) for tail in (one, other))
        assert first.length == second.length == 8
        assert not set(first.pages) & set(second.pages)

    def test_a_block_waits_for_the_token_behind_it(self) -> None:
        cache = cache_of(9, lookahead=1)
        keys = cache.keys(range(4))
        table, _ = admit(cache, keys)
        cache.register(table, keys, 4)
        assert not cache._allocator.kept
        keys.extend([4])
        cache.register(table, keys, 4)
        assert cache._allocator.kept == {table.pages[0]}


class TestEviction:
    def test_pages_that_nobody_can_find_go_first_then_the_longest_unused_from_its_end(self) -> None:
        cache = cache_of(8)  # 7 pages
        serve(cache, [1] * 9)  # pages 1 and 2 are registered, 3 is a tail
        serve(cache, [2] * 4)  # page 4
        serve(cache, [1] * 5)  # a hit on page 1, which is used last now; 5 is a tail
        assert cache._allocator.allocate(7) == [6, 7, 3, 5, 2, 4, 1]
        assert cache.stats.evictions == 3

    def test_a_held_page_is_not_evicted(self) -> None:
        cache = cache_of(4)
        keys = cache.keys(range(4))
        table, _ = admit(cache, keys)
        cache.register(table, keys, 4)
        cache._allocator.free(cache._allocator.allocate(2))
        assert cache.match(cache.keys(range(5)), 4).pages == tuple(table.pages)

    def test_the_source_of_a_copy_stays_until_it_is_dropped(self) -> None:
        cache = cache_of(4)
        serve(cache, range(4))
        table, match = admit(cache, cache.keys([0, 1, 9]))
        assert (match.length, match.source_page) == (2, 1) and table.pages == [2]
        assert cache._allocator.allocate(1) == [3]
        with pytest.raises(OutOfPages):
            cache._allocator.allocate(1)
        table.drop_source_page()
        table.drop_source_page()  # nothing is left to drop
        assert cache._allocator.allocate(1) == [1]

    def test_a_block_computed_twice_outlives_the_first_of_its_pages(self) -> None:
        """Two requests in one step: the second one's pages stand in, so its own continuation stays within reach."""
        cache = cache_of(9)
        sequences = [cache.keys([*range(4), *[tail] * 4]) for tail in (7, 8)]
        tables = [admit(cache, keys)[0] for keys in sequences]
        for table, keys in zip(tables, sequences, strict=True):
            cache.register(table, keys, 8)
        assert cache.match(sequences[1], 8).pages == (tables[0].pages[0], tables[1].pages[1])
        tables[0].release()
        cache.check()
        cache._allocator.allocate(6)  # all that is free
        cache.check()
        assert cache.match(sequences[1], 8).pages == tuple(tables[1].pages)
        assert cache.stats.evictions == 2

    def test_a_preempted_sequence_finds_its_own_blocks(self) -> None:
        cache = cache_of(9)
        keys = cache.keys(range(10))
        table, _ = admit(cache, keys)
        cache.register(table, keys, 9)
        pages = tuple(table.pages)
        table.release()
        assert cache.match(keys, 9).pages == pages[:2]


def test_reset_forgets_what_is_free_and_says_whether_that_was_all() -> None:
    cache = cache_of(9)
    serve(cache, [1] * 8)
    keys = cache.keys([2] * 8)
    table, _ = admit(cache, keys)
    cache.register(table, keys, 8)
    assert not cache.reset()
    cache.check()
    assert cache.match(cache.keys([1] * 8), 8).length == 0
    assert cache.match(keys, 8).length == 8
    table.release()
    assert cache.reset() and not cache._allocator.kept
    assert cache.match(keys, 8).length == 0 and cache.stats.evictions == 0
    assert cache._allocator.num_free == 8


def test_without_prefix_caching_nothing_is_registered_or_found() -> None:
    cache = cache_of(9, enabled=False)
    assert serve(cache, range(8)) == serve(cache, range(8)) == Match()
    assert not cache._allocator.kept and cache.stats.queries == 0


@pytest.mark.parametrize("limit", [-3, 0])
def test_nothing_is_cached_of_no_tokens(limit) -> None:
    cache = cache_of(9)
    serve(cache, range(8))
    assert cache.match(cache.keys(range(8)), limit) == Match()


@pytest.mark.parametrize("computed", [0, 4])
def test_a_match_from_before_an_eviction_is_refused(computed) -> None:
    """Whether the page holds nothing of note by now, or a block of others."""
    cache = cache_of(2)
    serve(cache, range(4))
    match = cache.match(cache.keys(range(5)), 4)
    keys = cache.keys([9] * 4)
    table, _ = admit(cache, keys)
    cache.register(table, keys, computed)
    with pytest.raises(AllocatorError, match="page 1 no longer holds what was matched; match again"):
        cache.acquire(match)
    assert cache.stats.queries == 6, "only those of the two that were served"


def test_pages_of_other_tokens_are_not_registered() -> None:
    cache = cache_of(9)
    keys = cache.keys(range(8))
    table, _ = admit(cache, keys)
    cache.register(table, keys, 4)
    with pytest.raises(AllocatorError, match="page 1 is registered for other tokens"):
        cache.register(table, cache.keys([9] * 8), 8)
    cache.check()


def _outlive_the_parent(cache: PrefixCache) -> None:
    cache._allocator.unkeep(1)
    cache._forget(1)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda c: c._by_page.pop(2), "differ"),
        (lambda c: c._allocator._kept.pop(2), "a free page stands in the wrong line"),
        (lambda c: c._by_page.update({1: c._by_page[2]}), "page 1 has a block that is not registered for it"),
        (lambda c: setattr(c._by_page[2], "tokens", b"else"), "its key is not that of its tokens"),
        (lambda c: c._children.popitem(), "not among the children"),
        (lambda c: c._children.update({b"": []}), "the children of  are none"),
        (lambda c: c._children.update({b"": [c._by_page[2]]}), "another parent's child"),
        (_outlive_the_parent, "has outlived its parent"),
        (lambda c: c._allocator._kept_free.move_to_end(2), "page 2 would be evicted after every page"),
    ],
)
def test_check_notices_damage(damage, message) -> None:
    cache = cache_of(9)
    serve(cache, range(12))
    damage(cache)
    with pytest.raises(AllocatorError, match=message):
        cache.check()


TRACE = """
import random, sys
from glm_dcp_jax.cache.allocator import PageAllocator
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.prefix_cache import PrefixCache

draw = random.Random(0)
cache = PrefixCache(PageAllocator(40), Layout(2, 2), "context", 1)
for _ in range(300):
    keys = cache.keys(draw.choices([0, 1], k=draw.randrange(1, 40)), draw.choice(["", "salt"]))
    match = cache.match(keys, len(keys.tokens) - 1)
    print(match)
    table = cache.acquire(match)
    table.grow(len(keys.tokens))
    table.drop_source_page()
    cache.register(table, keys, len(keys.tokens))
    table.release()
print(cache.stats, "jax" in sys.modules)
"""


def test_every_process_takes_the_same_decisions_without_jax() -> None:
    run = [sys.executable, "-c", TRACE]
    traces = [
        subprocess.run(
            run, env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        ).stdout
        for seed in ("1", "2")
    ]
    assert traces[0] == traces[1]
    assert traces[0].strip().endswith(b"False") and b"evictions=0" not in traces[0]


def test_a_million_tokens_are_matched_in_milliseconds() -> None:
    cache = cache_of(2000, Layout(64, 8), lookahead=1)
    tokens = random.Random(0).choices(range(150_000), k=1_000_000)
    assert serve(cache, tokens).length == 0
    keys = cache.keys(tokens)

    def match() -> float:
        begin = time.perf_counter()
        assert cache.match(keys, 999_999).length == 999_936
        return time.perf_counter() - begin

    hashing_too, matching = match(), min(match() for _ in range(3))
    assert hashing_too < 0.4, "4 MB at 10 MB/s"
    assert matching < 0.1
