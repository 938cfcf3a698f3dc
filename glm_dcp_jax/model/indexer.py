"""The lightning indexer of a Full layer: index keys and index queries."""

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.config.model import INDEX_NORM_EPS
from glm_dcp_jax.kernels.dispatch import Backend
from glm_dcp_jax.model.elementary import layer_norm, rotate
from glm_dcp_jax.model.parameters import Maker

_PREFIX = "model.layers.{layer}.self_attn.indexer."


class Indexer(nnx.Module):
    """Weights of one indexer, replicated: every rank makes the same selection bit for bit."""

    def __init__(self, config: ModelConfig, make: Maker) -> None:
        self.config = config
        heads, width, hidden = config.index_n_heads, config.index_head_dim, config.hidden_size
        self.queries = make.linear(_PREFIX + "wq_b.weight", (heads * width, config.q_lora_rank))
        self.keys = make.linear(_PREFIX + "wk.weight", (width, hidden))
        self.key_norm = make.weight(_PREFIX + "k_norm.weight", (width,))
        self.key_norm_bias = make.weight(_PREFIX + "k_norm.bias", (width,))
        # float32 in a bfloat16 model too: rounded head weights make ties.
        self.head_weights = make.linear(_PREFIX + "weights_proj.weight", (heads, hidden), dtype=jnp.float32)

    def index_keys(
        self,
        x: Float[Array, "T H"],
        angles: Float[Array, "T R/2"],
        group: Int[Array, ""] | int,
        kernels: Backend,
    ) -> Float[Array, "T D"]:
        """The keys of these rows, normed and rotated, as the cache keeps them. group: whose weights of a stack."""
        keys = layer_norm(
            self.keys(x, group, kernels), self.key_norm[...], self.key_norm_bias[...], INDEX_NORM_EPS
        )
        return self._rotate_front(keys, angles)

    def index_queries(
        self,
        x: Float[Array, "T H"],
        query_latent: Float[Array, "T q_lora"],
        angles: Float[Array, "T R/2"],
        group: Int[Array, ""] | int,
        kernels: Backend,
    ) -> tuple[Float[Array, "T I D"], Float[Array, "T I"]]:
        """Rotated queries, and float32 head weights with the factors I**-0.5 * D**-0.5 folded in."""
        heads, width = self.config.index_n_heads, self.config.index_head_dim
        queries = self.queries(query_latent, group, kernels)
        queries = self._rotate_front(queries.reshape(x.shape[0], heads, width), angles)
        weights = self.head_weights(x.astype(jnp.float32), group, kernels)
        return queries, weights * (heads**-0.5 * width**-0.5)

    def _rotate_front(self, x: Float[Array, "T *heads D"], angles: Array) -> Float[Array, "T *heads D"]:
        front, back = jnp.split(x, [self.config.qk_rope_head_dim], axis=-1)
        front = rotate(front, angles, self.config.indexer_rope_interleave)
        return jnp.concatenate([front, back], axis=-1)
