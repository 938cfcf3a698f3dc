"""Which records a block's requests need from whom: the union of each request's selections, by owner.

The selection is the same on every rank, so all of this is arithmetic: no rank tells another what it wants.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.parallel.batch import Block


class Union(NamedTuple):
    """A block's selected records that earlier steps committed, each once per request, numbered by owner.

    A record's ordinal counts the owner's records before it: requests in order, within a request by the first row and
    column that select it. T = N * S rows.

    owner, ordinal: [T, K] int32, of each entry of each row's selection; -1 where there is nothing to fetch. mine: [M]
    int32, this rank's pool slots by ordinal, -1 behind; M as `union_of` was told. counts: [W] int32, records of each
    owner. current: [T, S] bool, which of the request's current rows each row selects.
    """

    owner: Int[Array, "T K"]
    ordinal: Int[Array, "T K"]
    mine: Int[Array, " M"]
    counts: Int[Array, " W"]
    current: Bool[Array, "T S"]


def union_of(positions: Int[Array, "N S K"], block: Block, layout: Layout, rank: Array, most: int) -> Union:
    """The union for a rank. positions: as in Selection. most: M, no less than any rank's records.

    Rows of one request select overlapping sets: an entry that an earlier row or column has is not counted again.
    """
    requests, rows, width = positions.shape
    context = block.page_table.shape[1] * layout.virtual_block
    committed = (positions >= 0) & (positions < block.start[:, None, None])
    flat = jnp.where(committed, positions, -1).reshape(requests, rows * width)
    first = _first_occurrence(flat, context) if rows > 1 else jnp.broadcast_to(jnp.arange(width), flat.shape)
    new = (flat >= 0) & (first == jnp.arange(rows * width))

    owner = layout.owner(flat)
    owned = ((owner[..., None] == jnp.arange(layout.world)) & new[..., None]).reshape(-1, layout.world)
    before = jnp.cumsum(owned, axis=0, dtype=jnp.int32) - owned
    counted = jnp.sum(jnp.where(owned, before, 0), axis=1).reshape(flat.shape)
    ordinal = jnp.take_along_axis(counted, first, axis=1) if rows > 1 else counted

    page_index = jnp.maximum(layout.page_index(flat), 0)
    slots = layout.slot(flat, jnp.take_along_axis(block.page_table, page_index, axis=1))
    place = jnp.where(new & (owner == rank), counted, most)  # past the end: dropped
    mine = jnp.full(most, -1, jnp.int32).at[place.reshape(-1)].set(slots.reshape(-1), mode="drop")

    by_row = requests * rows, width
    return Union(
        owner.reshape(by_row),
        jnp.where(flat >= 0, ordinal, -1).reshape(by_row),
        mine,
        jnp.sum(owned, axis=0, dtype=jnp.int32),
        selected_current(positions, block),
    )


def selected_current(positions: Int[Array, "N S K"], block: Block) -> Bool[Array, "T S"]:
    """Which of its request's current rows each row selects."""
    taken = (positions[:, :, :, None] == block.positions[:, None, None, :]).any(axis=2)
    return (taken & block.valid[:, None, :]).reshape(-1, block.positions.shape[1])


def _first_occurrence(flat: Int[Array, "N E"], context: int) -> Int[Array, "N E"]:
    """The index of the first entry of each request that has the same position (of any entry, where that is -1)."""
    entries = jnp.arange(flat.shape[1], dtype=jnp.int32)
    at = jnp.where(flat >= 0, flat, context)

    def of_request(positions: Array) -> Array:
        first = jnp.full(context + 1, flat.shape[1], jnp.int32).at[positions].min(entries)
        return first[positions]

    return jax.vmap(of_request)(at)
