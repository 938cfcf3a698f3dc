"""Norms, rotary embedding and linear maps: the network's small pieces, as pure functions."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def linear(x: Float[Array, "*rows I"], weight: Float[Array, "O I"]) -> Float[Array, "*rows O"]:
    """x @ weight.T, accumulated in float32, in x's dtype. Weights keep the checkpoint's [out, in]."""
    out = jnp.einsum("...i,oi->...o", x, weight, preferred_element_type=jnp.float32)
    return out.astype(x.dtype)


def rms_norm(x: Float[Array, "*rows D"], weight: Float[Array, " D"], eps: float) -> Float[Array, "*rows D"]:
    """x / rms(x) in float32, cast to x's dtype, then times the weight (transformers' order)."""
    wide = x.astype(jnp.float32)
    normed = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return normed.astype(x.dtype) * weight


def layer_norm(
    x: Float[Array, "*rows D"], weight: Float[Array, " D"], bias: Float[Array, " D"], eps: float
) -> Float[Array, "*rows D"]:
    """A LayerNorm with mean and bias, in float32, in x's dtype."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    normed = centred * jax.lax.rsqrt(jnp.mean(centred * centred, axis=-1, keepdims=True) + eps)
    return (normed * weight.astype(jnp.float32) + bias.astype(jnp.float32)).astype(x.dtype)


def rope_angles(positions: Int[Array, " T"], rope_dim: int, theta: float) -> Float[Array, "T R/2"]:
    """position * theta**(-2i / rope_dim), float32; negative positions count as 0."""
    frequencies = theta ** (-jnp.arange(0, rope_dim, 2, dtype=jnp.float32) / rope_dim)
    return jnp.maximum(positions, 0).astype(jnp.float32)[:, None] * frequencies


def rotate(
    x: Float[Array, "T *heads R"], angles: Float[Array, "T R/2"], interleaved: bool
) -> Float[Array, "T *heads R"]:
    """Rotate pairs by their angle in float32: neighbours (2i, 2i+1) if interleaved, else halves (i, i + R/2)."""
    wide = x.astype(jnp.float32)
    angles = angles.reshape(angles.shape[0], *(1,) * (x.ndim - 2), angles.shape[1])
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    if interleaved:
        pairs = wide.reshape(*x.shape[:-1], x.shape[-1] // 2, 2)
        a, b = pairs[..., 0], pairs[..., 1]
        rotated = jnp.stack([a * cos - b * sin, b * cos + a * sin], axis=-1).reshape(x.shape)
    else:
        a, b = jnp.split(wide, 2, axis=-1)
        rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return rotated.astype(x.dtype)
