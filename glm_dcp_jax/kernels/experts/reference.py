"""Routed experts in plain JAX: assignments sorted by expert, computed in tiles of one expert each.

Only chosen experts are computed: `lax.ragged_dot` would do the same by name, but XLA lowers it to a product with every
expert, on CPU and GPU alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_dcp_jax.kernels.linear.reference import gated, product
from glm_dcp_jax.kernels.weights import Weight, at, shape_of

_LARGEST_TILE = 64


class TilePlan(NamedTuple):
    """tile_rows: rows of a tile. num_tiles: a static bound that holds for every routing."""

    tile_rows: int
    num_tiles: int


def tile_plan(assignments: int, num_experts: int) -> TilePlan:
    """Tile size and count for `assignments` = rows * experts per token.

    A tile is about an expert's average share, so that few rows of a tile are empty. Every expert may leave one tile
    partly filled, hence the bound.
    """
    share = -(-assignments // num_experts)
    rows = min(_LARGEST_TILE, 1 << (share - 1).bit_length())
    if rows == 1:
        return TilePlan(1, assignments)
    return TilePlan(rows, assignments // rows + min(num_experts, assignments))


def routed_experts(
    x: Float[Array, "T H"],
    expert_ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    gate_up: Weight,
    down: Weight,
    group: Int[Array, ""] | int = 0,
    first_expert: Int[Array, ""] | int = 0,
) -> Float[Array, "T H"]:
    """See the op. Weights are sliced per expert, in the loop: a layer's slice of the stack would be copied whole."""
    stacked = len(shape_of(gate_up)) == 5
    experts = shape_of(gate_up)[-4]
    rows = x.shape[0]
    plan = tile_plan(expert_ids.size, experts)
    by_expert = _sort(expert_ids - first_expert, weights, experts)
    start = jnp.zeros(x.shape, jnp.float32)

    def add_tile(total: Array, first: Array, expert: Array, own_gate_up: Weight, own_down: Weight) -> Array:
        places = first + jnp.arange(plan.tile_rows)
        used = places < by_expert.stops[expert]
        place = jnp.minimum(places, expert_ids.size - 1)
        token = by_expert.tokens[place]
        out = product(gated(x[token], own_gate_up), own_down)
        scaled = out * jnp.where(used, by_expert.weights[place], 0.0)[:, None]
        return total.at[jnp.where(used, token, rows)].add(scaled, mode="drop")

    def of(expert: Array, gate_up: Weight, down: Weight) -> tuple[Weight, Weight]:
        index = (group, expert) if stacked else (expert,)
        return at(gate_up, *index), at(down, *index)

    def expert_after_expert(gate_up: Weight, down: Weight) -> Array:
        chosen_first = jnp.argsort(by_expert.counts == 0, stable=True)

        def one_expert(turn: Array, total: Array) -> Array:
            expert = chosen_first[turn]
            own = of(expert, gate_up, down)
            first = by_expert.stops[expert] - by_expert.counts[expert]

            def one_tile(tile: Array, total: Array) -> Array:
                return add_tile(total, first + tile * plan.tile_rows, expert, *own)

            return jax.lax.fori_loop(0, -(-by_expert.counts[expert] // plan.tile_rows), one_tile, total)

        return jax.lax.fori_loop(0, jnp.sum(by_expert.counts > 0), one_expert, start)

    def tile_after_tile(gate_up: Weight, down: Weight) -> Array:
        # For all tiles at once: in the loop, each turn would start these small kernels again.
        tile_counts = -(-by_expert.counts // plan.tile_rows)
        tile_stops, tiles = jnp.cumsum(tile_counts), jnp.arange(plan.num_tiles)
        # A tile past the last used one finds no expert: clipped to the last expert, its rows lie past `stops`.
        found = jnp.searchsorted(tile_stops, tiles, side="right", method="compare_all")
        expert_of = jnp.minimum(found, experts - 1)
        number = tiles - (tile_stops - tile_counts)[expert_of]
        first_of = (by_expert.stops - by_expert.counts)[expert_of] + number * plan.tile_rows

        def one_tile(tile: Array, total: Array) -> Array:
            return add_tile(total, first_of[tile], expert_of[tile], *of(expert_of[tile], gate_up, down))

        return jax.lax.fori_loop(0, plan.num_tiles, one_tile, start)

    # A GPU's loop of unknown length asks the host after every turn; on the CPU, the known length costs unused tiles.
    return jax.lax.platform_dependent(gate_up, down, cpu=expert_after_expert, default=tile_after_tile)


class _ByExpert(NamedTuple):
    """Assignments sorted by expert: token and weight of each, and how many are each expert's, up to which place.

    Behind those come the assignments of experts that are not here.
    """

    tokens: Int[Array, " A"]
    weights: Float[Array, " A"]
    counts: Int[Array, " E"]
    stops: Int[Array, " E"]


def _sort(expert_ids: Int[Array, "T K"], weights: Float[Array, "T K"], experts: int) -> _ByExpert:
    flat = expert_ids.reshape(-1)
    flat = jnp.where((flat >= 0) & (flat < experts), flat, experts)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=experts + 1)[:experts]
    return _ByExpert(order // expert_ids.shape[1], weights.reshape(-1)[order], counts, jnp.cumsum(counts))
