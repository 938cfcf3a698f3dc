"""The routed experts of a mixture-of-experts layer."""

import jax
from jaxtyping import Array, Float, Int

from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.experts import reference, triton
from glm_dcp_jax.kernels.experts.reference import tile_plan
from glm_dcp_jax.kernels.weights import Weight

__all__ = ["routed_experts", "tile_plan"]


def routed_experts(
    x: Float[Array, "T H"],
    expert_ids: Int[Array, "T K"],
    weights: Float[Array, "T K"],
    gate_up: Weight,
    down: Weight,
    group: Int[Array, ""] | int = 0,
    first_expert: Int[Array, ""] | int = 0,
    backend: Backend = "auto",
) -> Float[Array, "T H"]:
    """sum_k weights[t, k] * down_e(silu(gate_e x) * up_e x) with e = expert_ids[t, k], in float32.

    gate_up: [E, 2, i, H], down: [E, H, i], or both stacked over the groups of a scan on one more leading axis, of which
    `group` is used. first_expert: the number of the first of these E experts; assignments to others count as nothing,
    which is how experts are split over ranks.
    """
    given = x, expert_ids, weights, group, first_expert
    stored, structure = jax.tree.flatten((gate_up, down))

    def with_weights(op):
        def run(x, expert_ids, weights, group, first_expert, *stored, **options):
            return op(x, expert_ids, weights, *jax.tree.unflatten(structure, stored), group, first_expert, **options)
        return run

    return dispatch(backend, with_weights(reference.routed_experts), with_weights(triton.routed_experts), *given, *stored)
