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
    column that select it.

    owner, ordinal: [N, SK] int32, of each request's records in that order. Ordinals are -1 behind the last or, of
    requests of one row, wherever it selects nothing to fetch; owners there mean nothing. mine: [M] int32, this rank's
    pool slots by ordinal, -1 behind; M as `union_of` was told. counts: [W] int32, records of each owner. selected: []
    int32, how often rows select any of them.

    seen_by: [N, SK] int32, of requests of several rows: bit s of a record says whether row s selects it. current:
    [N, S] bool or, of several rows, such bits: who selects the request's current rows.
    """

    owner: Int[Array, "N SK"]
    ordinal: Int[Array, "N SK"]
    mine: Int[Array, " M"]
    counts: Int[Array, " W"]
    selected: Int[Array, ""]
    seen_by: Int[Array, "N SK"] | None
    current: Bool[Array, "N S"] | Int[Array, "N S"]


def union_of(positions: Int[Array, "N S K"], block: Block, layout: Layout, rank: Array, most: int) -> Union:
    """The union for a rank. positions: as in Selection. most: M, no less than any rank's records.

    Rows of one request select overlapping sets: an entry that an earlier row has is not counted again. A row selects no
    position twice.
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

    page_index = jnp.maximum(layout.page_index(flat), 0)
    slots = layout.slot(flat, jnp.take_along_axis(block.page_table, page_index, axis=1))
    place = jnp.where(new & (owner == rank), counted, most)  # past the end: dropped
    mine = jnp.full(most, -1, jnp.int32).at[place.reshape(-1)].set(slots.reshape(-1), mode="drop")

    counts, selected = jnp.sum(owned, axis=0, dtype=jnp.int32), jnp.sum(flat >= 0, dtype=jnp.int32)
    taken = _takes_current(positions, block)
    if rows == 1:
        return Union(owner, jnp.where(new, counted, -1), mine, counts, selected, None, taken[:, 0])
    entries = rows * width
    place = jnp.cumsum(new, axis=1, dtype=jnp.int32) - 1
    in_list = jnp.where(new, place, entries)  # past the end: dropped
    of_first = jnp.where(flat >= 0, jnp.take_along_axis(place, first, axis=1), entries)
    bits = 1 << jnp.arange(rows, dtype=jnp.int32)
    return Union(
        _listed(owner, in_list),
        _listed(counted, in_list),
        mine,
        counts,
        selected,
        _scattered(jnp.zeros_like(flat), of_first, jnp.broadcast_to(jnp.repeat(bits, width), flat.shape)),
        jnp.sum(jnp.where(taken, bits[:, None], 0), axis=1, dtype=jnp.int32),
    )


def _takes_current(positions: Int[Array, "N S K"], block: Block) -> Bool[Array, "N S S"]:
    """Which of its request's current rows, last axis, each row selects."""
    taken = (positions[:, :, :, None] == block.positions[:, None, None, :]).any(axis=2)
    return taken & block.valid[:, None, :]


def _listed(values: Int[Array, "N SK"], places: Int[Array, "N SK"]) -> Int[Array, "N SK"]:
    """Values at their places, -1 where none is; those past the end are dropped."""
    return _scattered(jnp.full_like(values, -1), places, values + 1)


def _scattered(
    start: Int[Array, "N SK"], places: Int[Array, "N SK"], added: Int[Array, "N SK"]
) -> Int[Array, "N SK"]:
    """Each row of `start` with values added at places; those past the end are dropped."""
    request = jnp.arange(start.shape[0])[:, None]
    return start.at[request, places].add(added, mode="drop")


def _first_occurrence(flat: Int[Array, "N SK"], context: int) -> Int[Array, "N SK"]:
    """The index of the first entry of each request that has the same position (of any entry, where that is -1)."""
    entries = jnp.arange(flat.shape[1], dtype=jnp.int32)
    at = jnp.where(flat >= 0, flat, context)

    def of_request(positions: Array) -> Array:
        first = jnp.full(context + 1, flat.shape[1], jnp.int32).at[positions].min(entries)
        return first[positions]

    return jax.vmap(of_request)(at)
