"""How the kernels of routed experts cut their work up."""

from glm_dcp_jax.kernels import tiles
from glm_dcp_jax.kernels.experts.tile_plan import tile_bound
from glm_dcp_jax.kernels.linear.tiling import FEW_ROWS, cut_of
from glm_dcp_jax.kernels.weight_tiles import Cut, Form

_MOST_ROWS = 64


def cuts_of(assignments: int, rows: int, experts: int, gate_up: Form, down: Form) -> tuple[Cut, Cut]:
    """Of gate and up, and of down, for this many assignments.

    A tile has about an expert's average share of rows, but as many as it may where those are few: up to FEW_ROWS cost
    nothing more.
    """
    share = -(-assignments // experts)
    tile = min(tiles.next_power(max(share, min(rows, FEW_ROWS), 4)), _MOST_ROWS)
    bound = tile_bound(assignments, experts, tile)
    return (
        cut_of(tile, bound, gate_up, matrices=2, split=False),
        cut_of(max(tile, FEW_ROWS), bound, down, matrices=1, sliced=False, split=False),
    )
