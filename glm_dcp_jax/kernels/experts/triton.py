"""Routed experts as two Pallas-Triton kernels over tiles of assignments of one expert each.

The first makes silu(gate) * up of a tile's rows, the second multiplies that by down and by the router's weights. A tile
that the routing does not use exits before it reads anything. Both results lie by assignment, in x's dtype, so that
nothing is added up by several programs, and each row's few are summed by XLA, in float32.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from glm_dcp_jax.kernels import tiles, weight_tiles
from glm_dcp_jax.kernels.experts.tile_plan import plan_tiles
from glm_dcp_jax.kernels.experts.tiling import tiling
from glm_dcp_jax.kernels.weight_tiles import Cut, Form, Rows, gated
from glm_dcp_jax.kernels.weights import Weight, shape_of


def routed_experts(
    x: Float[Array, "T H"],
    expert_ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    gate_up: Weight,
    down: Weight,
    group: Int[Array, ""],
    first_expert: Int[Array, ""],
    interpret: bool,
) -> Float[Array, "T H"]:
    """See the op."""
    *_, experts, _, width, hidden = shape_of(gate_up)
    rows, each = expert_ids.shape
    if 0 in (experts, width, hidden):
        return jnp.zeros((rows, hidden), jnp.float32)
    inner_form, outer_form = (weight_tiles.form_of(weight, x.dtype) for weight in (gate_up, down))
    cut = tiling(rows, each, experts, inner_form, outer_form)
    plan = plan_tiles(expert_ids, first_expert, experts, cut.rows)
    chosen = (expert_ids - first_expert).reshape(-1)
    routing = plan, chosen, group.reshape(1)
    inner = pl.pallas_call(
        partial(_gate_up, of=_Product(gate_up, inner_form, cut.gate_up, each, interpret)),
        grid=(-(-width // cut.gate_up.outputs), cut.tiles),
        out_shape=jax.ShapeDtypeStruct((rows * each, width), x.dtype),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=cut.gate_up.warps, num_stages=cut.gate_up.stages),
        name="experts_gate_up",
    )(*routing, x, *weight_tiles.as_stored(gate_up))
    blocks = -(-hidden // cut.down.outputs)
    part_blocks = -(-blocks // cut.parts)
    factors = weights.astype(jnp.float32).reshape(-1)
    here = ((chosen >= 0) & (chosen < experts))[:, None]

    def part(number: Int[Array, ""]) -> Float[Array, "T columns"]:
        """Some of the outputs, summed over each row's experts."""
        columns = part_blocks * cut.down.outputs if cut.parts > 1 else hidden
        out = pl.pallas_call(
            partial(_down, of=_Product(down, outer_form, cut.down, 1, interpret), part_blocks=part_blocks),
            grid=(part_blocks, cut.tiles),
            out_shape=jax.ShapeDtypeStruct((rows * each, columns), x.dtype),
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=cut.down.warps, num_stages=cut.down.stages),
            name="experts_down",
        )(*routing, number.reshape(1), inner, factors, *weight_tiles.as_stored(down))
        own = jnp.where(here, out.astype(jnp.float32), 0.0)
        return jnp.sum(own.reshape(rows, each, columns), axis=1)

    if cut.parts == 1:
        return part(jnp.zeros((), jnp.int32))
    parts = jax.lax.map(part, jnp.arange(cut.parts))
    return jnp.moveaxis(parts, 0, 1).reshape(rows, -1)[:, :hidden]


class _Product:
    """A product of assignments' rows with the matrices of their experts. each: assignments of a row of x."""

    def __init__(self, weight: Weight, form: Form, cut: Cut, each: int, interpret: bool) -> None:
        self.form, self.cut, self.each, self.interpret = form, cut, each, interpret
        self.stride = weight_tiles.matrices_of_group(weight, 2 if cut.matrices == 2 else 1)

    def run(
        self,
        routing: Sequence[jax.Ref],
        x: jax.Ref,
        stored: Sequence[jax.Ref],
        block: Int[Array, ""],
        write: Callable[[Array, list[Array]], None],
    ) -> None:
        """`write(assignments [M], products [outputs, M])` of one tile's block of outputs, if the tile is used."""
        plan, chosen, group = routing
        tile, place = jnp.broadcast_to(pl.program_id(1), 1), jnp.arange(self.cut.rows)
        assignment = tiles.load(plan, tile, place, mask=place < plan.shape[1], other=-1)
        first = jnp.max(assignment)

        def compute() -> None:
            expert = jnp.max(tiles.load(chosen, jnp.broadcast_to(first, 1)))
            own = tiles.only(group) * self.stride + expert * self.cut.matrices
            matrices = [own + number for number in range(self.cut.matrices)]
            rows = Rows(x, jax.lax.div(assignment, self.each), assignment >= 0)
            start = block * self.cut.outputs
            products = weight_tiles.multiply(
                rows, stored, matrices, start, 0, self.form, self.cut, self.interpret
            )
            write(assignment, products)

        pl.when(first >= 0)(compute)

    def store(
        self, out: jax.Ref, block: Int[Array, ""], place: Int[Array, ""], assignment: Array, total: Array
    ) -> None:
        """Outputs `block`, as block `place` of out."""
        line = jnp.arange(self.cut.outputs)[:, None]
        output, column = (number * self.cut.outputs + line for number in (block, place))
        real = assignment >= 0
        # Places that hold nothing lie past the end: interpreted, they would write back what another has just replaced.
        row = jnp.where(real, assignment, out.shape[0])[None, :]
        mask = (output < self.form.outputs) & real[None, :]
        tiles.store(out, row, column, value=total.astype(out.dtype), mask=mask)


def _gate_up(
    plan: jax.Ref, chosen: jax.Ref, group: jax.Ref, x: jax.Ref, *refs: jax.Ref, of: _Product
) -> None:
    *stored, inner = refs
    block = pl.program_id(0)

    def write(assignment: Array, products: list[Array]) -> None:
        of.store(inner, block, block, assignment, gated(*products))

    of.run((plan, chosen, group), x, stored, block, write)


def _down(
    plan: jax.Ref,
    chosen: jax.Ref,
    group: jax.Ref,
    part: jax.Ref,
    inner: jax.Ref,
    factors: jax.Ref,
    *refs: jax.Ref,
    of: _Product,
    part_blocks: int,
) -> None:
    *stored, out = refs
    place = pl.program_id(0)
    block = tiles.only(part) * part_blocks + place

    def write(assignment: Array, products: list[Array]) -> None:
        factor = tiles.load(factors, jnp.maximum(assignment, 0), mask=assignment >= 0)
        of.store(out, block, place, assignment, products[0] * factor[None, :])

    of.run((plan, chosen, group), inner, stored, block, write)
