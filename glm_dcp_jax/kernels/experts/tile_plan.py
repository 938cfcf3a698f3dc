"""Which assignments of rows to experts a kernel computes together: tiles of a few assignments of one expert each."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

_FEW_ASSIGNMENTS = 512
"""As many or fewer are compared with one another, in two small kernels where sorting takes ten."""


def tile_bound(assignments: int, experts: int, rows: int) -> int:
    """Tiles of `rows` assignments that are enough for every routing: each expert may leave one partly filled."""
    return min(assignments, assignments // rows + min(experts, assignments))


def plan_tiles(
    expert_ids: Int[Array, "T K"], first_expert: Int[Array, ""], experts: int, rows: int
) -> Int[Array, "tiles rows"]:
    """The assignments t * K + k of each tile, all of one expert; -1 behind them and in tiles that are not used.

    Tiles come by expert, their assignments in order. Those of experts other than first_expert to first_expert + experts
    are in none.
    """
    expert = expert_ids.reshape(-1) - first_expert
    expert = jnp.where((expert >= 0) & (expert < experts), expert, experts)
    tiles = tile_bound(expert.size, experts, rows)
    if expert.size <= _FEW_ASSIGNMENTS:
        return _compared(expert, experts, rows, tiles)
    return _sorted(expert, experts, rows, tiles)


def _compared(expert: Int[Array, " A"], experts: int, rows: int, tiles: int) -> Int[Array, "tiles rows"]:
    number = jnp.arange(expert.size)
    earlier = (expert[None, :] == expert[:, None]) & (number[None, :] < number[:, None])
    rank = jnp.sum(earlier, axis=1, dtype=jnp.int32)
    key = expert * expert.size + jax.lax.div(rank, rows)
    leads = (jax.lax.rem(rank, rows) == 0) & (expert < experts)
    tile = jnp.sum(leads[None, :] & (key[None, :] < key[:, None]), axis=1, dtype=jnp.int32)
    place = jnp.where(expert < experts, tile * rows + jax.lax.rem(rank, rows), -1)
    found = place[None, :] == jnp.arange(tiles * rows)[:, None]
    return jnp.max(jnp.where(found, number[None, :], -1), axis=1).reshape(tiles, rows)


def _sorted(expert: Int[Array, " A"], experts: int, rows: int, tiles: int) -> Int[Array, "tiles rows"]:
    order = jnp.argsort(expert, stable=True)
    counts = jnp.sum(expert[None, :] == jnp.arange(experts)[:, None], axis=1, dtype=jnp.int32)
    tile_counts = jax.lax.div(counts + rows - 1, rows)
    stops, tile_stops = jnp.cumsum(counts), jnp.cumsum(tile_counts)
    number = jnp.arange(tiles)
    own = jnp.minimum(jnp.sum(tile_stops[None, :] <= number[:, None], axis=1), experts - 1)
    first = (stops - counts)[own] + (number - (tile_stops - tile_counts)[own]) * rows
    place = first[:, None] + jnp.arange(rows)
    # Tiles past the last used one are taken for the last expert's, whose places end before theirs.
    return jnp.where(place < stops[own][:, None], order[jnp.minimum(place, expert.size - 1)], -1)
