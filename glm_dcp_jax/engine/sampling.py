"""Logits to tokens, on the device, one row at a time: independent of the batch around it."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm_dcp_jax.engine.sampling_params import MAX_LOGPROBS, SamplingParams


class RowParams(NamedTuple):
    """Sampling parameters, [M] each (float32, top_k and step int32, seed uint32), of numpy or jax.

    seed and step decide the randomness: the request's seed, the token's index.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    step: Any


class Sampled(NamedTuple):
    """token: [M] int32. healthy: [M], no NaN in the row. Only when asked for, else None: logprob and rank of the

    token, [M], and the likeliest tokens with their log probabilities, [M, 20]. On the device or fetched.
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
        column((seed % 2**32 for _, seed, _ in filled), np.uint32),
        column((step for _, _, step in filled), np.int32),
    )


@functools.partial(jax.jit, static_argnames=("random", "logprobs"))
def sample(logits: Float[Array, "M V"], params: RowParams, random: bool, logprobs: bool) -> Sampled:
    """One token per row. random False: all rows are greedy. logprobs: of the logits as they come (vLLM's default)."""
    healthy = ~jnp.isnan(logits).any(axis=1)
    greedy = jnp.argmax(logits, axis=1)
    token = greedy
    if random:
        drawn = jax.vmap(_draw)(logits, params)
        token = jnp.where(params.temperature > 0, drawn, greedy)
    if not logprobs:
        return Sampled(token, healthy)
    distribution = jax.nn.log_softmax(logits, axis=1)
    chosen = jnp.take_along_axis(distribution, token[:, None], axis=1)
    rank = 1 + jnp.sum(distribution > chosen, axis=1)
    top, top_tokens = jax.lax.top_k(distribution, min(MAX_LOGPROBS, logits.shape[1]))
    return Sampled(token, healthy, chosen[:, 0], rank, top_tokens, top)


def _draw(logits: Float[Array, " V"], params: RowParams) -> Int[Array, ""]:
    """Sample one row: temperature, then min_p, top_k and top_p on the sorted distribution, then Gumbel-max."""
    scaled = logits / jnp.maximum(params.temperature, 1e-5)
    ordered, tokens = jax.lax.top_k(scaled, scaled.shape[0])
    probabilities = jax.nn.softmax(ordered)
    keep = probabilities >= params.min_p * probabilities[0]
    keep &= (params.top_k == 0) | (jnp.arange(ordered.shape[0]) < params.top_k)
    # top_p is a share of what the other two have left, as in vLLM.
    probabilities = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf))
    before = jnp.cumsum(probabilities) - probabilities
    keep &= (params.top_p >= 1) | (before < params.top_p)
    keep = keep.at[0].set(True)
    key = jax.random.fold_in(jax.random.key(params.seed), params.step)
    # Noise belongs to tokens, not to ranks, so that the draw does not depend on how close scores are ordered.
    noise = jax.random.gumbel(key, ordered.shape)[tokens]
    return tokens[jnp.argmax(jnp.where(keep, ordered + noise, -jnp.inf))]
