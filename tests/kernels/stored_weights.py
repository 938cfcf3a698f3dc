"""Weights of every kind with random codes, and their values by a decoder of its own, in numpy and float64."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np

from glm_dcp_jax.kernels.weights import Fp8Weight, Nvfp4Weight, PlainWeight, Weight

KINDS = ("plain", "fp8", "nvfp4")
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def random_weight(
    kind: str, rng: np.random.Generator, *shape: int, block: tuple[int, int] = (1, 1), dtype: str = "float32"
) -> Weight:
    """All codes occur. block: rows and columns that share a scale of FP8. dtype: of a plain weight."""
    *stack, outputs, inputs = shape
    if kind == "plain":
        return PlainWeight(jnp.asarray(rng.standard_normal(shape), dtype))
    if kind == "fp8":
        codes = rng.integers(0, 254, shape, np.uint8)
        codes += codes >= 127  # 127 and 255 are NaN
        scales = rng.random((*stack, outputs // block[0], inputs // block[1])).astype(np.float32) / 64
        return Fp8Weight(jnp.asarray(codes.view(ml_dtypes.float8_e4m3fn)), jnp.asarray(scales))
    codes = rng.integers(0, 256, (*stack, outputs, inputs // 2), np.uint8)
    scales = rng.integers(0, 100, (*stack, outputs, inputs // 16), np.uint8).view(ml_dtypes.float8_e4m3fn)
    outer = rng.random(stack).astype(np.float32) / 8
    return Nvfp4Weight(jnp.asarray(codes), jnp.asarray(scales), jnp.asarray(outer))


def values_of(weight: Weight) -> np.ndarray:
    """[*S, O, I] float64."""
    parts = [np.asarray(part) for part in weight]
    if isinstance(weight, PlainWeight):
        return parts[0].astype(np.float64)
    if isinstance(weight, Fp8Weight):
        codes, scales = (part.astype(np.float64) for part in parts)
        rows, columns = (codes.shape[axis] // scales.shape[axis] for axis in (-2, -1))
        return codes * scales.repeat(rows, axis=-2).repeat(columns, axis=-1)
    packed, scales, outer = parts
    nibbles = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:-1], -1)
    values = E2M1[nibbles] * scales.astype(np.float64).repeat(16, axis=-1)
    return values * outer.astype(np.float64)[..., None, None]


def spoilt(weight: Weight, *index) -> Weight:
    """With NaN in these matrices."""

    def nan(part: jnp.ndarray) -> jnp.ndarray:
        if part.dtype == jnp.uint8:  # E2M1 has no NaN: its scales do
            return part
        return part.at[index].set(jnp.asarray(jnp.nan, part.dtype))

    return type(weight)(*(nan(part) for part in weight))


def silu(x: np.ndarray) -> np.ndarray:
    return x / (1.0 + np.exp(-x))


def expert_by_expert(x, expert_ids, weights, gate_up, down) -> np.ndarray:
    """[T, H] float64: every assignment's expert applied to its row, one at a time."""
    x, weights, gate_up, down = (np.asarray(part, np.float64) for part in (x, weights, gate_up, down))
    total = np.zeros_like(x)
    for row, chosen in enumerate(expert_ids):
        for place, expert in enumerate(chosen):
            gate, up = gate_up[expert, 0] @ x[row], gate_up[expert, 1] @ x[row]
            total[row] += weights[row, place] * (down[expert] @ (silu(gate) * up))
    return total
