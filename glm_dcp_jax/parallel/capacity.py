"""How many records an exchange makes room for: a fast part near what is typical, rounds for the rest."""

import math
from dataclasses import dataclass

from glm_dcp_jax.parallel.attention import AttentionSettings

NEW_PER_ROW = 0.25
"""Assumed: what each further row of a request adds to the union, as a share of its selection. The metric
`records_unique_ratio` shows what really happens."""
_PLANES = 3
"""Layers whose records may be in memory at once: one that is attended over, one on its way, one to spare."""
_DEVIATIONS = 5
_GRANULE = 64


@dataclass(frozen=True)
class Capacity:
    """Records that each rank hands out, in a block of fixed shape.

    fast: in the exchange that always runs. most: in the worst case, all selected records on one rank. each_round: in a
    round of the rest, which runs only if some rank has more than `fast`. expected: what a rank has on average.
    """

    fast: int
    most: int
    each_round: int
    expected: int

    @property
    def rounds(self) -> int:
        """Rounds that the worst case needs beside the fast exchange."""
        rest = self.most - self.fast
        return -(-rest // self.each_round) if rest else 0

    @staticmethod
    def of(
        requests: int,
        rows: int,
        topk: int,
        local_tokens: int,
        world: int,
        record_bytes: int,
        memory: int,
    ) -> "Capacity":
        """For `requests` of `rows` rows that select `topk` each, out of `local_tokens` positions on every rank.

        memory: bytes per device for what all ranks hand out.

        A union of U records, spread at random, puts U/W on each rank, give or take a standard deviation of sqrt(U/W):
        the fast exchange has room for 5 of them.
        """
        most = requests * min(rows * topk, local_tokens)
        mean = requests * min(topk * (1 + NEW_PER_ROW * (rows - 1)), local_tokens * world) / world
        typical = math.ceil((mean + _DEVIATIONS * math.sqrt(mean)) / _GRANULE) * _GRANULE
        held = max(memory // (world * record_bytes), 1)
        fast = max(min(typical, most, held // _PLANES), 1)
        return Capacity(fast, most, max(min(most - fast, held), 1), math.ceil(mean))

    @staticmethod
    def for_block(
        settings: AttentionSettings, requests: int, rows: int, topk: int, local_tokens: int
    ) -> "Capacity":
        """`of`, with what the settings say."""
        return Capacity.of(
            requests,
            rows,
            topk,
            local_tokens,
            settings.layout.world,
            settings.record.record_bytes,
            settings.exchange_bytes,
        )
