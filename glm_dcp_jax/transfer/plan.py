"""Which rank of one engine gives which tokens to which rank of another, for any two layouts. Index arithmetic alone.

Both sides' placement is arithmetic, so both compute the same plan and no list of runs is ever sent. Nothing is assumed
of the two: tensor parallel and DCP sizes, block sizes and interleaves may all differ and need not divide one another.

    producer TP4/DCP4 -> consumer TP2/DCP2     rank 0 gives to 0, 1 to 1, 2 to 0, 3 to 1
    producer TP4/DCP1 -> consumer TP2/DCP2     ranks 0, 1 give halves of what 0 needs, 2, 3 of what 1 needs

Every cache of a page has a plan of its own, by its own placement: CKV by the layout, index keys by
`layout.index_layout`, the MTP layer's by `layout.mtp_layout`.
"""

from dataclasses import dataclass

import numpy as np

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import ConfigError


@dataclass(frozen=True)
class Side:
    """One engine, as far as one of its caches goes. ranks: of tensor parallelism. layout: of that cache's tokens.

    Rank r holds part r % world, so part p is held by the ranks p, p + world, and so on. Raises ConfigError unless the
    layout's world divides ranks.
    """

    ranks: int
    layout: Layout

    def __post_init__(self) -> None:
        if self.ranks < 1 or self.ranks % self.layout.world:
            raise ConfigError(
                f"{self.ranks} ranks cannot share a cache that is in {self.layout.world} parts; the parts must divide "
                "the ranks"
            )

    def holders(self, part: int) -> list[int]:
        """The ranks that hold a part."""
        return list(range(part, self.ranks, self.layout.world))


@dataclass(frozen=True)
class Runs:
    """Tokens that lie one behind the other on both sides: arrays [n] int64, in the order of their positions.

    position: of the first token. source, target: its local index on the producer's and the consumer's rank; entry
    `local // block_size` of a page table is its page, `local % block_size` the place in it. length: tokens, all of them
    in one page on either side.
    """

    position: np.ndarray
    source: np.ndarray
    target: np.ndarray
    length: np.ndarray

    def __len__(self) -> int:
        return len(self.length)

    @property
    def tokens(self) -> int:
        """Tokens of all runs."""
        return int(self.length.sum())


@dataclass(frozen=True)
class Pair:
    """What `producer` gives to `consumer`, two ranks."""

    producer: int
    consumer: int
    runs: Runs


@dataclass(frozen=True)
class Plan:
    """How tokens start .. end - 1 move. pairs: in the order of (producer, consumer), those without tokens left out.

    readers: for every producer rank, the consumer ranks whose word it waits for before it gives its pages back. Who
    reads nothing of it is none of them. A rank that nobody reads has one too, which only says that it is done.
    """

    pairs: tuple[Pair, ...]
    readers: dict[int, frozenset[int]]

    @property
    def runs(self) -> int:
        """Runs of all pairs."""
        return sum(len(pair.runs) for pair in self.pairs)

    def of_producer(self, rank: int) -> list[Pair]:
        """What a producer rank gives, by consumer."""
        return [pair for pair in self.pairs if pair.producer == rank]


def make_plan(producer: Side, consumer: Side, start: int, end: int) -> Plan:
    """The plan for tokens start .. end - 1 (the consumer has those before). Every consumer rank gets what it holds.

    Where more ranks hold a part than there are readers of it, its readers' tokens are split among them evenly; where
    there are fewer, each serves as many readers as the others, give or take one. Raises ValueError if start < 0.
    """
    if start < 0:
        raise ValueError(f"tokens begin at 0, but the plan is to begin at {start}")
    positions = np.arange(start, max(end, start), dtype=np.int64)
    owners = producer.layout.owner(positions), consumer.layout.owner(positions)
    pairs = []
    for part in range(producer.layout.world):
        wanted = _wanted(positions[owners[0] == part], owners[1][owners[0] == part], consumer)
        holders = producer.holders(part)
        for number, (reader, tokens) in enumerate(wanted):
            first, last = (
                number * len(holders) // len(wanted),
                (number + 1) * len(holders) // len(wanted),
            )
            serving = holders[first : max(last, first + 1)]
            for holder, share in zip(serving, np.array_split(tokens, len(serving)), strict=True):
                if len(share):
                    pairs.append(Pair(holder, reader, _runs(producer.layout, consumer.layout, share)))
    pairs.sort(key=lambda pair: (pair.producer, pair.consumer))
    return Plan(tuple(pairs), _readers(pairs, producer.ranks, consumer.ranks))


def _wanted(tokens: np.ndarray, owners: np.ndarray, consumer: Side) -> list[tuple[int, np.ndarray]]:
    """Consumer ranks that need any of the tokens of a producer's part, and which."""
    of_part = {int(part): tokens[owners == part] for part in np.unique(owners)}
    world = consumer.layout.world
    return [(rank, of_part[rank % world]) for rank in range(consumer.ranks) if rank % world in of_part]


def _runs(source: Layout, target: Layout, tokens: np.ndarray) -> Runs:
    """Tokens of one pair as runs: a new one where either side's next place does not follow, or a page ends."""
    at_source, at_target = source.local(tokens), target.local(tokens)
    follows = (np.diff(at_source) == 1) & (np.diff(at_target) == 1)
    follows &= (at_source[1:] % source.block_size != 0) & (at_target[1:] % target.block_size != 0)
    first = np.flatnonzero(np.concatenate([[True], ~follows]))
    length = np.diff(np.append(first, len(tokens)))
    return Runs(tokens[first], at_source[first], at_target[first], length)


def _readers(pairs: list[Pair], producers: int, consumers: int) -> dict[int, frozenset[int]]:
    readers: dict[int, set[int]] = {rank: set() for rank in range(producers)}
    for pair in pairs:
        readers[pair.producer].add(pair.consumer)
    return {
        rank: frozenset(found) if found else frozenset([rank * consumers // producers])
        for rank, found in readers.items()
    }
