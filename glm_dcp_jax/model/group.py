"""The share group: a Full layer and the Shared layers behind it, the unit of the network."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from glm_dcp_jax.config import ModelConfig
from glm_dcp_jax.kernels.index_keys import write_index_keys
from glm_dcp_jax.model.attention import LatentAttention, Projections
from glm_dcp_jax.model.elementary import rms_norm
from glm_dcp_jax.model.feed_forward import GatedMLP, MixtureOfExperts
from glm_dcp_jax.model.indexer import Indexer
from glm_dcp_jax.model.parameters import Maker
from glm_dcp_jax.parallel.attention import (
    AttentionLayer,
    AttentionPath,
    AttentionSettings,
    Moved,
    Queries,
    Window,
)
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.index_selection import FEW_ROWS, select, selection_hash
from glm_dcp_jax.parallel.mesh import TENSOR_AXES

_PREFIX = "model.layers.{layer}."


@dataclass(frozen=True)
class StepContext:
    """What a step's layers share. Rows of all blocks are laid one after the other: T in all.

    paths: the attention path of each block. angles: [T, R/2]. index_slots: [T], where each row's index key goes.
    first_layer, first_full: the layers that are the first in the pools. chosen: each block's selection, where it was
    made before: index keys are then neither written nor scored.
    """

    settings: AttentionSettings
    blocks: tuple[Block, ...]
    paths: tuple[AttentionPath, ...]
    angles: Float[Array, "T R/2"]
    index_slots: Int[Array, " T"]
    first_layer: int
    first_full: int
    chosen: tuple[Selection, ...] | None = None

    def cut(self, rows: Float[Array, "T *rest"]) -> list[Float[Array, "N S *rest"]]:
        """Rows of all blocks back into each block's [N, S]."""
        parts, start = [], 0
        for block in self.blocks:
            part = rows[start : start + block.rows]
            parts.append(part.reshape(*block.positions.shape, *rows.shape[1:]))
            start += block.rows
        return parts


class GroupTrace(NamedTuple):
    """What a captured step keeps of a group of G layers, M of them with experts.

    hidden: [G, T, H], each layer's output. selections: one per block. experts, weights: [M, T, K].
    """

    hidden: Float[Array, "G T H"]
    selections: tuple[Selection, ...]
    experts: Int[Array, "M T K"] | None
    weights: Float[Array, "M T K"] | None


class GroupOutput(NamedTuple):
    """x: hidden states [T, H]. index_pool: with this step's keys. records: [G, T, width], this step's, encoded.

    trace: a GroupTrace, for a captured step. moved: what all blocks' plans make travel. selection_hash: [] uint32, of
    what decode blocks selected. Runs of several groups stack theirs, hence the open types.
    """

    x: Any
    index_pool: Any
    records: Any
    trace: Any
    moved: Moved
    selection_hash: Any


class Layer(nnx.Module):
    """One decoder layer's weights; only a Full layer has an indexer."""

    def __init__(
        self, config: ModelConfig, full: bool, sparse: bool, make: Maker, group_values: bool
    ) -> None:
        hidden = config.hidden_size
        self.input_norm = make.weight(_PREFIX + "input_layernorm.weight", (hidden,))
        self.attention = LatentAttention(config, make, group_values)
        self.indexer = Indexer(config, make) if full else None
        self.feed_forward_norm = make.weight(_PREFIX + "post_attention_layernorm.weight", (hidden,))
        self.feed_forward = (
            MixtureOfExperts(config, make)
            if sparse
            else GatedMLP(hidden, config.intermediate_size, _PREFIX + "mlp.", make)
        )


class ShareGroup(nnx.Module):
    """A Full layer and its Shared layers. sparse: which of them have experts. group_values: see LatentAttention."""

    def __init__(
        self,
        config: ModelConfig,
        sparse: tuple[bool, ...],
        makers: Sequence[Maker],
        group_values: bool = False,
    ) -> None:
        """makers: of each layer's parameters."""
        self.config = config
        self.layers = nnx.List(
            Layer(config, member == 0, is_sparse, make, group_values)
            for member, (is_sparse, make) in enumerate(zip(sparse, makers, strict=True))
        )

    def __call__(
        self,
        x: Float[Array, "T H"],
        index_pool: Float[Array, "full slots D"],
        ckv: Float[Array, "layers slots width"],
        first_layer: Int[Array, ""] | int,
        full_ordinal: Int[Array, ""] | int,
        context: StepContext,
        ordinal: Int[Array, ""] | int = 0,
    ) -> GroupOutput:
        """Run the group on hidden states x; `ckv` holds what earlier steps committed and is only read.

        ordinal: which of the groups this is whose weights are stacked.
        """
        eps, kernels = self.config.rms_norm_eps, context.settings.kernels
        records, hidden, routes = [], [], []
        plans: list = []
        flights: list = []
        selections: list[Selection] = []
        moved = Moved.nothing()
        for member, layer in enumerate(self.layers):
            number = first_layer + member
            with jax.named_scope("project"):
                normed = rms_norm(x, layer.input_norm[...], eps)
                projected = layer.attention.project(normed, context.angles, ordinal, kernels)
                outer_scale = context.settings.outer_scale(number)
                current = context.settings.record.encode(projected.latent, projected.rope_key, outer_scale)
            records.append(current)
            if layer.indexer is not None:
                if context.chosen is None:
                    ordinal_in_pool = full_ordinal - context.first_full
                    index_pool, selections = _select(
                        layer.indexer, normed, projected, index_pool, ordinal_in_pool, context, ordinal
                    )
                else:
                    selections = list(context.chosen)
                with jax.named_scope("plan"):
                    pairs = zip(context.paths, selections, context.blocks, strict=True)
                    plans = [path.plan(selection, block) for path, selection, block in pairs]
                planes = first_layer - context.first_layer + jnp.arange(len(self.layers), dtype=jnp.int32)
                for path, plan in zip(context.paths, plans, strict=True):
                    flights.append(path.start(plan, ckv, planes))
                    moved = moved.plus(path.moved(plan))
            view = AttentionLayer(
                number,
                number - context.first_layer,
                member,
                layer.attention.key_expansion[...],
                layer.attention.value_expansion[...],
                None if layer.attention.group_values is None else layer.attention.group_values[...],
            )
            out = _attend(view, projected, current, plans, flights, context)
            with jax.named_scope("project_out"):
                out = layer.attention.project_out(out.astype(x.dtype), ordinal, kernels)
            out, flights = _all_reduce(out, flights, view, "attention", context)
            x = x + out.astype(x.dtype)
            with jax.named_scope("ffn"):
                normed = rms_norm(x, layer.feed_forward_norm[...], eps)
                if isinstance(layer.feed_forward, MixtureOfExperts):
                    route = layer.feed_forward.route(normed, ordinal, kernels)
                    routes.append(route)
                    out = layer.feed_forward(normed, *route, ordinal, kernels)
                else:
                    out = layer.feed_forward(normed, ordinal, kernels)
            out, flights = _all_reduce(out, flights, view, "ffn", context)
            x = x + out.astype(x.dtype)
            hidden.append(x)
        trace = GroupTrace(
            jnp.stack(hidden),
            tuple(selections),
            *(jnp.stack(part) for part in zip(*routes, strict=True)) if routes else (None, None),
        )
        decoded = [chosen.positions for chosen in selections if chosen.positions is not None]
        hashes = [selection_hash(positions) for positions in decoded if positions.shape[1] <= FEW_ROWS]
        return GroupOutput(
            x, index_pool, jnp.stack(records), trace, moved, selection_hash(jnp.array(hashes, jnp.uint32))
        )


def _select(
    indexer: Indexer,
    normed: Float[Array, "T H"],
    projected: Projections,
    index_pool: Float[Array, "full slots D"],
    full_ordinal: Int[Array, ""] | int,
    context: StepContext,
    ordinal: Int[Array, ""] | int,
) -> tuple[Array, list[Selection]]:
    """Write this step's index keys, then score and choose for each block."""
    settings = context.settings
    keys = indexer.index_keys(normed, context.angles, ordinal, settings.kernels)
    index_pool = write_index_keys(
        index_pool,
        full_ordinal,
        context.index_slots,
        keys,
        settings.record.index,
        settings.layout.block_size,
        settings.kernels,
    )
    queries, weights = indexer.index_queries(
        normed, projected.query_latent, context.angles, ordinal, settings.kernels
    )
    selections = []
    parts = zip(context.blocks, context.paths, context.cut(queries), context.cut(weights), strict=True)
    for block, path, block_q, block_w in parts:
        as_mask = path.wants_mask(block)
        selections.append(select(block_q, block_w, index_pool, full_ordinal, block, settings, as_mask))
    return index_pool, selections


def _attend(
    view: AttentionLayer,
    projected: Projections,
    current: Float[Array, "T width"],
    plans: list,
    flights: list,
    context: StepContext,
) -> Float[Array, "T h v"]:
    """Attention of all blocks through their paths."""
    outs = []
    queries = zip(context.cut(projected.nope), context.cut(projected.rope), strict=True)
    parts = zip(context.paths, plans, flights, queries, context.cut(current), strict=True)
    with jax.named_scope("attend"):
        for path, plan, flight, query, own in parts:
            out = path.attend(plan, flight, view, Queries(*query), own)
            outs.append(out.reshape(-1, *out.shape[2:]))
    return jnp.concatenate(outs)


def _all_reduce(
    value: Float[Array, "T H"], flights: list, view: AttentionLayer, kind: Window, context: StepContext
) -> tuple[Float[Array, "T H"], list]:
    """Sum over all ranks, after each path has tied in what must have arrived."""
    landed = []
    for path, flight in zip(context.paths, flights, strict=True):
        value, flight = path.window(flight, view, kind, value)
        landed.append(flight)
    with jax.named_scope("tp_all_reduce"):
        return jax.lax.psum(value, TENSOR_AXES), landed
