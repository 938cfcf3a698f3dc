"""What travels at once: some tokens of a request, planned for both parts of the caches, and the index vectors for it.

Both sides make the same Piece from the same numbers. Rows that one producer rank gives lie in one array, by consumer
and then by position, so that what a pair of ranks has in common is contiguous in it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.transfer.packing import NOTHING, PARTS, Part
from glm_dcp_jax.transfer.plan import Plan, Runs, Side, make_plan

_SMALL = (16, 64)
_LARGE = 256


@dataclass(frozen=True)
class Geometry:
    """How an engine lays out its caches: tp ranks, and the layout."""

    tp: int
    layout: Layout

    def placement(self, part: Part) -> Layout:
        """Where rows of a part lie."""
        return self.layout if part == "records" else self.layout.index_layout

    def gives(self, part: Part) -> Side:
        """As a producer: every rank gives of what it holds."""
        return Side(self.tp, self.placement(part))

    def takes(self, part: Part) -> Side:
        """As a consumer: one reader for each part of the cache, whose process hands copies to all that hold it."""
        return Side(self.placement(part).world, self.placement(part))


@dataclass(frozen=True)
class Piece:
    """Tokens start .. end - 1 of a request on their way from one engine to another."""

    producer: Geometry
    consumer: Geometry
    plans: Mapping[Part, Plan]

    @staticmethod
    def of(producer: Geometry, consumer: Geometry, start: int, end: int) -> "Piece":
        """The same on both sides."""
        plans = {part: make_plan(producer.gives(part), consumer.takes(part), start, end) for part in PARTS}
        return Piece(producer, consumer, plans)

    @property
    def runs(self) -> int:
        """Runs of all plans."""
        return sum(plan.runs for plan in self.plans.values())

    def rows(self, part: Part) -> list[int]:
        """How many rows each producer rank gives."""
        counts = [0] * self.producer.tp
        for pair in self.plans[part].pairs:
            counts[pair.producer] += pair.runs.tokens
        return counts

    def slots_to_pack(self, part: Part, pages: Sequence[int]) -> np.ndarray:
        """[tp, N] int32: what each producer rank packs, N a bucket. pages: the request's on the producer."""
        placement, table = self.producer.placement(part), np.asarray(pages, np.int64)
        counts = self.rows(part)
        slots = np.full((len(counts), bucket(max(counts))), NOTHING, np.int32)
        filled = [0] * len(counts)
        for pair in self.plans[part].pairs:
            found = _slots(placement, table, pair.runs, pair.runs.source)
            at = filled[pair.producer]
            slots[pair.producer, at : at + len(found)] = found
            filled[pair.producer] = at + len(found)
        return slots

    def to_unpack(
        self, part: Part, pages: Sequence[int], given: Sequence[np.ndarray], row_bytes: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Slots [W, N] int32 and rows [W, N, row_bytes] uint8 for each rank of the consumer's DCP group; W is 1 where
        all of them hold everything.

        pages: the request's on the consumer. given: by producer rank, [n, bytes], of which the first row_bytes are of
        use: a producer may have an MTP layer's behind them that the consumer has not.
        """
        placement, table = self.consumer.placement(part), np.asarray(pages, np.int64)
        copies = 1 if placement.world == 1 else self.consumer.layout.world
        counts = [0] * placement.world
        for pair in self.plans[part].pairs:
            counts[pair.consumer] += pair.runs.tokens
        size = bucket(max(counts))
        slots = np.full((copies, size), NOTHING, np.int32)
        rows = np.empty((copies, size, row_bytes), np.uint8)  # what nothing is written to goes nowhere
        filled, taken = [0] * placement.world, [0] * self.producer.tp
        for pair in self.plans[part].pairs:
            count, at = pair.runs.tokens, filled[pair.consumer]
            first = taken[pair.producer]
            slots[pair.consumer, at : at + count] = _slots(placement, table, pair.runs, pair.runs.target)
            rows[pair.consumer, at : at + count] = given[pair.producer][first : first + count, :row_bytes]
            filled[pair.consumer], taken[pair.producer] = at + count, first + count
        for rank in range(placement.world, copies):
            slots[rank], rows[rank] = slots[rank % placement.world], rows[rank % placement.world]
        return slots, rows


def bucket(rows: int) -> int:
    """The size that programs are compiled for which holds so many rows: 16, 64, 256, 512, 1024, ..."""
    for size in _SMALL:
        if rows <= size:
            return size
    return max(_LARGE, 1 << (rows - 1).bit_length())


def buckets(most: int) -> list[int]:
    """All sizes up to the one that holds `most` rows."""
    sizes: list[int] = []
    size = 1
    while not sizes or sizes[-1] < most:
        sizes.append(bucket(size))
        size = sizes[-1] + 1
    return sizes


def most_rows(placement: Layout, tokens: int) -> int:
    """Rows of one part in any piece of so many tokens, at most."""
    if placement.world == 1:
        return tokens
    stripe = placement.world * placement.interleave
    return min(tokens, (-(-tokens // stripe) + 1) * placement.interleave)


def cut(start: int, end: int, tokens: int) -> list[tuple[int, int]]:
    """Pieces (first, last + 1) of at most `tokens` tokens; their borders do not depend on where the first begins."""
    pieces = []
    while start < end:
        stop = min((start // tokens + 1) * tokens, end)
        pieces.append((start, stop))
        start = stop
    return pieces


def piece_tokens(most_bytes: int, row_bytes: int, longest: int) -> int:
    """Tokens of a piece: a power of two whose rows are at most so many bytes, and no more than a request can have."""
    most = max(1, min(most_bytes // row_bytes, longest))
    return 1 << (most.bit_length() - 1)


def _slots(placement: Layout, table: np.ndarray, runs: Runs, first: np.ndarray) -> np.ndarray:
    """The slots of all tokens of runs, which begin at these local indices."""
    before = np.cumsum(runs.length) - runs.length
    local = np.repeat(first - before, runs.length) + np.arange(runs.tokens)
    return table[local // placement.block_size] * placement.block_size + local % placement.block_size
