"""Transfer plans against brute force, token by token."""

from collections import Counter
from math import ceil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer.plan import Plan, Side, make_plan

SIZES = (1, 2, 3, 4, 5, 6, 8)


@st.composite
def sides(draw: st.DrawFn, blocks: tuple[int, ...]) -> Side:
    """An engine: any tp, any DCP size that divides it, any interleave that divides the block; CKV or index keys."""
    ranks = draw(st.sampled_from(SIZES))
    world = draw(st.sampled_from([size for size in SIZES if ranks % size == 0]))
    block = draw(st.sampled_from(blocks))
    interleave = draw(st.sampled_from([size for size in range(1, block + 1) if block % size == 0]))
    shards = draw(st.sampled_from([size for size in SIZES if world % size == 0]))
    layout = Layout(block, world, interleave, shards)
    return Side(ranks, draw(st.sampled_from([layout, layout.index_layout, layout.mtp_layout.index_layout])))


def spread(plan: Plan, producer: Side, consumer: Side) -> list[tuple[int, int, int, int, int]]:
    """Every token that moves: (producer rank, consumer rank, position, local index there, here), from both local
    indices, which must say the same."""
    moved = []
    for pair in plan.pairs:
        runs = pair.runs
        for first, source, target, length in zip(
            runs.position, runs.source, runs.target, runs.length, strict=True
        ):
            for step in range(int(length)):
                there, here = int(source) + step, int(target) + step
                position = producer.layout.position(pair.producer % producer.layout.world, there)
                assert position == consumer.layout.position(pair.consumer % consumer.layout.world, here)
                assert step or position == first
                moved.append((pair.producer, pair.consumer, position, there, here))
    return moved


def check(plan: Plan, producer: Side, consumer: Side, start: int, end: int) -> None:
    moved = spread(plan, producer, consumer)
    got = Counter((consumer_rank, position) for _, consumer_rank, position, _, _ in moved)
    wanted = {
        (rank, position)
        for position in range(start, end)
        for rank in range(consumer.ranks)
        if position // consumer.layout.interleave % consumer.layout.world == rank % consumer.layout.world
    }
    assert set(got) == wanted, "something is missing, or outside"
    assert set(got.values()) <= {1}, "a token comes twice"
    for there, _, position, _, _ in moved:
        assert position // producer.layout.interleave % producer.layout.world == there % producer.layout.world
    for pair in plan.pairs:
        assert (np.diff(pair.runs.position) > 0).all() and (pair.runs.length > 0).all()
        for layout, local in ((producer.layout, pair.runs.source), (consumer.layout, pair.runs.target)):
            pages = local // layout.block_size
            assert (pages == (local + pair.runs.length - 1) // layout.block_size).all(), (
                "a run goes over a page's end"
            )


def check_readers(plan: Plan, producer: Side, consumer: Side) -> None:
    """Every producer rank is let go exactly once, when all consumer ranks have said that they are done."""
    assert set(plan.readers) == set(range(producer.ranks))
    pending = {rank: set(readers) for rank, readers in plan.readers.items()}
    let_go: Counter[int] = Counter()
    for done in range(consumer.ranks):
        for rank, readers in pending.items():
            if done in readers:
                readers.remove(done)
                let_go[rank] += not readers
    assert let_go == Counter(range(producer.ranks))
    for pair in plan.pairs:
        assert pair.consumer in plan.readers[pair.producer]
    busy = {pair.producer for pair in plan.pairs}
    assert all(len(readers) == 1 for rank, readers in plan.readers.items() if rank not in busy)


@settings(max_examples=400, deadline=None)
@given(st.data(), sides((4, 6, 8, 16)), sides((4, 6, 8, 12, 16)))
def test_plans_agree_with_brute_force(data: st.DataObject, producer: Side, consumer: Side) -> None:
    end = data.draw(st.integers(0, 150))
    start = data.draw(st.integers(0, end))
    plan = make_plan(producer, consumer, start, end)
    check(plan, producer, consumer, start, end)
    check_readers(plan, producer, consumer)


@pytest.mark.slow
@settings(max_examples=6000, deadline=None)
@given(st.data(), sides((4, 6, 8, 16, 32, 64, 128)), sides((4, 8, 12, 16, 32, 64, 128)))
def test_plans_agree_with_brute_force_at_length(data: st.DataObject, producer: Side, consumer: Side) -> None:
    end = data.draw(st.integers(0, 1200))
    start = data.draw(st.integers(0, end))
    plan = make_plan(producer, consumer, start, end)
    check(plan, producer, consumer, start, end)
    check_readers(plan, producer, consumer)


BLOCK = 64


def by_block(ranks: int, world: int) -> Side:
    """Whole blocks on one rank, as the seed has it."""
    return Side(ranks, Layout(BLOCK, world, BLOCK))


def table_entries(plan: Plan) -> dict[int, dict[int, list[tuple[int, int]]]]:
    """consumer -> producer -> (remote page index, local page index)."""
    found: dict[int, dict[int, list[tuple[int, int]]]] = {}
    for pair in plan.pairs:
        entries = zip((pair.runs.source // BLOCK).tolist(), (pair.runs.target // BLOCK).tolist(), strict=True)
        found.setdefault(pair.consumer, {})[pair.producer] = list(entries)
    return found


def whole(remote: range, local: range) -> list[tuple[int, int]]:
    return list(zip(remote, local, strict=True))


def dealt(part: int, parts: int) -> tuple[range, range]:
    """The blocks of a part, by their number in all and within the part."""
    blocks = range(part, 13, parts)
    return blocks, range(len(blocks))


def collected(part: int, parts: int) -> list[tuple[int, int]]:
    """A part's blocks to where all blocks are."""
    blocks, places = dealt(part, parts)
    return whole(places, blocks)


ALL = whole(range(13), range(13))
SEED = {
    ((4, 1), (4, 1)): {rank: {rank: ALL} for rank in range(4)},
    ((2, 1), (4, 1)): {rank: {rank // 2: ALL} for rank in range(4)},
    ((4, 4), (4, 4)): {rank: {rank: whole(*[dealt(rank, 4)[1]] * 2)} for rank in range(4)},
    ((4, 1), (4, 4)): {rank: {rank: whole(*dealt(rank, 4))} for rank in range(4)},
    ((4, 4), (4, 1)): {rank: {part: collected(part, 4) for part in range(4)} for rank in range(4)},
    ((2, 2), (4, 4)): {
        0: {0: whole(range(0, 7, 2), range(4))},
        1: {1: whole(range(0, 5, 2), range(3))},
        2: {0: whole(range(1, 6, 2), range(3))},
        3: {1: whole(range(1, 6, 2), range(3))},
    },
    ((2, 1), (4, 4)): {rank: {rank // 2: whole(*dealt(rank, 4))} for rank in range(4)},
    ((8, 8), (8, 8)): {rank: {rank: whole(*[dealt(rank, 8)[1]] * 2)} for rank in range(8)},
    ((8, 8), (4, 4)): {
        rank: {
            rank: whole(range(2), range(0, 4, 2)),
            rank + 4: whole(range(2 if rank == 0 else 1), range(1, 4 if rank == 0 else 2, 2)),
        }
        for rank in range(4)
    },
    ((4, 4), (2, 2)): {
        0: {0: whole(range(4), range(0, 7, 2)), 2: whole(range(3), range(1, 6, 2))},
        1: {1: whole(range(3), range(0, 5, 2)), 3: whole(range(3), range(1, 6, 2))},
    },
}  # fmt: skip


@pytest.mark.parametrize(("producer", "consumer"), list(SEED), ids=str)
def test_thirteen_blocks_between_block_granular_layouts(producer, consumer) -> None:
    """Worked by hand: block g is on rank g % dcp, as entry g // dcp of the page table."""
    plan = make_plan(by_block(*producer), by_block(*consumer), 0, 13 * BLOCK)
    assert table_entries(plan) == SEED[producer, consumer]


def test_more_holders_than_readers_share_the_work() -> None:
    plan = make_plan(by_block(8, 1), by_block(2, 1), 0, 8 * BLOCK)
    assert [(pair.producer, pair.consumer, pair.runs.tokens) for pair in plan.pairs] == [
        (rank, rank // 4, 2 * BLOCK) for rank in range(8)
    ]


def test_replicas_of_a_partly_sharded_cache_share_its_readers() -> None:
    """tp 4, dcp 2: ranks 0 and 2 hold the even blocks, and the four readers of these are two for each."""
    plan = make_plan(by_block(4, 2), by_block(4, 1), 0, 4 * BLOCK)
    readers_of = {rank: [pair.consumer for pair in plan.of_producer(rank)] for rank in range(4)}
    assert readers_of == {0: [0, 1], 1: [0, 1], 2: [2, 3], 3: [2, 3]}


def test_a_short_prompt_leaves_ranks_without_a_slice_which_are_let_go_all_the_same() -> None:
    plan = make_plan(by_block(4, 4), by_block(4, 4), 0, BLOCK)
    assert [(pair.producer, pair.consumer) for pair in plan.pairs] == [(0, 0)]
    assert plan.readers == {rank: frozenset([rank]) for rank in range(4)}


def test_nothing_moves_where_the_consumer_has_it_all() -> None:
    plan = make_plan(by_block(4, 4), by_block(2, 1), 100, 100)
    assert plan.pairs == () and plan.runs == 0
    assert plan.readers == {0: {0}, 1: {0}, 2: {1}, 3: {1}}


@pytest.mark.parametrize(
    ("ours", "theirs", "runs"),
    [
        (Layout(64, 4, 64), Layout(64, 6, 64), 64),
        (Layout(64, 4, 64), Layout(128, 4, 64), 64),
        (Layout(64, 4, 16), Layout(64, 2, 64), 256),
        (Layout(64, 4, 1), Layout(64, 2, 1), 4096),
        (Layout(64, 4, 1), Layout(64, 4, 1), 64),
    ],
    ids=str,
)
def test_how_many_runs_4096_tokens_are(ours: Layout, theirs: Layout, runs: int) -> None:
    """Equal layouts move whole pages, even interleaved token by token."""
    assert make_plan(Side(ours.world, ours), Side(theirs.world, theirs), 0, 4096).runs == runs


def test_parts_that_do_not_divide_the_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="3 ranks cannot share a cache that is in 2 parts"):
        Side(3, Layout(4, 2))
    with pytest.raises(ValueError, match="begin at -1"):
        make_plan(by_block(1, 1), by_block(1, 1), -1, 4)


def test_a_million_tokens_are_planned_in_well_under_a_second_each_piece() -> None:
    side, other = Side(8, Layout(64, 8)), Side(8, Layout(64, 4, 2))
    plan = make_plan(side, other, 1_000_000 - 2**16, 1_000_000)
    assert sum(pair.runs.tokens for pair in plan.pairs) == 2 * 2**16 == 2 * ceil(2**16)
