"""What the kernels of routed experts move and compute on GPUs; see `kernels.cost`."""

from jaxtyping import DTypeLike

from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.experts.tiling import Tiling, tiling
from glm_dcp_jax.kernels.linear.cost import Loads, code_bytes, scale_bytes, tile_flops, tile_loads
from glm_dcp_jax.kernels.weight_tiles import Form

_FLOAT32, _INT32 = 4, 4


def expected_experts(rows: int, experts: int, each: int) -> float:
    """How many of the experts `rows` rows choose among them, if each row chooses `each` of them at random."""
    return experts * (1 - (1 - each / experts) ** rows)


def cost(
    rows: int,
    each: int,
    experts: int,
    gate_up: Form,
    down: Form,
    used: float,
    x_itemsize: int,
    dtype: DTypeLike = "bfloat16",
) -> Cost:
    """Of both kernels; the plan, and each row's sum, are XLA's.

    experts: that are here, of which `used` were chosen. An expert's bytes count once, since its tiles run one after the
    other. used may be an expectation. dtype: of plain weights.
    """
    cut = tiling(rows, each, experts, gate_up, down)
    inner = gate_up_cost(rows, each, gate_up, cut, used, x_itemsize, dtype)
    outer = down_cost(rows * each, down, cut, used, x_itemsize, dtype)
    return Cost(*(a + b for a, b in zip(inner, outer, strict=True)))


def gate_up_cost(
    rows: int, each: int, form: Form, cut: Tiling, used: float, x_itemsize: int, dtype: DTypeLike = "bfloat16"
) -> Cost:
    """Of the kernel that makes silu(gate) * up of each assignment. form: of gate, and of up."""
    assignments = rows * each
    return Cost(
        bytes_read=round(used * 2 * (code_bytes(form, dtype) + scale_bytes(form)))
        + rows * form.inputs * x_itemsize
        + _plan_bytes(cut, assignments),
        bytes_written=assignments * form.outputs * x_itemsize,
        flops=round(tile_flops(cut.gate_up, form, 1) * _used_tiles(cut, assignments, used)),
    )


def down_cost(
    assignments: int, form: Form, cut: Tiling, used: float, x_itemsize: int, dtype: DTypeLike = "bfloat16"
) -> Cost:
    """Of the kernel that multiplies with down and the router's weights. form.outputs: of one turn."""
    return Cost(
        bytes_read=round(used * (code_bytes(form, dtype) + scale_bytes(form)))
        + assignments * (form.inputs * x_itemsize + _FLOAT32)
        + _plan_bytes(cut, assignments),
        bytes_written=assignments * form.outputs * x_itemsize,
        flops=round(tile_flops(cut.down, form, 1) * _used_tiles(cut, assignments, used)),
    )


def loads(
    rows: int,
    each: int,
    experts: int,
    gate_up: Form,
    down: Form,
    used_tiles: int,
    x_itemsize: int,
    dtype: DTypeLike = "bfloat16",
) -> Loads:
    """Bytes that all programs of both kernels load, if all assignments are here and fill so many tiles."""
    cut, assignments = tiling(rows, each, experts, gate_up, down), rows * each
    found = []
    for own, form in ((cut.gate_up, gate_up), (cut.down, down)):
        blocks = -(-form.outputs // own.outputs)
        finding = cut.tiles * cut.rows + 2 * used_tiles  # a tile's assignments; its expert, and the group
        if own is cut.down:
            finding += cut.tiles + assignments  # which turn it is; the router's weights
        part = tile_loads(own, form, used_tiles, assignments, x_itemsize, dtype)
        found.append(part._replace(rest=blocks * finding * _INT32))
    return Loads(*(a + b for a, b in zip(*found, strict=True)))


def _used_tiles(cut: Tiling, assignments: int, used: float) -> float:
    """At least: one for each expert, and as many as the assignments fill."""
    return max(used, assignments / cut.rows)


def _plan_bytes(cut: Tiling, assignments: int) -> int:
    return (cut.tiles * cut.rows + assignments + 1) * _INT32
