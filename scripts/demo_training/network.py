"""The network as training sees it: whole sequences, all experts, selections as masks. Pure functions of parameters.

Letters: B rows, T tokens, H hidden, N heads, D their width, C latent, R rope, J index heads, I their width, E experts,
F an expert's width. Formulas are those of the family; parameters have its checkpoint's names without `model.` and
`.weight`, and the experts of a layer are one array.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

Parameters = Mapping[str, Array]

_LATENT_EPS = 1e-6
_INDEX_EPS = 1e-6
_NEVER = -1e30
_BLOCK = 128
"""Queries that attend at once."""


@dataclass(frozen=True)
class Shape:
    """What of config.json the training needs."""

    vocabulary: int
    hidden: int
    heads: int
    q_rank: int
    latent: int
    nope: int
    rope: int
    value: int
    dense: int
    experts: int
    chosen: int
    expert: int
    index_heads: int
    index_width: int
    topk: int
    theta: float
    eps: float
    scale: float

    @staticmethod
    def of(config: Mapping[str, Any]) -> "Shape":
        """That of a config.json."""
        names = (
            "vocab_size hidden_size num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim "
            "v_head_dim intermediate_size n_routed_experts num_experts_per_tok moe_intermediate_size index_n_heads "
            "index_head_dim index_topk"
        ).split()
        rest = (
            config["rope_parameters"]["rope_theta"],
            config["rms_norm_eps"],
            config["routed_scaling_factor"],
        )
        return Shape(*(config[name] for name in names), *rest)


@dataclass(frozen=True)
class Layer:
    """index: its number in the checkpoint. full: whether it selects for itself. sparse: whether it has experts."""

    index: int
    full: bool
    sparse: bool


def rms(x: Array, weight: Array, eps: float) -> Array:
    """x [..., H] with a root mean square of 1, times weight [H]."""
    return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def rotate(x: Array, positions: Array, theta: float) -> Array:
    """Interleaved RoPE of x [B, T, N, R]; positions: [T]."""
    width = x.shape[-1]
    angle = positions[:, None] * theta ** (-jnp.arange(0, width, 2) / width)
    cos, sin = jnp.cos(angle)[:, None], jnp.sin(angle)[:, None]
    a, b = x[..., 0::2], x[..., 1::2]
    return jnp.stack((a * cos - b * sin, b * cos + a * sin), axis=-1).reshape(x.shape)


def causal(length: int) -> Array:
    """[1, T, T] bool."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def select(scores: Array, mask: Array, topk: int) -> Array:
    """mask with only the topk best scores of each query left: [B, T, T] bool. All that tie for the last place stay."""
    if mask.shape[-1] <= topk:
        return mask
    bits = jax.lax.bitcast_convert_type(jax.lax.stop_gradient(scores), jnp.int32)
    order = jnp.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # integers in the order of the floats
    order = jnp.where(mask, order, jnp.iinfo(jnp.int32).min)

    def halve(_: int, bounds: tuple[Array, Array]) -> tuple[Array, Array]:
        low, high = bounds
        middle = (low >> 1) + (high >> 1) + (low & high & 1)
        enough = jnp.sum(order > middle[..., None], axis=-1) >= topk
        return jnp.where(enough, middle, low), jnp.where(enough, high, middle)

    lowest = jnp.full(order.shape[:-1], jnp.iinfo(jnp.int32).min, jnp.int32)
    highest = jnp.max(order, axis=-1)
    low, _ = jax.lax.fori_loop(0, 32, halve, (lowest, highest))
    return mask & (order > low[..., None])


def project(p: Parameters, name: str, x: Array) -> Array:
    """x times a matrix of the checkpoint, which is [out, in]."""
    return x @ p[name].T


def index_scores(p: Parameters, s: Shape, name: str, x: Array, c_q: Array, positions: Array) -> Array:
    """The indexer's score of every key for every query: [B, T, T] float32. x: the layer's normed input."""
    q = project(p, f"{name}.wq_b", c_q).reshape(*x.shape[:2], s.index_heads, s.index_width)
    k = project(p, f"{name}.wk", x)
    k = k - k.mean(-1, keepdims=True)
    k = k * jax.lax.rsqrt(jnp.mean(k * k, -1, keepdims=True) + _INDEX_EPS)
    k = (k * p[f"{name}.k_norm"] + p[f"{name}.k_norm.bias"])[:, :, None]

    def turned(of: Array) -> Array:
        return jnp.concatenate((rotate(of[..., : s.rope], positions, s.theta), of[..., s.rope :]), axis=-1)

    w = project(p, f"{name}.weights_proj", x) * (s.index_heads * s.index_width) ** -0.5
    similar = jnp.einsum("bqji,bki->bjqk", turned(q), turned(k)[:, :, 0])
    return jnp.einsum("bqj,bjqk->bqk", w, jax.nn.relu(similar))


class Latents(NamedTuple):
    """What a cache keeps of a layer. c: [B, T, C] normed. k_rope: [B, T, R] rotated."""

    c: Array
    k_rope: Array


def latents(p: Parameters, s: Shape, name: str, x: Array, positions: Array) -> Latents:
    """The layer's records. x: [B, T, H] its normed input."""
    kv = project(p, f"{name}.kv_a_proj_with_mqa", x)
    c = rms(kv[..., : s.latent], p[f"{name}.kv_a_layernorm"], _LATENT_EPS)
    return Latents(c, rotate(kv[..., None, s.latent :], positions, s.theta)[:, :, 0])


def attend(
    p: Parameters,
    s: Shape,
    name: str,
    c_q: Array,
    kept: Latents,
    mask: Array,
    positions: Array,
    watched: bool,
) -> tuple[Array, Array | None]:
    """(output [B, T, H], if watched probabilities [B, T, T] as the mean over heads), over the keys in mask."""
    b, t = c_q.shape[:2]
    q = project(p, f"{name}.q_b_proj", c_q).reshape(b, t, s.heads, s.nope + s.rope)
    kv = project(p, f"{name}.kv_b_proj", kept.c).reshape(b, -1, s.heads, s.nope + s.value)
    q = jnp.concatenate((q[..., : s.nope], rotate(q[..., s.nope :], positions, s.theta)), axis=-1)
    k_rope = jnp.broadcast_to(kept.k_rope[:, :, None], (*kv.shape[:3], s.rope))
    k = jnp.concatenate((kv[..., : s.nope], k_rope), axis=-1)
    # Heads before tokens, so that every head's product is of two plain matrices.
    q, k, v = (x.swapaxes(1, 2) for x in (q * (s.nope + s.rope) ** -0.5, k, kv[..., s.nope :]))
    outs, weights = [], []
    for first in range(0, t, _BLOCK):  # no query sees a key behind its block
        rows, end = slice(first, first + _BLOCK), min(first + _BLOCK, t)
        scores = jnp.where(mask[:, None, rows, :end], q[:, :, rows] @ k[:, :, :end].swapaxes(2, 3), _NEVER)
        probabilities = jax.nn.softmax(scores, axis=-1)
        outs.append(probabilities @ v[:, :, :end])
        if watched:
            weights.append(jnp.pad(probabilities.mean(1), ((0, 0), (0, 0), (0, t - end))))
    out = jnp.concatenate(outs, axis=2).swapaxes(1, 2).reshape(b, t, -1)
    return project(p, f"{name}.o_proj", out), jnp.concatenate(weights, axis=1) if watched else None


def query_latent(p: Parameters, name: str, x: Array) -> Array:
    """c_q: [B, T, q_rank], which heads and indexer read."""
    return rms(project(p, f"{name}.q_a_proj", x), p[f"{name}.q_a_layernorm"], _LATENT_EPS)


def feed_forward(p: Parameters, s: Shape, name: str, sparse: bool, x: Array) -> tuple[Array, Array]:
    """(output [B, T, H], tokens by expert [E])."""

    def gated(prefix: str) -> Array:
        inner = jax.nn.silu(project(p, f"{prefix}.gate_proj", x)) * project(p, f"{prefix}.up_proj", x)
        return project(p, f"{prefix}.down_proj", inner)

    if not sparse:
        return gated(name), jnp.zeros(s.experts)
    affinity = jax.nn.sigmoid(project(p, f"{name}.gate", x))
    choice = jax.lax.stop_gradient(affinity + p[f"{name}.gate.e_score_correction_bias"])
    _, ids = jax.lax.top_k(choice, s.chosen)
    chosen = jax.nn.one_hot(ids, s.experts).sum(-2)
    weights = affinity * chosen
    weights = s.scale * weights / (weights.sum(-1, keepdims=True) + 1e-20)
    inner = jax.nn.silu(jnp.einsum("bth,efh->btef", x, p[f"{name}.experts.gate_proj"]))
    inner *= jnp.einsum("bth,efh->btef", x, p[f"{name}.experts.up_proj"]) * weights[..., None]
    out = jnp.einsum("btef,ehf->bth", inner, p[f"{name}.experts.down_proj"])
    return out + gated(f"{name}.shared_experts"), chosen.sum((0, 1))


def index_distance(scores: Array, mask: Array, attention: Array) -> Array:
    """Mean Kullback-Leibler divergence of the indexer's softmax from the attention [B, T, T], over the keys in mask."""
    target = jax.lax.stop_gradient(attention)
    given = jax.nn.log_softmax(jnp.where(mask, scores, _NEVER), axis=-1)
    wanted = jnp.log(jnp.maximum(target, 1e-9))
    return jnp.mean(jnp.sum(jnp.where(mask, target * (wanted - given), 0.0), axis=-1))
