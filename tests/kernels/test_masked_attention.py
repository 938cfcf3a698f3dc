"""Both forms of masked attention against a softmax in float64, and the row blocks that bound their workspace."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.kernels import seen_blocks
from glm_dcp_jax.kernels.masked_attention import absorbed_attention, expanded_attention, reference
from glm_dcp_jax.kernels.row_blocks import map_row_blocks

# rows, heads, context, latent width, rotary width, nope width, value width; few shapes, because jax compiles each.
SHAPES = [(1, 1, 1, 1, 1, 1, 1), (6, 2, 9, 8, 4, 5, 3), (12, 3, 40, 16, 2, 7, 6)]
SCALE = 0.3

absorbed = jax.jit(absorbed_attention, static_argnums=(3, 4))
expanded = jax.jit(expanded_attention)


class Problem:
    """Random heads over a random context; of several rows the first sees nothing and the last everything."""

    def __init__(self, shape: tuple[int, ...], seed: int, dtype: type = np.float32) -> None:
        rows, heads, length, latent, rope, nope, value = shape
        rng = np.random.default_rng(seed)

        def normal(*sizes: int) -> np.ndarray:
            return rng.standard_normal(sizes).astype(dtype)

        self.latent = latent
        self.nope, self.rope = normal(rows, heads, nope), normal(rows, heads, rope)
        self.context = normal(length, latent + rope)
        self.key_expansion, self.value_expansion = normal(heads, nope, latent), normal(heads, value, latent)
        self.mask = rng.random((rows, length)) < rng.random((rows, 1))
        if rows > 1:
            self.mask[0], self.mask[-1] = False, True

    @property
    def absorbed_q(self) -> np.ndarray:
        """[S, H, CR]: nope heads folded with the key expansion, the roped part behind."""
        folded = np.einsum("shn,hnc->shc", self.nope.astype(np.float64), self.key_expansion)
        return np.concatenate([folded, self.rope], axis=-1)

    def softmax(self) -> tuple[np.ndarray, np.ndarray]:
        """Output in latent space [S, H, C] and LSE [S, H], float64, row by row over the visible columns alone."""
        q, context = self.absorbed_q, self.context.astype(np.float64)
        out, lse = np.zeros((*q.shape[:2], self.latent)), np.full(q.shape[:2], -np.inf)
        for row, seen in enumerate(self.mask):
            if seen.any():
                scores = q[row] @ context[seen].T * SCALE
                top = scores.max(axis=1, keepdims=True)
                weights = np.exp(scores - top)
                total = weights.sum(axis=1, keepdims=True)
                out[row] = weights / total @ context[seen][:, : self.latent]
                lse[row] = (top + np.log(total))[:, 0]
        return out, lse

    def absorbed(self, attend=absorbed) -> tuple[jax.Array, jax.Array]:
        q = self.absorbed_q.astype(self.context.dtype)
        return attend(q, self.context, self.mask, self.latent, SCALE)

    def expanded(self, attend=expanded) -> jax.Array:
        expansions = (self.key_expansion, self.value_expansion)
        return attend(self.nope, self.rope, self.context, *expansions, self.mask, SCALE)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_absorbed_is_softmax_over_the_visible_columns(shape: tuple[int, ...], seed: int) -> None:
    problem = Problem(shape, seed)
    out, lse = problem.absorbed()
    assert out.dtype == lse.dtype == jnp.float32
    expected_out, expected_lse = problem.softmax()
    np.testing.assert_allclose(out, expected_out, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_expanded_gives_the_same_values(shape: tuple[int, ...], seed: int) -> None:
    problem = Problem(shape, seed)
    values = problem.expanded()
    assert values.dtype == jnp.float32
    expected = np.einsum("shc,hvc->shv", problem.softmax()[0], problem.value_expansion)
    np.testing.assert_allclose(values, expected, rtol=1e-3, atol=1e-3)


def test_bfloat16_forms_agree_within_their_rounding() -> None:
    problem = Problem(SHAPES[2], 4, jnp.bfloat16)
    expected = np.einsum("shc,hvc->shv", problem.softmax()[0], problem.value_expansion.astype(np.float64))
    out, _ = problem.absorbed()
    found = np.einsum("shc,hvc->shv", out, problem.value_expansion.astype(np.float32))
    spread = np.abs(expected).max()
    np.testing.assert_allclose(found, expected, atol=0.05 * spread)
    np.testing.assert_allclose(problem.expanded(), expected, atol=0.05 * spread)


def test_rows_that_see_nothing_give_zero_and_no_nan() -> None:
    problem = Problem(SHAPES[1], 5)
    problem.mask[:] = False
    out, lse = problem.absorbed()
    assert (np.asarray(out) == 0).all()
    assert (np.asarray(lse) == -np.inf).all()
    assert (np.asarray(problem.expanded()) == 0).all()


def test_a_column_that_a_row_does_not_see_does_not_move_it() -> None:
    """Whether a column holds a small or a large record, rows that do not see it stay the same, bit for bit."""
    problem = Problem(SHAPES[1], 6)
    problem.mask[:, 3] = False
    before = (*problem.absorbed(), problem.expanded())
    problem.context[3] = 1e6
    for found, expected in zip((*problem.absorbed(), problem.expanded()), before, strict=True):
        np.testing.assert_array_equal(found, expected)


def test_scores_far_beyond_the_exponential_stay_finite() -> None:
    problem = Problem(SHAPES[1], 7)
    problem.nope, problem.rope = problem.nope * 300, problem.rope * 300
    expected_out, expected_lse = problem.softmax()
    assert np.abs(expected_lse[1:]).max() > 100  # exp() of it overflows float32
    out, lse = problem.absorbed()
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-5)
    np.testing.assert_allclose(out, expected_out, rtol=1e-2, atol=1e-2)
    values = np.einsum("shc,hvc->shv", expected_out, problem.value_expansion)
    np.testing.assert_allclose(problem.expanded(), values, rtol=1e-2, atol=2e-2)


@pytest.mark.parametrize("rows_at_once", [1, 3, 4, 5])
def test_row_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch, rows_at_once: int) -> None:
    problem = Problem(SHAPES[2], 8)
    whole = (*problem.absorbed(absorbed_attention), problem.expanded(expanded_attention))
    taken = []

    def in_blocks(compute, bytes_per_row: int, *rows: jax.Array):
        taken.append(rows_at_once * bytes_per_row < len(rows[0]) * bytes_per_row)
        return map_row_blocks(compute, bytes_per_row, *rows, workspace=rows_at_once * bytes_per_row)

    for module in (reference, seen_blocks):
        monkeypatch.setattr(module, "map_row_blocks", in_blocks)
    cut = (*problem.absorbed(absorbed_attention), problem.expanded(expanded_attention))
    assert taken and all(taken)
    for found, expected in zip(cut, whole, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 24), st.integers(1, 30))
def test_blocks_are_the_largest_that_divide_the_rows_and_fit(count: int, fit: int) -> None:
    sizes = []

    def compute(numbers: jax.Array, letters: jax.Array) -> dict[str, jax.Array]:
        sizes.append(len(numbers))
        return {"sum": numbers + letters[:, 0], "rows": letters * 2}

    numbers, letters = (
        np.arange(count, dtype=np.int32),
        np.arange(2 * count, dtype=np.int32).reshape(count, 2),
    )
    found = map_row_blocks(compute, 100, numbers, letters, workspace=100 * fit + 99)
    np.testing.assert_array_equal(found["sum"], numbers + letters[:, 0])
    np.testing.assert_array_equal(found["rows"], letters * 2)
    assert set(sizes) == {max(size for size in range(1, count + 1) if count % size == 0 and size <= fit)}


def test_a_row_larger_than_the_workspace_still_runs() -> None:
    found = map_row_blocks(partial(jnp.multiply, 2), 10**12, np.arange(3), workspace=1)
    assert found.tolist() == [0, 2, 4]


def test_prefixes_of_the_columns_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem(SHAPES[2], 9)
    problem.mask &= np.tril(np.ones_like(problem.mask), 1)
    expected = problem.expanded(expanded_attention)
    monkeypatch.setattr(seen_blocks, "_ROWS", 2)
    monkeypatch.setattr(seen_blocks, "_SHORT", 1)
    branches = jax.make_jaxpr(lambda: problem.expanded(expanded_attention))()
    assert "cond" in str(branches)
    np.testing.assert_allclose(problem.expanded(expanded_attention), expected, rtol=1e-5, atol=1e-5)
