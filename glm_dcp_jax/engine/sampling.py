"""Logits to tokens, on the device, one row at a time: independent of the batch around it."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, UInt32

from glm_dcp_jax.engine.logit_rules import Adjustments
from glm_dcp_jax.engine.sampling_params import MAX_LOGPROBS, SamplingParams
from glm_dcp_jax.kernels.topk.reference import sortable

_LEAST_SHARE = 1e-30
"""Stands for a top_p that float32 would make 0; the likeliest token always has more."""


class RowParams(NamedTuple):
    """Sampling parameters, [M] each (float32, top_k and step int32), seed [M, 2] uint32, of numpy or jax.

    seed and step decide the randomness: the request's seed, the token's index in the output. A step that only the
    device knows may replace the host's: `params._replace(step=...)`.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    step: Any


class Scores(NamedTuple):
    """How likely one token a row was: its log probability, [M] float32, and rank (1 is the likeliest), [M] int32.

    Beside it the likeliest tokens and their log probabilities, [M, 20], or fewer if the vocabulary is smaller.
    """

    logprob: Any
    rank: Any
    top_tokens: Any
    top_logprobs: Any


class Sampled(NamedTuple):
    """token: [M] int32. healthy: [M] bool, no NaN in the row, and some token that is not forbidden.

    Only when asked for, else None: the token's Scores. On the device or fetched.
    """

    token: Any
    healthy: Any
    logprob: Any = None
    rank: Any = None
    top_tokens: Any = None
    top_logprobs: Any = None


IDLE_ROW = (SamplingParams(temperature=0.0), 0, 0)
"""What a row without a request is sampled with: (params, seed, step)."""


def row_params(wanted: Sequence[tuple[SamplingParams, int, int]], rows: int) -> RowParams:
    """Arrays for `rows` rows from (params, seed, step) of the first ones; the rest is greedy padding."""
    filled = [*wanted, *[IDLE_ROW] * (rows - len(wanted))]
    column = lambda values, dtype: np.array(list(values), dtype)  # noqa: E731
    return RowParams(
        column((0.0 if params.greedy else params.temperature for params, _, _ in filled), np.float32),
        column((max(params.top_k, 0) for params, _, _ in filled), np.int32),
        column((params.top_p for params, _, _ in filled), np.float32),
        column((params.min_p for params, _, _ in filled), np.float32),
        column((divmod(seed % 2**64, 2**32) for _, seed, _ in filled), np.uint32),
        column((step for _, _, step in filled), np.int32),
    )


def sample(
    logits: Float[Array, "M V"],
    params: RowParams,
    random: bool,
    logprobs: bool,
    filtered: bool = True,
    adjustments: Adjustments | None = None,
) -> Sampled:
    """One token per row, in vLLM's order: adjustments, temperature, min_p, top_k, top_p.

    random: whether any row may not be greedy. filtered: whether any row uses top_k, top_p or min_p; rows that do not
    get the same token either way. logprobs: of the logits as they come, before adjustments (vLLM's default).
    """
    adjusted = logits if adjustments is None else adjust(logits, adjustments)
    token, healthy = _pick(adjusted, params, random, random and filtered)
    return Sampled(token, healthy, *(score(logits, token) if logprobs else ()))


@jax.jit
def adjust(logits: Float[Array, "M V"], adjustments: Adjustments) -> Float[Array, "M V"]:
    """Forbid and bias tokens, then apply the penalties: repetition, and the sum of frequency and presence."""
    tokens, repetition = adjustments.tokens, adjustments.repetition[:, None]
    rows = jnp.arange(logits.shape[0])[:, None]
    listed = logits.at[rows, tokens].get(mode="clip") + adjustments.bias
    repeated = jnp.where(listed > 0, listed / repetition, listed * repetition)
    listed = jnp.where(adjustments.seen, repeated, listed) - adjustments.penalty
    # NaN stays, whatever is forbidden: it says that the row must not be trusted.
    others = jnp.where(adjustments.only_listed[:, None] & ~jnp.isnan(logits), -jnp.inf, logits)
    return others.at[rows, tokens].set(listed, mode="drop", unique_indices=True)


@jax.jit
def forbid(logits: Float[Array, "M V"], masks: Int[Array, "M V32"]) -> Float[Array, "M V"]:
    """-inf for tokens whose bit is 0: bit b of element w is token 32 w + b. NaN stays."""
    bits = (masks[:, :, None] >> jnp.arange(32)) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] != 0
    return jnp.where(allowed | jnp.isnan(logits), logits, -jnp.inf)


@jax.jit
def score(logits: Float[Array, "M V"], tokens: Int[Array, " M"]) -> Scores:
    """How likely `tokens` were, one for each row, and which tokens were likeliest."""
    distribution = jax.nn.log_softmax(logits, axis=1)
    chosen = jnp.take_along_axis(distribution, tokens[:, None], axis=1)
    rank = 1 + jnp.sum(distribution > chosen, axis=1)
    top, top_tokens = jax.lax.top_k(distribution, min(MAX_LOGPROBS, logits.shape[1]))
    return Scores(chosen[:, 0], rank, top_tokens, top)


@functools.partial(jax.jit, static_argnames=("random", "filtered"))
def _pick(
    logits: Float[Array, "M V"], params: RowParams, random: bool, filtered: bool
) -> tuple[Int[Array, " M"], Bool[Array, " M"]]:
    """One token per row, and whether the row is healthy."""
    healthy = ~jnp.isnan(logits).any(axis=1) & (jnp.max(logits, axis=1) > -jnp.inf)
    greedy = jnp.argmax(logits, axis=1)
    if not random:
        return greedy, healthy
    drawn = _draw(logits, params, filtered)
    return jnp.where(params.temperature > 0, drawn, greedy), healthy


def _draw(logits: Float[Array, "M V"], params: RowParams, filtered: bool) -> Int[Array, " M"]:
    """Gumbel-max: the token whose logit over temperature, plus noise that is the token's own, is largest."""
    scaled = logits / jnp.maximum(params.temperature, 1e-5)[:, None]
    if filtered:
        scaled = jnp.where(_kept(scaled, params), scaled, -jnp.inf)
    return jnp.argmax(scaled + _noise(params.seed, params.step, logits.shape[1]), axis=1)


def _noise(seeds: UInt32[Array, "M 2"], steps: Int[Array, " M"], vocab_size: int) -> Float[Array, "M V"]:
    def of_row(seed: Array, step: Array) -> Array:
        key = jax.random.wrap_key_data(seed, impl="threefry2x32")
        return jax.random.gumbel(jax.random.fold_in(key, step), (vocab_size,))

    return jax.vmap(of_row)(seeds, steps)


def _kept(scaled: Float[Array, "M V"], params: RowParams) -> Bool[Array, "M V"]:
    """The tokens that min_p, top_k and top_p leave, each looking at what those before it left (as in vLLM)."""
    weights = jnp.exp(scaled - jnp.max(scaled, axis=1, keepdims=True))
    weights = jnp.where(weights >= params.min_p[:, None], weights, 0)
    keys = sortable(jnp.where(scaled == 0, 0.0, scaled))  # -0.0 counts as +0.0
    ones = jnp.ones_like(weights)
    among_first = _leading(keys, ones, params.top_k.astype(jnp.float32)) | (params.top_k == 0)[:, None]
    weights = jnp.where(among_first, weights, 0)
    share = jnp.maximum(params.top_p, _LEAST_SHARE) * jnp.sum(weights, axis=1)
    within_share = _leading(keys, weights, share) | (params.top_p >= 1)[:, None]
    return (weights > 0) & within_share


def _leading(
    keys: UInt32[Array, "M V"], weights: Float[Array, "M V"], wanted: Float[Array, " M"]
) -> Bool[Array, "M V"]:
    """The tokens of largest key, of equals the lowest first, up to the one with which their weights reach `wanted`.

    Found by searches over the bits of a key and of a token, since sorting a vocabulary takes far longer.
    """
    least = _least_key(keys, weights, wanted, 32)
    above, equal = keys > least[:, None], keys == least[:, None]
    missing = wanted - jnp.sum(jnp.where(above, weights, 0), axis=1)
    vocab_size = keys.shape[1]
    lowest_first = jnp.where(equal, jnp.arange(vocab_size, 0, -1, dtype=jnp.uint32), 0)
    last = _least_key(lowest_first, weights, missing, vocab_size.bit_length())
    return above | (equal & (lowest_first >= last[:, None]))


def _least_key(
    keys: UInt32[Array, "M V"], weights: Float[Array, "M V"], wanted: Float[Array, " M"], bits: int
) -> UInt32[Array, " M"]:
    """The largest number of so many bits that the keys whose weights sum to `wanted` do not fall below."""

    def try_bit(step: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1) << (bits - 1 - step).astype(jnp.uint32))
        weight = jnp.sum(jnp.where(keys >= candidate[:, None], weights, 0), axis=1)
        return jnp.where(weight >= wanted, candidate, found)

    return jax.lax.fori_loop(0, bits, try_bit, jnp.zeros(keys.shape[0], jnp.uint32))
