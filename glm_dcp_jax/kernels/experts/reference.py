"""Routed experts in plain JAX: assignments sorted by expert, computed in tiles of one expert each.

Only chosen experts are computed: `lax.ragged_dot` would do the same by name, but XLA lowers it to a product with every
expert, on CPU and GPU alike.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

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
    gate_up: Float[Array, "*G E 2 i H"],
    down: Float[Array, "*G E H i"],
    group: Int[Array, ""] | int = 0,
) -> Float[Array, "T H"]:
    """sum_k weights[t, k] * down_e(silu(gate_e x) * up_e x) with e = expert_ids[t, k], in float32.

    Weights may be stacked over the G groups of a scan, of which `group` is used. They are sliced per expert, in the
    loop: a layer's slice of the stack, taken outside, would be copied whole.
    """
    if gate_up.ndim == 4:
        gate_up, down = gate_up[None], down[None]
    rows, experts = x.shape[0], gate_up.shape[1]
    plan = tile_plan(expert_ids.size, experts)
    by_expert = _sort(expert_ids, weights, experts)
    start = jnp.zeros(x.shape, jnp.float32)

    def add_tile(total: Array, first: Array, expert: Array, own_gate_up: Array, own_down: Array) -> Array:
        places = first + jnp.arange(plan.tile_rows)
        used = places < by_expert.stops[expert]
        place = jnp.minimum(places, expert_ids.size - 1)
        token = by_expert.tokens[place]
        out = _expert(x[token], own_gate_up.reshape(-1, x.shape[1]), own_down)
        scaled = out * jnp.where(used, by_expert.weights[place], 0.0)[:, None]
        return total.at[jnp.where(used, token, rows)].add(scaled, mode="drop")

    def expert_after_expert(gate_up: Array, down: Array) -> Array:
        chosen_first = jnp.argsort(by_expert.counts == 0, stable=True)

        def one_expert(at: Array, total: Array) -> Array:
            expert = chosen_first[at]
            own_gate_up, own_down = gate_up[group, expert], down[group, expert]
            first = by_expert.stops[expert] - by_expert.counts[expert]

            def one_tile(tile: Array, total: Array) -> Array:
                return add_tile(total, first + tile * plan.tile_rows, expert, own_gate_up, own_down)

            return jax.lax.fori_loop(0, -(-by_expert.counts[expert] // plan.tile_rows), one_tile, total)

        return jax.lax.fori_loop(0, jnp.sum(by_expert.counts > 0), one_expert, start)

    def tile_after_tile(gate_up: Array, down: Array) -> Array:
        # For all tiles at once: in the loop, each turn would start these small kernels again.
        tile_counts = -(-by_expert.counts // plan.tile_rows)
        tile_stops, tiles = jnp.cumsum(tile_counts), jnp.arange(plan.num_tiles)
        # A tile past the last used one finds no expert: clipped to the last expert, its rows lie past `stops`.
        found = jnp.searchsorted(tile_stops, tiles, side="right", method="compare_all")
        expert_of = jnp.minimum(found, experts - 1)
        number = tiles - (tile_stops - tile_counts)[expert_of]
        first_of = (by_expert.stops - by_expert.counts)[expert_of] + number * plan.tile_rows

        def one_tile(tile: Array, total: Array) -> Array:
            expert = expert_of[tile]
            return add_tile(total, first_of[tile], expert, gate_up[group, expert], down[group, expert])

        return jax.lax.fori_loop(0, plan.num_tiles, one_tile, start)

    # A GPU's loop of unknown length asks the host after every turn; on the CPU, the known length costs unused tiles.
    return jax.lax.platform_dependent(gate_up, down, cpu=expert_after_expert, default=tile_after_tile)


class _ByExpert(NamedTuple):
    """Assignments sorted by expert: token and weight of each, and how many are each expert's, up to which place."""

    tokens: Int[Array, " A"]
    weights: Float[Array, " A"]
    counts: Int[Array, " E"]
    stops: Int[Array, " E"]


def _sort(expert_ids: Int[Array, "T K"], weights: Float[Array, "T K"], experts: int) -> _ByExpert:
    flat = expert_ids.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    counts = jnp.bincount(flat, length=experts)
    return _ByExpert(order // expert_ids.shape[1], weights.reshape(-1)[order], counts, jnp.cumsum(counts))


def _expert(
    x: Float[Array, "m H"], gate_up: Float[Array, "2i H"], down: Float[Array, "H i"]
) -> Float[Array, "m H"]:
    both = jnp.einsum("mh,ih->mi", x, gate_up, preferred_element_type=jnp.float32)
    gate, up = jnp.split(both, 2, axis=1)
    inner = (jax.nn.silu(gate) * up).astype(x.dtype)
    return jnp.einsum("mi,hi->mh", inner, down, preferred_element_type=jnp.float32)
