"""Whole passes through the network: the trunk, and the MTP layer behind it. Letters as in network.py."""

from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from demo_training import network
from demo_training.network import Layer, Parameters, Shape, project, rms

DRAFTS = 3


class Attention(Enum):
    """DENSE: every earlier token, no indexer. INDEXED: the same, and indexers are compared with it. SPARSE: topk."""

    DENSE = "dense"
    INDEXED = "indexed"
    SPARSE = "sparse"


class Passed(NamedTuple):
    """hidden: [B, T, H] after the final norm. distance: of the indexers, summed. loads: layer -> [E] tokens."""

    hidden: Array
    distance: Array
    loads: dict[int, Array]


def trunk(p: Parameters, s: Shape, layers: Sequence[Layer], ids: Array, attention: Attention) -> Passed:
    """The network without its head. ids: [B, T]."""
    h = p["embed_tokens"][ids]
    positions = jnp.arange(ids.shape[1], dtype=jnp.float32)
    visible = mask = network.causal(ids.shape[1])
    distance, loads = jnp.zeros(()), {}
    scores: Array | None = None
    seen: list[Array | None] = []
    watched = attention is not Attention.DENSE
    for layer in layers:
        if layer.full and attention is not Attention.DENSE:
            distance += _distance(scores, mask, seen)
            seen = []
            scores = _scores(p, h, positions, s=s, layer=layer)
            mask = network.select(scores, visible, s.topk) if attention is Attention.SPARSE else visible
        h, weights, loads[layer.index] = _layer(p, h, mask, positions, s=s, layer=layer, watched=watched)
        seen.append(weights)
    distance += _distance(scores, mask, seen)
    return Passed(rms(h, p["norm"], s.eps), distance, loads)


def _distance(scores: Array | None, mask: Array, seen: list[Array | None]) -> Array:
    """Of a full layer's scores from what the layers that use its selection attended to."""
    if scores is None:
        return jnp.zeros(())
    return network.index_distance(scores, mask, sum(seen[1:], seen[0]) / len(seen))


def _scores(p: Parameters, h: Array, positions: Array, *, s: Shape, layer: Layer) -> Array:
    """The indexer learns from its own loss only."""
    name = f"layers.{layer.index}"
    x = jax.lax.stop_gradient(rms(h, p[f"{name}.input_layernorm"], s.eps))
    c_q = jax.lax.stop_gradient(network.query_latent(p, f"{name}.self_attn", x))
    return network.index_scores(p, s, f"{name}.self_attn.indexer", x, c_q, positions)


def _layer(
    p: Parameters, h: Array, mask: Array, positions: Array, *, s: Shape, layer: Layer, watched: bool
) -> tuple[Array, Array | None, Array]:
    """(hidden [B, T, H], if watched attention [B, T, T] as the mean over heads, tokens by expert [E])."""
    name = f"layers.{layer.index}"
    x = rms(h, p[f"{name}.input_layernorm"], s.eps)
    c_q = network.query_latent(p, f"{name}.self_attn", x)
    kept = network.latents(p, s, f"{name}.self_attn", x, positions)
    out, weights = network.attend(p, s, f"{name}.self_attn", c_q, kept, mask, positions, watched)
    h = h + out
    x = rms(h, p[f"{name}.post_attention_layernorm"], s.eps)
    out, loads = network.feed_forward(p, s, f"{name}.mlp", layer.sparse, x)
    return h + out, weights, loads


class Drafted(NamedTuple):
    """hidden: DRAFTS arrays [B, T - 1, H]; row i of the k-th (from 0) predicts token i + 2 + k. Others as in Passed."""

    hidden: list[Array]
    distance: Array
    loads: Array


def drafts(p: Parameters, s: Shape, layer: Layer, hidden: Array, ids: Array, attention: Attention) -> Drafted:
    """The MTP layer's steps behind every token of a row.

    hidden: [B, T, H], the trunk's after its final norm; nothing is learnt through it, nor through the embeddings.
    Steps after the first attend to the first one's records, by the selection of their row: that is what serving does.
    """
    name = f"layers.{layer.index}"
    hidden = jax.lax.stop_gradient(hidden[:, :-1])
    embeddings = jax.lax.stop_gradient(p["embed_tokens"])
    rows = hidden.shape[1]
    positions = jnp.arange(rows, dtype=jnp.float32)
    mask = network.causal(rows)
    kept, scores, distance = None, None, jnp.zeros(())
    outputs, loads = [], jnp.zeros(s.experts)
    for step in range(DRAFTS):
        following = jnp.pad(ids, ((0, 0), (0, step)))[:, 1 + step : 1 + step + rows]
        joined = (
            rms(embeddings[following], p[f"{name}.enorm"], s.eps),
            rms(hidden, p[f"{name}.hnorm"], s.eps),
        )
        u = project(p, f"{name}.eh_proj", jnp.concatenate(joined, axis=-1))
        x = rms(u, p[f"{name}.input_layernorm"], s.eps)
        c_q = network.query_latent(p, f"{name}.self_attn", x)
        if kept is None:
            kept = network.latents(p, s, f"{name}.self_attn", x, positions)
            scores = _scores(p, u, positions, s=s, layer=layer)
            if attention is Attention.SPARSE:
                mask = network.select(scores, mask, s.topk)
        out, weights = network.attend(p, s, f"{name}.self_attn", c_q, kept, mask, positions + step, step == 0)
        if step == 0:
            distance = network.index_distance(scores, mask, weights)
        y = u + out
        out, load = network.feed_forward(
            p, s, f"{name}.mlp", layer.sparse, rms(y, p[f"{name}.post_attention_layernorm"], s.eps)
        )
        hidden = rms(y + out, p[f"{name}.shared_head.norm"], s.eps)
        outputs.append(hidden)
        loads += load
    return Drafted(outputs, distance, loads)


def cross_entropy(p: Parameters, hidden: Array, targets: Array, weights: Array) -> Array:
    """Weighted mean over hidden [B, T, H] of what targets [B, T] cost; weights: [B, T]."""
    logits = hidden @ p["lm_head"].T
    costs = (
        jax.nn.logsumexp(logits, axis=-1) - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
    )
    return jnp.sum(costs * weights) / jnp.maximum(jnp.sum(weights), 1.0)
