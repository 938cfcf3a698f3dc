"""Placement as properties: dealing positions out to ranks, and finding them again, for any layout."""

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import ConfigError

WORLDS = range(1, 9)
BLOCK_SIZES = (1, 4, 6, 16, 64)
POSITION_METHODS = ("owner", "local", "page_index", "offset")
# The largest position whose int32 arithmetic must not overflow.
MAX_POSITION = 2**31 - 2


def divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


EVERY_LAYOUT = [Layout(b, w, i) for w in WORLDS for b in BLOCK_SIZES for i in divisors(b)]


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    block_size = draw(st.integers(1, 128))
    return Layout(block_size, draw(st.integers(1, 8)), draw(st.sampled_from(divisors(block_size))))


positions = st.integers(0, MAX_POSITION)
# One length of array, so that jax compiles each operation once for all examples.
position_arrays = st.lists(st.integers(-3, MAX_POSITION), min_size=16, max_size=16)


def deal(layout: Layout, length: int) -> list[list[int]]:
    """The positions each rank holds, dealt out like cards: `interleave` at a time, rank after rank."""
    hands: list[list[int]] = [[] for _ in range(layout.world)]
    rank = 0
    for position in range(length):
        hands[rank].append(position)
        if (position + 1) % layout.interleave == 0:
            rank = (rank + 1) % layout.world
    return hands


def test_every_layout_agrees_with_dealing_the_positions_out_one_by_one() -> None:
    for layout in EVERY_LAYOUT:
        length = 2 * layout.virtual_block + layout.interleave + 1
        for rank, hand in enumerate(deal(layout, length)):
            for local, position in enumerate(hand):
                assert (layout.owner(position), layout.local(position)) == (rank, local), (layout, position)
            ends = np.arange(length + 1)
            held = np.searchsorted(hand, ends)  # the rank's positions below each end
            np.testing.assert_array_equal(layout.local_length(ends, rank), held, err_msg=f"{layout} {rank}")


def test_the_picture_in_the_module_docstring() -> None:
    layout, position = Layout(block_size=4, world=2, interleave=2), np.arange(10)
    assert layout.owner(position).tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert layout.local(position).tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 4, 5]
    assert layout.page_index(position).tolist() == [0, 0, 0, 0, 0, 0, 0, 0, 1, 1]
    assert layout.offset(position).tolist() == [0, 1, 0, 1, 2, 3, 2, 3, 0, 1]


@settings(max_examples=200, deadline=None)
@given(layouts(), positions)
def test_position_and_owner_local_are_inverse(layout: Layout, position: int) -> None:
    owner, local = layout.owner(position), layout.local(position)
    assert 0 <= owner < layout.world
    assert layout.position(owner, local) == position


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(0, 7), st.integers(0, 2**24))
def test_every_owner_local_is_some_position(layout: Layout, rank: int, local: int) -> None:
    owner = rank % layout.world
    position = layout.position(owner, local)
    assert (layout.owner(position), layout.local(position)) == (owner, local)


@settings(max_examples=200, deadline=None)
@given(layouts(), positions)
def test_page_and_offset_address_the_local_record(layout: Layout, position: int) -> None:
    page_index, offset = layout.page_index(position), layout.offset(position)
    assert 0 <= offset < layout.block_size
    assert page_index * layout.block_size + offset == layout.local(position)


@settings(max_examples=200, deadline=None)
@given(layouts(), st.integers(0, MAX_POSITION))
def test_local_lengths_sum_to_the_length(layout: Layout, length: int) -> None:
    lengths = [layout.local_length(length, rank) for rank in range(layout.world)]
    assert sum(lengths) == length
    assert all(later <= earlier <= later + layout.interleave for earlier, later in pairwise(lengths))


def test_a_short_sequence_leaves_ranks_empty() -> None:
    layout = Layout(block_size=64, world=4, interleave=4)
    assert [layout.local_length(1, rank) for rank in range(4)] == [1, 0, 0, 0]
    assert [layout.local_length(9, rank) for rank in range(4)] == [4, 4, 1, 0]
    assert [layout.local_length(0, rank) for rank in range(4)] == [0, 0, 0, 0]


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(0, 10_000))
def test_a_page_is_tiled_by_its_positions(layout: Layout, page_index: int) -> None:
    """The positions of one virtual block fill every (owner, offset) of one page exactly once."""
    first = page_index * layout.virtual_block
    position = np.arange(first, first + layout.virtual_block)
    assert (layout.page_index(position) == page_index).all()
    cells = layout.owner(position) * layout.block_size + layout.offset(position)
    assert sorted(cells.tolist()) == list(range(layout.virtual_block))


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(1, MAX_POSITION))
def test_pages_for_is_just_enough(layout: Layout, length: int) -> None:
    pages = layout.pages_for(length)
    assert pages == layout.page_index(length - 1) + 1
    assert (pages - 1) * layout.virtual_block < length <= pages * layout.virtual_block
    assert all(layout.local_length(length, rank) <= pages * layout.block_size for rank in range(layout.world))


@settings(max_examples=100, deadline=None)
@given(layouts(), st.lists(st.integers(0, 10_000), min_size=1, max_size=40, unique=True), st.randoms())
def test_slots_of_different_records_never_meet(layout: Layout, wanted: list[int], random) -> None:
    """Over a shuffled page table no two positions share a slot of a rank, and each lies in its page."""
    page_table = list(range(1, layout.pages_for(max(wanted) + 1) + 1))
    random.shuffle(page_table)
    taken = set()
    for position in wanted:
        page = page_table[layout.page_index(position)]
        slot = layout.slot(position, page)
        assert slot // layout.block_size == page
        taken.add((layout.owner(position), slot))
    assert len(taken) == len(wanted)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(-(2**20), -1))
def test_nothing_stays_nothing(layout: Layout, negative: int) -> None:
    for method in POSITION_METHODS:
        assert getattr(layout, method)(negative) == -1, method
    assert layout.slot(negative, 3) == layout.slot(3, negative) == -1
    assert layout.position(negative, 3) == layout.position(0, negative) == layout.position(-1, -1) == -1
    assert layout.pages_for(negative) == layout.pages_for(0) == 0
    assert all(layout.local_length(negative, rank) == 0 for rank in range(layout.world))


def all_arrays(layout: Layout, position, page, rank) -> dict[str, object]:
    """Every method at once, for any kind of integers."""
    owner, local = layout.owner(position), layout.local(position)
    return {method: getattr(layout, method)(position) for method in POSITION_METHODS} | {
        "slot": layout.slot(position, page),
        "position": layout.position(owner, local),
        "local_length": layout.local_length(position, rank),
        "pages_for": layout.pages_for(position),
    }


@settings(max_examples=40, deadline=None)
@given(layouts(), position_arrays, st.integers(0, 7))
def test_ints_numpy_and_jax_agree(layout: Layout, position: list[int], rank: int) -> None:
    rank %= layout.world
    by_int = [all_arrays(layout, p, 5, rank) for p in position]
    by_numpy = all_arrays(layout, np.array(position, np.int32), np.int32(5), rank)
    by_jax = all_arrays(layout, jnp.array(position, jnp.int32), jnp.int32(5), jnp.int32(rank))
    for name in by_numpy:
        expected = [values[name] for values in by_int]
        assert all(type(value) is int for value in expected), name
        assert isinstance(by_numpy[name], np.ndarray) and isinstance(by_jax[name], jax.Array), name
        assert by_numpy[name].dtype == by_jax[name].dtype == np.int32, name
        assert by_numpy[name].tolist() == by_jax[name].tolist() == expected, name


@pytest.mark.parametrize("layout", [Layout(64), Layout(64, 4), Layout(16, 3, 4), Layout(6, 8, 6)], ids=str)
def test_traced_positions_and_ranks_agree_with_numpy(layout: Layout) -> None:
    position = np.arange(-2, 3 * layout.virtual_block, dtype=np.int32)[:, None]
    rank = np.arange(layout.world, dtype=np.int32)
    traced = jax.jit(lambda p, r: all_arrays(layout, p, p + 7, r))(position, rank)
    for name, expected in all_arrays(layout, position, position + 7, rank).items():
        np.testing.assert_array_equal(traced[name], expected, err_msg=name)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.integers(-1, MAX_POSITION))
def test_index_keys_of_every_sharding_share_the_page_table(layout: Layout, position: int) -> None:
    for shards in divisors(layout.world):
        index = replace(layout, index_shards=shards).index_layout
        assert index.virtual_block == layout.virtual_block
        assert index.page_index(position) == layout.page_index(position)
        # Rank r holds part r % S: its records' index keys are always among them.
        assert index.owner(position) == (layout.owner(position) % shards if position >= 0 else -1)
    assert replace(layout, index_shards=layout.world).index_layout == layout


def test_a_replicated_index_page_holds_its_keys_in_position_order() -> None:
    index, position = Layout(block_size=4, world=3, interleave=2).index_layout, np.arange(25)
    assert (index.owner(position) == 0).all()
    assert index.offset(position).tolist() == (position % 12).tolist()
    assert index.slot(position, 10).tolist() == (120 + position % 12).tolist()


def test_two_index_shards_split_each_page_between_the_two_halves_of_four_ranks() -> None:
    index = Layout(block_size=2, world=4, index_shards=2).index_layout
    assert index == Layout(block_size=4, world=2)
    assert [[p for p in range(8) if index.owner(p) == part] for part in (0, 1)] == [
        [0, 2, 4, 6],
        [1, 3, 5, 7],
    ]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"block_size": 0}, "block_size is 0; it must be an int of at least 1"),
        ({"block_size": 64, "world": -1}, "world is -1"),
        ({"block_size": 64, "interleave": 0}, "interleave is 0"),
        ({"block_size": 16.0}, "block_size is 16.0"),
        ({"block_size": 64, "world": True}, "world is True"),
        (
            {"block_size": 6, "interleave": 4},
            "interleave 4 does not divide block_size 6; use one of 1, 2, 3, 6",
        ),
        ({"block_size": 4, "interleave": 8}, "interleave 8 does not divide block_size 4"),
        ({"block_size": 8, "world": 6, "index_shards": 0}, "index_shards is 0"),
        ({"block_size": 8, "world": 6, "index_shards": True}, "index_shards is True"),
        (
            {"block_size": 8, "world": 6, "index_shards": 4},
            "index_shards 4 does not divide world 6, the DCP size; use one of 1, 2, 3, 6",
        ),
        ({"block_size": 8, "world": 6, "index_shards": 12}, "index_shards 12 does not divide world 6"),
    ],
)
def test_an_impossible_layout_is_refused_with_what_would_work(fields: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Layout(**fields)


def test_the_host_side_of_the_cache_does_not_load_jax() -> None:
    program = (
        "import sys, glm_dcp_jax.cache.placement, glm_dcp_jax.cache.allocator; sys.exit('jax' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=60).returncode == 0
