"""Packing rows out of an engine's pools, and unpacking rows into them, between its steps."""

from collections.abc import Callable
from functools import partial
from typing import Protocol

import jax
import numpy as np

from glm_dcp_jax.cache.pools import Pools
from glm_dcp_jax.transfer.packing import PARTS, Caches, Part, PoolsLost
from glm_dcp_jax.transfer.pieces import buckets, most_rows

State = tuple[tuple[Pools, ...], Pools | None]
"""The pools of all segments, and the MTP layer's."""


class Holder(Protocol):
    """Who owns the pools: one thread at a time may start programs over them."""

    @property
    def generation(self) -> int:
        """Of the pools: another one when they had to be made anew."""

    def with_pools(self, change: Callable[[State], State | None]) -> None:
        """Call with the pools as of now, and keep what comes back, if anything."""


class PoolAccess:
    """The programs of Caches over a runner's pools; from any thread."""

    def __init__(self, caches: Caches, holder: Holder, piece_tokens: int) -> None:
        """piece_tokens: the most that is packed or unpacked at once."""
        self.caches, self.piece_tokens = caches, piece_tokens
        self._holder = holder

    @property
    def generation(self) -> int:
        """Of the pools."""
        return self._holder.generation

    def pack(self, part: Part, slots: np.ndarray, generation: int | None = None) -> list[jax.Array]:
        """Start to pack slots [tp, N] int32; each rank's rows [N, row_bytes] uint8, on its device.

        generation: of the pools that the slots are in, where they may have been lost; then it raises PoolsLost.
        """
        program = self.caches.pack(part, slots.shape[1])
        placed = jax.device_put(slots, self.caches.slots_sharding)
        packed: list[jax.Array] = []

        def run(state: State) -> None:
            if generation not in (None, self._holder.generation):
                raise PoolsLost
            rows = program(self.caches.pools_of(part, *state), placed)
            shards = sorted(rows.addressable_shards, key=lambda shard: shard.index[0].start or 0)
            packed.extend(shard.data for shard in shards)

        self._holder.with_pools(run)
        return packed

    def unpack(self, part: Part, slots: np.ndarray, rows: np.ndarray) -> None:
        """Start to unpack rows [W, N, row_bytes] uint8 at slots [W, N]; neither may be changed afterwards."""
        program = self.caches.unpack(part, slots.shape[1])
        sharding = self.caches.rows_sharding(part)
        placed = jax.device_put((slots, rows), sharding)

        def run(state: State) -> State:
            return self.caches.with_pools(part, *state, program(self.caches.pools_of(part, *state), *placed))

        self._holder.with_pools(run)

    def compilations(self, packs: bool, unpacks: bool) -> list[Callable[[], object]]:
        """All programs that serving can ask for."""
        makers = [self.caches.pack] * packs + [self.caches.unpack] * unpacks
        return [
            partial(make, part, rows)
            for part in PARTS
            for rows in buckets(most_rows(self.caches.placement(part), self.piece_tokens))
            for make in makers
        ]
