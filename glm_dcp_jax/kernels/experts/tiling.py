"""How the kernels of routed experts cut their work up."""

from typing import NamedTuple

import jax.numpy as jnp

from glm_dcp_jax.kernels import tiles
from glm_dcp_jax.kernels.experts.tile_plan import tile_bound
from glm_dcp_jax.kernels.linear.tiling import FEW_ROWS, cut_of
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES
from glm_dcp_jax.kernels.weight_tiles import Cut, Form

_MOST_ROWS, _MOST_FLOAT32_ROWS = 64, 32


class Tiling(NamedTuple):
    """rows: of a tile. tiles: that hold every routing. gate_up, down: of the kernels.

    parts: turns that down's outputs are computed in, since until they are summed they lie by assignment, in float32.
    """

    rows: int
    tiles: int
    gate_up: Cut
    down: Cut
    parts: int


def tiling(rows: int, each: int, experts: int, gate_up: Form, down: Form) -> Tiling:
    """For `rows` rows with `each` experts.

    A tile has about an expert's average share of assignments, but as many as an expert may have where those are few: up
    to FEW_ROWS of them cost nothing more.
    """
    assignments = rows * each
    share = -(-assignments // experts)
    most = _MOST_FLOAT32_ROWS if jnp.dtype(gate_up.dtype) == jnp.float32 else _MOST_ROWS
    tile = min(tiles.next_power(max(share, min(rows, FEW_ROWS), 4)), most)
    bound = tile_bound(assignments, experts, tile)
    inner = cut_of(tile, bound, gate_up, matrices=2, split=False)
    outer = cut_of(tile, bound, down, matrices=1, sliced=False, split=False)
    blocks = -(-down.outputs // outer.outputs)
    parts = min(-(-assignments * blocks * outer.outputs * 4 // WORKSPACE_BYTES), blocks)
    return Tiling(tile, bound, inner, outer, parts)
