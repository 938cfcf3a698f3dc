"""Multi-head latent attention: the projections around the attention itself, which lives in parallel/."""

from dataclasses import replace
from typing import NamedTuple

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.kernels.dispatch import Backend
from glm_dcp_jax.model.elementary import rms_norm, rotate
from glm_dcp_jax.model.parameters import Maker, Source

_PREFIX = "model.layers.{layer}.self_attn."


class Projections(NamedTuple):
    """query_latent: [T, q_lora], also the indexer's input. nope: [T, h, nope], rope: [T, h, R]: this rank's heads.

    latent: [T, C] normed, rope_key: [T, R] rotated: what the cache keeps.
    """

    query_latent: Float[Array, "T q_lora"]
    nope: Float[Array, "T h nope"]
    rope: Float[Array, "T h R"]
    latent: Float[Array, "T C"]
    rope_key: Float[Array, "T R"]


class LatentAttention(nnx.Module):
    """Weights of one layer's MLA. Heads are sharded; q_a and kv_a are replicated."""

    def __init__(self, config: ModelConfig, make: Maker, group_values: bool = False) -> None:
        """group_values: keep the value expansion of all heads of the DCP group too."""
        self.config = config
        heads, hidden, latent = config.num_attention_heads, config.hidden_size, config.kv_lora_rank
        nope, value, qk = config.qk_nope_head_dim, config.v_head_dim, config.qk_head_dim
        q_lora = config.q_lora_rank
        self.q_a = make.linear(_PREFIX + "q_a_proj.weight", (q_lora, hidden))
        self.q_a_norm = make.weight(_PREFIX + "q_a_layernorm.weight", (q_lora,))
        self.q_b = make.linear(
            _PREFIX + "q_b_proj.weight", (heads * qk, q_lora), ("heads", None), units=(qk, 1)
        )
        self.kv_a = make.linear(_PREFIX + "kv_a_proj_with_mqa.weight", (config.record_width, hidden))
        self.kv_a_norm = make.weight(_PREFIX + "kv_a_layernorm.weight", (latent,))
        # Its two halves are folded into queries and outputs, head by head: scales of 128 rows would be cut.
        kv_b = Source(
            (_PREFIX + "kv_b_proj.weight",),
            (heads * (nope + value), latent),
            view=(heads, nope + value, latent),
        )
        by_head = ("heads", None, None)
        self.key_expansion = make(replace(kv_b, window=(1, 0, nope)), by_head)
        values = replace(kv_b, window=(1, nope, nope + value))
        self.value_expansion = make(values, by_head)
        self.group_values = make(values, ("group_heads", None, None)) if group_values else None
        self.output = make.linear(
            _PREFIX + "o_proj.weight", (hidden, heads * value), (None, "heads"), units=(1, value)
        )

    def project(
        self,
        x: Float[Array, "T H"],
        angles: Float[Array, "T R/2"],
        group: Int[Array, ""] | int,
        kernels: Backend,
    ) -> Projections:
        """Queries of this rank's heads and the record's values, from the normed hidden state.

        group: whose weights of a stack.
        """
        config = self.config
        query_latent = rms_norm(self.q_a(x, group, kernels), self.q_a_norm[...], config.latent_norm_eps)
        q = self.q_b(query_latent, group, kernels).reshape(x.shape[0], -1, config.qk_head_dim)
        nope, rope = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
        kv = self.kv_a(x, group, kernels)
        latent, rope_key = jnp.split(kv, [config.kv_lora_rank], axis=-1)
        return Projections(
            query_latent,
            nope,
            rotate(rope, angles, config.rope_interleave),
            rms_norm(latent, self.kv_a_norm[...], config.latent_norm_eps),
            rotate(rope_key, angles, config.rope_interleave),
        )

    def project_out(
        self, values: Float[Array, "T h v"], group: Int[Array, ""] | int, kernels: Backend
    ) -> Float[Array, "T H"]:
        """This rank's part of the output projection, float32, to be summed over all ranks."""
        return self.output(values.reshape(values.shape[0], -1), group, kernels, jnp.float32)
