"""Routed experts as two Pallas-Triton kernels over tiles of assignments of one expert each.

The first makes silu(gate) * up of a tile's rows, the second multiplies that by down and by the router's weights. A tile
that the routing does not use exits before it reads anything. Both results lie by assignment, so that nothing is added
up by several programs, and each row's few are summed by XLA.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from glm_dcp_jax.kernels import tiles, weight_tiles
from glm_dcp_jax.kernels.experts.tile_plan import plan_tiles
from glm_dcp_jax.kernels.experts.tiling import cuts_of
from glm_dcp_jax.kernels.weight_tiles import Cut, Form, Rows
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
    if 0 in (rows, each, experts, width, hidden):
        return jnp.zeros((rows, hidden), jnp.float32)
    forms = weight_tiles.form_of(gate_up, x.dtype), weight_tiles.form_of(down, x.dtype)
    cuts = cuts_of(rows * each, rows, experts, *forms)
    tile_rows = cuts[0].rows
    plan = plan_tiles(expert_ids, first_expert, experts, tile_rows)
    chosen = (expert_ids - first_expert).reshape(-1)

    def call(name: str, x: Array, weight: Weight, number: int, result: jax.ShapeDtypeStruct, scale: list[Array]) -> Array:
        form, cut = forms[number], cuts[number]
        stride = weight_tiles.matrices_of_group(weight, 2 if number == 0 else 1)
        kernel = partial(_multiply, form=form, cut=cut, stride=stride, each=each if number == 0 else 1, interpret=interpret)
        return pl.pallas_call(
            kernel,
            grid=(-(-form.outputs // cut.outputs), plan.shape[0]),
            out_shape=result,
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
            name=name,
        )(x, plan, chosen, group.reshape(1), *scale, *weight_tiles.as_stored(weight))

    inner = call("experts_gate_up", x, gate_up, 0, jax.ShapeDtypeStruct((rows * each, width), x.dtype), [])
    result = jax.ShapeDtypeStruct((rows * each, hidden), jnp.float32)
    out = call("experts_down", inner, down, 1, result, [weights.astype(jnp.float32).reshape(-1)])
    here = (chosen >= 0) & (chosen < experts)
    return jnp.sum(jnp.where(here[:, None], out, 0.0).reshape(rows, each, hidden), axis=1)


def _multiply(
    x: jax.Ref,
    plan: jax.Ref,
    chosen: jax.Ref,
    group: jax.Ref,
    *refs: jax.Ref,
    form: Form,
    cut: Cut,
    stride: int,
    each: int,
    interpret: bool,
) -> None:
    """One block of outputs of one tile. chosen: each assignment's expert. each: assignments of a row of x."""
    *stored, out = refs
    weights = None if cut.matrices == 2 else stored.pop(0)
    tile, start = pl.program_id(1), pl.program_id(0) * cut.outputs
    place = jnp.arange(cut.rows)
    listed = place < plan.shape[1]
    assignment = tiles.load(plan, jnp.broadcast_to(tile, 1), place, mask=listed, other=-1)
    first = jnp.max(tiles.load(plan, jnp.broadcast_to(tile, 1), jnp.zeros(1, jnp.int32)))

    def compute() -> None:
        real = assignment >= 0
        expert = jnp.max(tiles.load(chosen, jnp.broadcast_to(first, 1)))
        in_group = jnp.max(tiles.load(group, jnp.zeros(1, jnp.int32))) * stride
        matrices = [in_group + expert * cut.matrices + number for number in range(cut.matrices)]
        rows = Rows(x, jax.lax.div(assignment, each), real)
        totals = weight_tiles.multiply(rows, stored, matrices, start, 0, form, cut, interpret)
        if weights is None:
            gate, up = totals
            total = gate * jax.nn.sigmoid(gate) * up
        else:
            total = totals[0] * tiles.load(weights, assignment, mask=real)[None, :]
        output = (start + jnp.arange(cut.outputs))[:, None]
        mask = (output < form.outputs) & real[None, :]
        tiles.store(out, assignment[None, :], output, value=total.astype(out.dtype), mask=mask)

    pl.when(first >= 0)(compute)
