"""Feed-forward layers: dense, and the mixture of experts with its router."""

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.kernels.dispatch import Backend
from glm_dcp_jax.kernels.experts import routed_experts
from glm_dcp_jax.kernels.linear import gated_linear
from glm_dcp_jax.model.parameters import Maker
from glm_dcp_jax.parallel.mesh import rank

_PREFIX = "model.layers.{layer}.mlp."


class GatedMLP(nnx.Module):
    """down(silu(gate x) * up x), its width sharded. prefix: where in the layer its tensors are named."""

    def __init__(self, hidden: int, width: int, prefix: str, make: Maker) -> None:
        pair = (prefix + "gate_proj.weight", prefix + "up_proj.weight")
        unit = make.width_unit(width)
        self.gate_up = make.linear(pair, (width, hidden), ("ffn", None), stack=(2,), units=(unit, 1))
        self.down = make.linear(prefix + "down_proj.weight", (hidden, width), (None, "ffn"), units=(1, unit))

    def __call__(
        self, x: Float[Array, "T H"], group: Int[Array, ""] | int, kernels: Backend
    ) -> Float[Array, "T H"]:
        """This rank's part, float32, to be summed over all ranks. group: whose weights of a stack."""
        inner = gated_linear(x, self.gate_up.arrays, group, kernels)
        return self.down(inner, group, kernels, jnp.float32)


class MixtureOfExperts(nnx.Module):
    """Sigmoid router with correction bias (noaux_tc), routed experts, and shared experts beside them."""

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        self.config = config
        hidden, width, experts = config.hidden_size, config.moe_intermediate_size, config.n_routed_experts
        self.router = make.linear(_PREFIX + "gate.weight", (experts, hidden), dtype=jnp.float32)
        # The bias is a large offset with a small spread: in bfloat16 it would choose other experts.
        self.bias = make.weight(_PREFIX + "gate.e_score_correction_bias", (experts,), dtype=jnp.float32)
        each = [_PREFIX + f"experts.{expert}." for expert in range(experts)]
        pairs = tuple(name + kind for name in each for kind in ("gate_proj.weight", "up_proj.weight"))
        down = tuple(name + "down_proj.weight" for name in each)
        # Either each rank has a part of every expert, or some of the experts.
        self.split = make.expert_parallel
        by_expert, by_width = ("experts", None) if self.split else (None, "ffn")
        unit = 1 if self.split else make.width_unit(width)
        self.gate_up = make.linear(
            pairs, (width, hidden), (by_width, None), (experts, 2), (by_expert, None), (unit, 1)
        )
        self.down = make.linear(down, (hidden, width), (None, by_width), (experts,), (by_expert,), (1, unit))
        shared = config.n_shared_experts * width
        self.shared = GatedMLP(hidden, shared, _PREFIX + "shared_experts.", make) if shared else None

    def route(
        self, x: Float[Array, "T H"], group: Int[Array, ""] | int, kernels: Backend
    ) -> tuple[Int[Array, "T K"], Float[Array, "T K"]]:
        """The chosen experts of each row and their weights (routed_scaling_factor included), in float32.

        group: whose weights of a stack.
        """
        config = self.config
        logits = self.router(x.astype(jnp.float32), group, kernels)
        scores = jax.nn.sigmoid(logits)
        choice = _keep_groups(scores + self.bias[...], config.n_group, config.topk_group)
        _, experts = jax.lax.top_k(choice, config.num_experts_per_tok)
        weights = jnp.take_along_axis(scores, experts, axis=1)
        if config.norm_topk_prob:
            # All chosen sigmoids can underflow to 0: the tiny term keeps 0/0 away.
            weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
        return experts, weights * config.routed_scaling_factor

    def __call__(
        self,
        x: Float[Array, "T H"],
        experts: Int[Array, "T K"],
        weights: Float[Array, "T K"],
        group: Int[Array, ""] | int,
        kernels: Backend,
    ) -> Float[Array, "T H"]:
        """This rank's part of routed and shared experts, float32, to be summed over all ranks.

        group: whose weights of a stack.
        """
        gate_up, down = self.gate_up.arrays, self.down.arrays
        first = rank() * down[0].shape[-3] if self.split else 0
        out = routed_experts(x, experts, weights, gate_up, down, group, first, kernels)
        return out if self.shared is None else out + self.shared(x, group, kernels)


def _keep_groups(choice: Float[Array, "T E"], groups: int, kept: int) -> Float[Array, "T E"]:
    """Mask (with -inf: choices may be negative) all but the `kept` groups whose two best choices sum highest."""
    if groups == 1:
        return choice
    grouped = choice.reshape(choice.shape[0], groups, -1)
    group_score = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
    _, best = jax.lax.top_k(group_score, kept)
    keep = (best[:, :, None] == jnp.arange(groups)).any(axis=1)
    return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(choice.shape)
