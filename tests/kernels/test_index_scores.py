"""Index scores against the formula in float64, on both sides of the switch from all heads at once to one by one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.kernels.index_scores import index_scores
from glm_dcp_jax.kernels.index_scores.reference import _ROWS_AT_ONCE

# rows, heads, width, keys; few shapes, because jax compiles each.
SHAPES = [
    (1, 1, 1, 1),
    (3, 4, 8, 5),
    (_ROWS_AT_ONCE, 3, 16, 7),
    (_ROWS_AT_ONCE + 1, 3, 16, 7),
    (40, 5, 4, 33),
]

scores_of = jax.jit(index_scores)


def formula(q: np.ndarray, head_weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[S, L] float64: sum over heads of weight * relu(q . k)."""
    q, head_weights, keys = (np.asarray(part, np.float64) for part in (q, head_weights, keys))
    total = np.zeros((q.shape[0], keys.shape[0]))
    for head in range(q.shape[1]):
        total += head_weights[:, head, None] * np.maximum(q[:, head] @ keys.T, 0.0)
    return total


def random_problem(
    shape: tuple[int, int, int, int], seed: int, dtype: type = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, heads, width, length = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, heads, width)).astype(dtype)
    keys = rng.standard_normal((length, width)).astype(dtype)
    return q, rng.standard_normal((rows, heads)).astype(np.float32), keys


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_scores_are_the_formula(shape: tuple[int, int, int, int], seed: int) -> None:
    q, head_weights, keys = random_problem(shape, seed)
    scores = scores_of(q, head_weights, keys)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, formula(q, head_weights, keys), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_queries_and_keys_are_summed_in_float32(shape: tuple[int, int, int, int]) -> None:
    q, head_weights, keys = random_problem(shape, 5, jnp.bfloat16)
    scores = scores_of(q, head_weights, keys)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, formula(q, head_weights, keys), rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_no_score_is_a_negative_zero(shape: tuple[int, int, int, int], seed: int) -> None:
    """Keys that no query points at score 0; a negative head weight would make it -0.0, which top-k ranks lower."""
    q, head_weights, keys = random_problem(shape, seed)
    q, keys = np.abs(q), np.where(np.arange(len(keys))[:, None] % 2, keys, -np.abs(keys))
    scores = np.asarray(scores_of(q, -np.abs(head_weights), keys))
    assert (scores[:, ::2] == 0).all()
    assert not np.signbit(scores[scores == 0]).any()


def test_a_row_scores_alike_whatever_rows_come_with_it() -> None:
    """A prompt's rows must choose the same positions in a chunk as one by one, up to rounding."""
    q, head_weights, keys = random_problem((2 * _ROWS_AT_ONCE, 4, 16, 50), 9)
    together = scores_of(q, head_weights, keys)
    for row in range(0, len(q), 7):
        alone = scores_of(q[row : row + 1], head_weights[row : row + 1], keys)
        np.testing.assert_allclose(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_many_rows_do_not_need_memory_for_every_head() -> None:
    rows, heads, width, length = 64, 16, 8, 512
    shapes = [(rows, heads, width), (rows, heads), (length, width)]
    compiled = scores_of.lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < heads * rows * length * 4 / 2
