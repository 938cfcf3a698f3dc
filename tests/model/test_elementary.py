"""Norms, rotary embedding and linear maps against their formulas in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.model.elementary import layer_norm, linear, rms_norm, rope_angles, rotate

seeds = st.integers(0, 2**32 - 1)
# Leading axes of x: few, because jax compiles each.
ROWS = [(), (1,), (5,), (3, 2)]
rows_shapes = st.sampled_from(ROWS)


def normal(seed: int, *sizes: int, dtype: type = np.float32) -> np.ndarray:
    return np.random.default_rng([seed, *sizes]).standard_normal(sizes).astype(dtype)


@settings(max_examples=30, deadline=None)
@given(rows_shapes, seeds)
def test_linear_keeps_the_checkpoints_out_in_order(rows: tuple[int, ...], seed: int) -> None:
    x, weight = normal(seed, *rows, 6), normal(seed, 4, 6)
    np.testing.assert_allclose(linear(x, weight), x.astype(np.float64) @ weight.T, rtol=1e-5, atol=1e-5)


def test_linear_sums_in_float32_and_returns_the_inputs_dtype() -> None:
    """4096 ones: a bfloat16 sum would stop at 256."""
    ones = jnp.ones((2, 4096), jnp.bfloat16)
    out = linear(ones, ones)
    assert out.dtype == jnp.bfloat16
    assert (np.asarray(out, np.float32) == 4096).all()


@settings(max_examples=30, deadline=None)
@given(rows_shapes, seeds, st.sampled_from([1e-5, 1e-6]), st.sampled_from([1e-3, 1.0, 1e3]))
def test_rms_norm(rows: tuple[int, ...], seed: int, eps: float, scale: float) -> None:
    x, weight = scale * normal(seed, *rows, 8), normal(seed, 8)
    wide = x.astype(np.float64)
    expected = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + eps) * weight
    np.testing.assert_allclose(rms_norm(x, weight, eps), expected, rtol=1e-5, atol=1e-6)


def test_rms_norm_rounds_before_the_weight() -> None:
    """transformers casts to the model's dtype and then multiplies; the other order differs in the last bit."""
    x, weight = normal(1, 50, 64).astype(jnp.bfloat16), normal(2, 64).astype(jnp.bfloat16)
    wide = x.astype(np.float32)
    normed = wide / np.sqrt((wide**2).mean(axis=-1, keepdims=True) + np.float32(1e-5))
    out = rms_norm(x, weight, 1e-5)
    assert out.dtype == jnp.bfloat16
    rounded_first = (normed.astype(jnp.bfloat16) * weight).astype(np.float32)
    rounded_last = (normed * weight.astype(np.float32)).astype(jnp.bfloat16).astype(np.float32)
    assert (np.asarray(out, np.float32) == rounded_first).mean() > 0.99
    assert (rounded_last != rounded_first).mean() > 0.05


def test_norms_of_zeros_are_finite() -> None:
    """Padded rows may be all zero."""
    zeros, ones = np.zeros((2, 8), np.float32), np.ones(8, np.float32)
    assert (np.asarray(rms_norm(zeros, ones, 1e-6)) == 0).all()
    assert (np.asarray(layer_norm(zeros, ones, 3 * ones, 1e-6)) == 3).all()


@settings(max_examples=30, deadline=None)
@given(rows_shapes, seeds, st.sampled_from([0.0, 10.0]))
def test_layer_norm(rows: tuple[int, ...], seed: int, offset: float) -> None:
    x, weight, bias = normal(seed, *rows, 8) + np.float32(offset), normal(seed, 8), normal(seed + 1, 8)
    wide = x.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True)
    expected = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 1e-6) * weight + bias
    found = layer_norm(x, weight, bias, 1e-6)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_layer_norm_is_float32_inside_and_the_inputs_dtype_outside() -> None:
    x, weight, bias = (part.astype(jnp.bfloat16) for part in (normal(1, 9, 8), normal(2, 8), normal(3, 8)))
    found = layer_norm(x, weight, bias, 1e-6)
    assert found.dtype == jnp.bfloat16
    exact = layer_norm(*(part.astype(np.float32) for part in (x, weight, bias)), 1e-6)
    np.testing.assert_allclose(np.asarray(found, np.float32), exact, rtol=2**-8, atol=2**-8)


@pytest.mark.parametrize("theta", [1e4, 8e6])
def test_angles_are_position_times_frequency(theta: float) -> None:
    """float32, as transformers computes them: the error grows with the position like its own."""
    positions, dim = np.array([0, 1, 77, 4095, 131_071, 1_048_575], np.int32), 16
    exact = positions[:, None] * theta ** (-np.arange(0, dim, 2) / dim)
    angles = rope_angles(positions, dim, theta)
    assert angles.dtype == jnp.float32
    np.testing.assert_allclose(angles, exact, rtol=1e-6)


def test_padding_has_the_angles_of_position_0() -> None:
    assert (np.asarray(rope_angles(np.array([-1, -7], np.int32), 8, 1e4)) == 0).all()


def turned(x: np.ndarray, angles: np.ndarray, pairs: list[tuple[int, int]]) -> np.ndarray:
    """x [T, *heads, R] with each pair of dimensions turned as a complex number, in float64."""
    out = x.astype(np.float64).copy()
    for row in range(len(x)):
        for at, (first, second) in enumerate(pairs):
            number = (x[row, ..., first] + 1j * x[row, ..., second].astype(np.float64)) * np.exp(
                1j * angles[row, at]
            )
            out[row, ..., first], out[row, ..., second] = number.real, number.imag
    return out


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([(), (1,), (3,), (2, 2)]), seeds, st.booleans())
def test_rotate_turns_neighbours_or_halves(heads: tuple[int, ...], seed: int, interleaved: bool) -> None:
    x, angles = normal(seed, 4, *heads, 8), 10 * normal(seed, 4, 4)
    pairs = [(2 * i, 2 * i + 1) for i in range(4)] if interleaved else [(i, i + 4) for i in range(4)]
    found = rotate(x, angles, interleaved)
    np.testing.assert_allclose(found, turned(x, angles.astype(np.float64), pairs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("interleaved", [True, False])
def test_scores_of_rotated_pairs_depend_on_the_distance_alone(interleaved: bool) -> None:
    q, k = normal(1, 1, 16), normal(2, 1, 16)

    def score(query_position: int, key_position: int) -> float:
        angles = rope_angles(np.array([query_position, key_position], np.int32), 16, 1e4)
        return float(rotate(q, angles[:1], interleaved)[0] @ rotate(k, angles[1:], interleaved)[0])

    assert score(9, 4) == pytest.approx(score(1009, 1004), abs=1e-3)
    assert score(9, 4) != pytest.approx(score(9, 5), abs=1e-2)


def test_rotate_keeps_bfloat16_but_turns_in_float32() -> None:
    x, angles = normal(3, 6, 8).astype(jnp.bfloat16), normal(4, 6, 4)
    found = rotate(x, angles, True)
    assert found.dtype == jnp.bfloat16
    exact = jax.device_get(rotate(x.astype(np.float32), angles, True))
    np.testing.assert_array_equal(
        np.asarray(found, np.float32), exact.astype(jnp.bfloat16).astype(np.float32)
    )
