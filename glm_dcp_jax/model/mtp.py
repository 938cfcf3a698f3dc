"""The MTP layer (multi-token prediction), which drafts: from a token and the hidden state that predicted it, the next.

Row i has position i, the main model's hidden state of position i behind its final norm, and the embedding of token
i + 1; it predicts token i + 2. The layer has caches of its own. Embedding and output head are the main model's.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from glm_dcp_jax.cache.pools import Pools
from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.kernels.dispatch import Backend
from glm_dcp_jax.model.elementary import rms_norm, rope_angles
from glm_dcp_jax.model.group import ShareGroup, StepContext
from glm_dcp_jax.model.parameters import Maker
from glm_dcp_jax.model.rows import Rows
from glm_dcp_jax.parallel.attention import AttentionPath, AttentionSettings
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.mesh import TENSOR_AXES

_PREFIX = "model.layers.{layer}."


class Prediction(NamedTuple):
    """hidden: [T, H], normed for the output head and for the next draft. pools: with what the rows wrote.

    selections: each block's.
    """

    hidden: Float[Array, "T H"]
    pools: Pools
    selections: tuple[Selection, ...]


class MultiTokenPrediction(nnx.Module):
    """The weights of layer num_hidden_layers: a Full layer with experts, and what surrounds it.

    group_values: see LatentAttention.
    """

    def __init__(self, config: ModelConfig, make: Maker, group_values: bool = False) -> None:
        self.config = config
        hidden = config.hidden_size
        self.embedding_norm = make.weight(_PREFIX + "enorm.weight", (hidden,))
        self.hidden_norm = make.weight(_PREFIX + "hnorm.weight", (hidden,))
        self.join = make.linear(_PREFIX + "eh_proj.weight", (hidden, 2 * hidden), ("hidden", None))
        self.group = ShareGroup(config, (True,), [make], group_values)
        self.head_norm = make.weight(_PREFIX + "shared_head.norm.weight", (hidden,))

    def __call__(
        self,
        embedded: Float[Array, "T H"],
        hidden: Float[Array, "T H"],
        rows: Rows,
        pools: Pools,
        blocks: tuple[Block, ...],
        paths: tuple[AttentionPath, ...],
        settings: AttentionSettings,
        chosen: tuple[Selection, ...] | None = None,
    ) -> Prediction:
        """Run all blocks' rows; inside shard_map.

        embedded: of their tokens. hidden: the main model's, or in further drafts what the draft before gave. pools:
        this layer's alone. chosen: each block's selection, which is then attended to instead of a new one; nothing is
        written.
        """
        config = self.config
        layer = config.num_hidden_layers
        angles = rope_angles(rows.positions, config.qk_rope_head_dim, config.rope_theta)
        context = StepContext(settings, blocks, paths, angles, rows.index_slots, layer, 0, chosen)
        out = self.group(
            self._joined(embedded, hidden, settings.kernels), pools.index_keys, pools.ckv, layer, 0, context
        )
        normed = rms_norm(out.x, self.head_norm[...], config.rms_norm_eps)
        if chosen is not None:
            return Prediction(normed, pools, chosen)
        ckv, _ = rows.commit(pools.ckv, out.records, out.x, settings)
        return Prediction(normed, Pools(ckv, out.index_pool), out.trace.selections)

    @jax.named_scope("mtp_join")
    def _joined(
        self, embedded: Float[Array, "T H"], hidden: Float[Array, "T H"], kernels: Backend
    ) -> Float[Array, "T H"]:
        """What the layer runs on, [T, H]: both inputs normed, the embedding first, projected by all ranks together."""
        eps = self.config.rms_norm_eps
        halves = (
            rms_norm(embedded, self.embedding_norm[...], eps),
            rms_norm(hidden, self.hidden_norm[...], eps),
        )
        part = self.join(jnp.concatenate(halves, axis=1), 0, kernels)
        whole = jax.lax.all_gather(part, TENSOR_AXES, axis=1, tiled=True)
        return whole[:, : self.config.hidden_size]
