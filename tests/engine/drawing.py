"""Drawing many tokens at once, and what numpy says their distribution must be."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from scipy import stats

from glm_dcp_jax.engine.sampling import Sampled, row_params, sample
from glm_dcp_jax.engine.sampling_params import SamplingParams

ROWS = 512
DRAWS = 20_000
SIGNIFICANCE = 1e-6  # draws are the same on every run; this only bounds how unlucky their fixed seeds may be


def draw(
    logits: np.ndarray,
    params: SamplingParams | Sequence[SamplingParams],
    seeds: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    random: bool = True,
    logprobs: bool = False,
    filtered: bool = True,
    rows: int = ROWS,
) -> Sampled:
    """Sample logits [M, V], row i with seed i and step 0 unless given. Padded to `rows`: few programs serve all."""
    count = len(logits)
    each = [params] * count if isinstance(params, SamplingParams) else params
    wanted = list(zip(each, seeds or range(count), steps or [0] * count, strict=True))
    rows = max(rows, count)
    padded = np.zeros((rows, logits.shape[1]), np.float32)
    padded[:count] = logits
    sampled = sample(jnp.asarray(padded), row_params(wanted, rows), random, logprobs, filtered)
    return Sampled(*(None if part is None else np.asarray(part)[:count] for part in sampled))


def softmax(logits: Sequence[float], temperature: float = 1.0) -> np.ndarray:
    scaled = np.asarray(logits, np.float64) / temperature
    exponentials = np.exp(scaled - scaled.max())
    return exponentials / exponentials.sum()


# Descending and shuffled, so that sorting matters: 0.4, 0.2, 0.15, 0.1, 0.1, 0.05.
PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.2, 0.1, 0.15])


def kept(
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    probabilities: np.ndarray = PROBABILITIES,
) -> np.ndarray:
    """vLLM's rules, step by step; each sees what the one before it left, made to sum to 1 again."""
    left = softmax(np.log(probabilities), temperature)
    left = np.where(left >= min_p * left.max(), left, 0)
    order = np.argsort(-left, kind="stable")
    if top_k > 0:
        left[order[top_k:]] = 0
    left /= left.sum()
    before = np.cumsum(left[order]) - left[order]
    left[order[before >= top_p]] = 0
    return left / left.sum()


def assert_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """A chi-square test; tokens of probability 0 must not occur at all."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert len(counts) == len(possible) and not counts[~possible].any(), "tokens that the filter excludes"
    if possible.sum() == 1:
        return
    expected = probabilities[possible] * len(tokens)
    assert expected.min() > 5, "too few draws for the test"
    assert stats.chisquare(counts[possible], expected).pvalue > SIGNIFICANCE
