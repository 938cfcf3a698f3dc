"""The caches of an engine without the engine: pools, and the programs over them.

They hold rows of which every byte is known, so that what arrives can be compared with what was sent.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
from lib.transfer_failures import MeasurementFailed
from lib.transfer_flags import EngineLayout

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import make_pools, pool_shapes
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import CacheConfig, ConfigError, ParallelConfig
from glm_dcp_jax.engine.memory import number_of_pages
from glm_dcp_jax.engine.pool_access import PoolAccess, State
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.transfer.fingerprint import PROTOCOL, Fingerprint, record_id
from glm_dcp_jax.transfer.packing import NOTHING, PARTS, Caches, Part
from glm_dcp_jax.transfer.pieces import piece_tokens

LATENT, ROPE, INDEX = 512, 64, 128
"""GLM-5.2's widths."""
_DIFFERENT_ROWS, _VALUES = 251, 63
_FILLED_AT_ONCE, _COMPARED = 256, 16


@dataclass(frozen=True)
class CacheSizes:
    """What both engines have in common. most_tokens: of a request."""

    layers: int
    full_layers: int
    kv_cache_dtype: str
    piece_bytes: int
    most_tokens: int

    @property
    def record(self) -> RecordFormat:
        """The format at GLM-5.2's widths."""
        return RecordFormat.sized(self.kv_cache_dtype, LATENT, ROPE, INDEX)


class _Holder:
    """Whoever owns pools, as a runner does."""

    generation = 0

    def __init__(self, state: State) -> None:
        self.state, self._lock = state, threading.Lock()

    def with_pools(self, change: Callable[[State], State | None]) -> None:
        with self._lock:
            self.state = change(self.state) or self.state


class BareCaches:
    """An engine's caches, with pages 1, 2, ... for one request.

    Raises ConfigError if the machine has no devices for it, or no memory.
    """

    def __init__(self, engine: EngineLayout, sizes: CacheSizes) -> None:
        layout, record = engine.layout, sizes.record
        mesh = make_mesh(ParallelConfig(engine.tp, layout.world))
        pages = layout.pages_for(sizes.most_tokens) + 1
        _check_memory(sizes, layout, mesh, pages)
        self._shapes = pool_shapes(mesh, sizes.layers, sizes.full_layers, layout, record, pages)
        self.caches = Caches(mesh, layout, record, (self._shapes,), None)
        self.row_bytes = sum(self.caches.row_bytes(part) for part in PARTS)
        self.pages = np.arange(1, pages)
        self._holder = _Holder(((make_pools(self._shapes),), None))
        at_once = piece_tokens(sizes.piece_bytes, self.row_bytes, sizes.most_tokens)
        self.access = PoolAccess(self.caches, self._holder, at_once)
        self.sizes, self._engine = sizes, engine

    def fingerprint(self, connector: str) -> Fingerprint:
        """As an engine with these caches has it."""
        layout, sizes = self.caches.layout, self.sizes
        return Fingerprint(
            protocol=PROTOCOL,
            connector=connector,
            model="",
            record=record_id(self.caches.record, None),
            layers=sizes.layers,
            full_layers=sizes.full_layers,
            mtp=False,
            tp=self._engine.tp,
            dcp=layout.world,
            block_size=layout.block_size,
            interleave=layout.interleave,
            index_shards=layout.index_shards,
            piece_tokens=self.access.piece_tokens,
        )

    def wait(self) -> None:
        """Until all programs over the pools have run."""
        jax.block_until_ready(self._holder.state)

    def clear(self) -> None:
        """Zeros again."""
        self._holder.state = ((make_pools(self._shapes),), None)
        self.wait()

    def fill(self) -> None:
        """Every token's row with the bytes that belong to it."""
        for part in PARTS:
            placement, copies = self.caches.placement(part), self.caches.copies(part)
            most = max(placement.local_length(self.sizes.most_tokens, rank) for rank in range(copies))
            for first in range(0, most, _FILLED_AT_ONCE):
                local = np.arange(first, first + _FILLED_AT_ONCE)
                positions = np.stack(
                    [placement.position(rank % placement.world, local) for rank in range(copies)]
                )
                slots = self._slots(part, positions)
                self.access.unpack(part, slots, self._rows(part, positions.ravel()).reshape(*slots.shape, -1))
                self.wait()

    def check(self, tokens: int) -> None:
        """Compare rows of every rank, spread over a request of so many tokens, with what belongs there.

        Raises MeasurementFailed for bytes that differ: what was measured was not a transfer.
        """
        for part in PARTS:
            placement = self.caches.placement(part)
            positions = np.full((self._engine.tp, _COMPARED), -1)
            for rank in range(self._engine.tp):
                owner = rank % placement.world
                held = int(placement.local_length(tokens, owner))
                chosen = np.unique(np.linspace(0, held - 1, min(held, _COMPARED)).astype(int))
                positions[rank, : len(chosen)] = placement.position(owner, chosen)
            packed = self.access.pack(part, self._slots(part, positions))
            for rank, (rows, at) in enumerate(zip(packed, positions, strict=True)):
                same = (np.asarray(rows) == self._rows(part, at)).all(axis=1) | (at < 0)
                if not same.all():
                    raise MeasurementFailed(
                        f"rank {rank} holds wrong {part} for the tokens {at[~same].tolist()} after a transfer"
                    )

    def _slots(self, part: Part, positions: np.ndarray) -> np.ndarray:
        """Where rows of the one request lie; NOTHING for positions that it has not."""
        placement = self.caches.placement(part)
        there = (positions >= 0) & (positions < self.sizes.most_tokens)
        pages = self.pages[np.where(there, placement.page_index(positions), 0)]
        return np.where(there, placement.slot(positions, pages), NOTHING).astype(np.int32)

    def _rows(self, part: Part, positions: np.ndarray) -> np.ndarray:
        """[n, row_bytes] uint8, another row for each position of the first 15,813.

        Bytes of 1 to 63, so that floats made of them are normal numbers, as those of real caches are.
        """
        row_bytes = self.caches.row_bytes(part)
        rows = np.random.default_rng(len(part)).integers(0, _VALUES, (_DIFFERENT_ROWS, row_bytes), np.uint8)
        turn = (positions // _DIFFERENT_ROWS % _VALUES).astype(np.uint8)
        return 1 + (rows[positions % _DIFFERENT_ROWS] + turn[:, None]) % _VALUES


def _check_memory(sizes: CacheSizes, layout: Layout, mesh: jax.sharding.Mesh, pages: int) -> None:
    """Raise ConfigError if the machine cannot hold pools of so many pages."""
    model: Any = SimpleNamespace(num_hidden_layers=sizes.layers, num_full_layers=sizes.full_layers)
    cache = CacheConfig(num_gpu_blocks_override=pages - 1)
    try:
        number_of_pages(cache, model, layout, sizes.record, mesh, workspace=lambda pages: 0)
    except ConfigError as error:
        reason = str(error).partition(";")[0]
        raise ConfigError(f"{reason}; lower --tokens {sizes.most_tokens}") from None
