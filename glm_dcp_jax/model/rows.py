"""A step's rows, those of all blocks in a line: where they belong in the pools, and how their records get there."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.kernels.records import unpack_records
from glm_dcp_jax.parallel.attention import AttentionSettings
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.mesh import DCP


class Rows(NamedTuple):
    """Tokens and positions; slots, index_slots: this rank's own, -1 where a row is another's, or padding."""

    tokens: Int[Array, " T"]
    positions: Int[Array, " T"]
    slots: Int[Array, " T"]
    index_slots: Int[Array, " T"]

    @staticmethod
    def of(blocks: tuple[Block, ...], settings: AttentionSettings) -> "Rows":
        """The rows of all blocks; runs inside shard_map."""
        layout, index_layout = settings.layout, settings.layout.index_layout
        rank = jax.lax.axis_index(DCP)
        part = jax.lax.rem(rank, index_layout.world)
        slots = [_own_slots(block, layout, rank) for block in blocks]
        index_slots = [_own_slots(block, index_layout, part) for block in blocks]
        tokens = [block.tokens.reshape(-1) for block in blocks]
        positions = [block.positions.reshape(-1) for block in blocks]
        return Rows(*(jnp.concatenate(parts) for parts in (tokens, positions, slots, index_slots)))

    def commit(
        self,
        ckv: Shaped[Array, "layers slots width"],
        records: Shaped[Array, "layers T width"],
        x: Float[Array, "T H"],
        settings: AttentionSettings,
    ) -> tuple[Shaped[Array, "layers slots width"], Bool[Array, " T"]]:
        """The pool with this step's records of all its layers, and which rows are without NaN or infinity.

        x: what the last layer gave. The write must wait for that layer's read of the pool, else XLA copies the pool.
        Only a dependency that it cannot fold away orders them; this one also keeps records of a row that went
        non-finite out of the cache.
        """
        finite = jnp.isfinite(x).all(axis=1)
        kept = jnp.where(finite, self.slots, -1)
        with jax.named_scope("commit"):
            every_layer = jnp.arange(records.shape[0])
            return unpack_records(ckv, every_layer, kept, records, settings.kernels), finite


def _own_slots(block: Block, layout: Layout, owner: Int[Array, ""]) -> Int[Array, " T"]:
    """Where each row of the block goes in this owner's pool; -1: it is another's, or padding."""
    page_index = jnp.maximum(layout.page_index(block.positions), 0)
    pages = jnp.take_along_axis(block.page_table, page_index, axis=1)
    mine = block.valid & (layout.owner(block.positions) == owner)
    return jnp.where(mine, layout.slot(block.positions, pages), -1).reshape(-1)
