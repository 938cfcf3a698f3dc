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
    rows, per_row = expert_ids.shape
    _, experts, _, width, hidden = gate_up.shape
    tile_rows, num_tiles = tile_plan(rows * per_row, experts)
    flat_ids, flat_weights = expert_ids.reshape(-1), weights.reshape(-1)
    order = jnp.argsort(flat_ids, stable=True)
    counts = jnp.bincount(flat_ids, length=experts)
    stops = jnp.cumsum(counts)
    tile_stops = jnp.cumsum(-(-counts // tile_rows))

    def one_tile(tile: Array, total: Array) -> Array:
        # A tile past the last used one finds no expert: clipped to the last expert, its rows lie past `stops`.
        expert = jnp.minimum(jnp.searchsorted(tile_stops, tile, side="right"), experts - 1)
        before = tile_stops[expert] - -(-counts[expert] // tile_rows)
        first = stops[expert] - counts[expert] + (tile - before) * tile_rows
        places = first + jnp.arange(tile_rows)
        used = places < stops[expert]
        assignment = order[jnp.minimum(places, rows * per_row - 1)]
        token = assignment // per_row
        out = _expert(x[token], gate_up[group, expert].reshape(2 * width, hidden), down[group, expert])
        scaled = out * jnp.where(used, flat_weights[assignment], 0.0)[:, None]
        return total.at[jnp.where(used, token, rows)].add(scaled, mode="drop")

    return jax.lax.fori_loop(0, num_tiles, one_tile, jnp.zeros((rows, hidden), jnp.float32))


def _expert(
    x: Float[Array, "m H"], gate_up: Float[Array, "2i H"], down: Float[Array, "H i"]
) -> Float[Array, "m H"]:
    both = jnp.einsum("mh,ih->mi", x, gate_up, preferred_element_type=jnp.float32)
    gate, up = jnp.split(both, 2, axis=1)
    inner = (jax.nn.silu(gate) * up).astype(x.dtype)
    return jnp.einsum("mi,hi->mh", inner, down, preferred_element_type=jnp.float32)
