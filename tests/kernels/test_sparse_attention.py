"""Attention over gathered records against a softmax in float64, and what must not reach its output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.kernels.sparse_attention import attend_gathered

# rows, heads, records, latent width, rotary width; few shapes, because jax compiles each.
SHAPES = [(1, 1, 1, 1, 1), (4, 2, 6, 8, 4), (3, 5, 40, 16, 2)]
SCALE = 0.3

attend = jax.jit(attend_gathered, static_argnums=(3, 4))

Problem = tuple[np.ndarray, np.ndarray, np.ndarray, int]


def softmax_attention(
    q: np.ndarray, records: np.ndarray, valid: np.ndarray, latent_width: int, scale: float
) -> tuple[np.ndarray, np.ndarray]:
    """Output [T, H, C] and LSE [T, H] in float64, row by row over the valid records alone."""
    rows, heads, _ = q.shape
    out, lse = np.zeros((rows, heads, latent_width)), np.full((rows, heads), -np.inf)
    for row in range(rows):
        seen = np.asarray(records[row][valid[row]], np.float64)
        if not len(seen):
            continue
        scores = np.asarray(q[row], np.float64) @ seen.T * scale
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        out[row] = weights / total @ seen[:, :latent_width]
        lse[row] = (top + np.log(total))[:, 0]
    return out, lse


def random_problem(shape: tuple[int, ...], seed: int, dtype: type = np.float32) -> Problem:
    """Rows with random valid records; where there are several rows, the first sees nothing and the last everything."""
    rows, heads, count, latent, rope = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, heads, latent + rope)).astype(dtype)
    records = rng.standard_normal((rows, count, latent + rope)).astype(dtype)
    valid = rng.random((rows, count)) < rng.random((rows, 1))
    if rows > 1:
        valid[0], valid[-1] = False, True
    return q, records, valid, latent


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_it_is_softmax_over_the_valid_records(shape: tuple[int, ...], seed: int) -> None:
    q, records, valid, latent = random_problem(shape, seed)
    out, lse = attend(q, records, valid, latent, SCALE)
    assert out.dtype == lse.dtype == jnp.float32
    expected_out, expected_lse = softmax_attention(q, records, valid, latent, SCALE)
    np.testing.assert_allclose(out, expected_out, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_records(shape: tuple[int, ...]) -> None:
    """Scores, LSE and sums in float32; only the probabilities are rounded, to 8 bits."""
    q, records, valid, latent = random_problem(shape, 3, jnp.bfloat16)
    out, lse = attend(q, records, valid, latent, SCALE)
    assert out.dtype == lse.dtype == jnp.float32
    expected_out, expected_lse = softmax_attention(q, records, valid, latent, SCALE)
    np.testing.assert_allclose(out, expected_out, atol=2**-7)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("garbage", [np.nan, np.inf, -np.inf, 3e38])
def test_what_invalid_records_hold_does_not_matter(garbage: float) -> None:
    """They are stale or foreign slots: 0 * NaN must not happen, in output or LSE."""
    q, records, valid, latent = random_problem((4, 2, 6, 8, 4), 11)
    clean = attend(q, records, valid, latent, SCALE)
    spoilt = np.where(valid[:, :, None], records, np.float32(garbage))
    for expected, found in zip(clean, attend(q, spoilt, valid, latent, SCALE), strict=True):
        np.testing.assert_array_equal(found, expected)


def test_a_row_without_valid_records_is_the_neutral_element_of_a_merge() -> None:
    q, records, _, latent = random_problem((4, 2, 6, 8, 4), 12)
    out, lse = attend(q, records, np.zeros((4, 6), bool), latent, SCALE)
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()


def test_a_record_that_is_listed_twice_counts_twice() -> None:
    q, records, _, latent = random_problem((4, 2, 6, 8, 4), 13)
    once = attend(q, records, np.ones((4, 6), bool), latent, SCALE)
    twice = attend(q, np.concatenate([records, records], axis=1), np.ones((4, 12), bool), latent, SCALE)
    np.testing.assert_allclose(twice[0], once[0], rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(twice[1], once[1] + np.log(2.0), rtol=1e-6)


def test_records_may_come_in_any_order() -> None:
    q, records, valid, latent = random_problem((4, 2, 6, 8, 4), 14)
    order = np.random.default_rng(0).permutation(6)
    found = attend(q, records[:, order], valid[:, order], latent, SCALE)
    for expected, shuffled in zip(attend(q, records, valid, latent, SCALE), found, strict=True):
        np.testing.assert_allclose(shuffled, expected, rtol=1e-5, atol=1e-6)


def test_scores_far_beyond_the_exponential_stay_finite() -> None:
    q, records, valid, latent = random_problem((4, 2, 6, 8, 4), 15)
    out, lse = attend(q * 1000, records, valid, latent, SCALE)
    expected_out, expected_lse = softmax_attention(q * 1000, records, valid, latent, SCALE)
    assert np.abs(expected_lse[1:]).max() > 100  # exp() of it overflows float32
    np.testing.assert_allclose(out, expected_out, rtol=1e-3, atol=1e-3)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
