"""The routed experts of a mixture-of-experts layer."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.experts import reference, triton
from glm_dcp_jax.kernels.experts.reference import tile_plan
from glm_dcp_jax.kernels.fit import check_axes, check_floats, int32
from glm_dcp_jax.kernels.linear import check_weight
from glm_dcp_jax.kernels.weights import Weight, shape_of

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

    On GPUs each expert's product is rounded to x's dtype before they are summed in float32.
    gate_up: [E, 2, i, H], down: [E, H, i], or both stacked over the groups of a scan on one more leading axis, of which
    `group` is used. first_expert: the number of the first of these E experts; assignments to others count as nothing,
    which is how experts are split over ranks. Experts that no row chose are not read. Raises ValueError for arrays that
    do not fit together, and for weights that are too large, as `linear` does.
    """
    expert_ids, group = int32("expert_ids", expert_ids), int32("group", group)
    first_expert = int32("first_expert", first_expert)
    _check(x, expert_ids, weights, gate_up, down, group, first_expert)
    if expert_ids.size == 0:
        return jnp.zeros(x.shape, jnp.float32)
    parts, structure = jax.tree.flatten((gate_up, down))

    def whole(op: Callable[..., Array]) -> Callable[..., Array]:
        return lambda x, ids, weights, group, first, *parts, **options: op(
            x, ids, weights, *jax.tree.unflatten(structure, parts), group, first, **options
        )

    arrays = x, expert_ids, weights, group, first_expert, *parts
    return dispatch(backend, whole(reference.routed_experts), whole(triton.routed_experts), *arrays)


def _check(
    x: Array,
    expert_ids: Array,
    weights: Array,
    gate_up: Weight,
    down: Weight,
    group: Array,
    first_expert: Array,
) -> None:
    check_axes({}, x=(x, "T H"), expert_ids=(expert_ids, "T K"), weights=(weights, "T K"))
    check_axes({}, group=(group, ""), first_expert=(first_expert, ""))
    check_floats(x=x, weights=weights)
    check_weight("gate_up", gate_up, "E 2 i H", H=(x.shape[1], "x"))
    *stack, experts, _, width, hidden = shape_of(gate_up)
    asked = {"E": (experts, "gate_up"), "H": (hidden, "x"), "i": (width, "gate_up")}
    check_weight("down", down, "E H i", **asked)
    if len(shape_of(down)) != len(stack) + 3 or shape_of(down)[: len(stack)] != tuple(stack):
        raise ValueError(
            f"gate_up is {list(shape_of(gate_up))} and down {list(shape_of(down))}: both or none must be "
            "stacked over the same groups"
        )
