"""Number formats of quantised records: E4M3 and E2M1 codes, their scales, and bytes. Semantics, in plain jnp.

All rounding is to nearest, ties to the even code. Everything is computed in float32.
"""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, UInt8

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_HALVES = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the magnitude of each E2M1 code; bit 3 of a code is the sign."""
SMALLEST_NORMAL = float(jnp.finfo(jnp.float32).tiny)
LEAST_INDEX_AMAX = 1e-4
"""An index key of zeros still gets a scale."""


def divide(a: Float[Array, "..."], b: Array | float) -> Float[Array, "..."]:
    """a / b in float32, correctly rounded; b broadcasts to a.

    XLA would multiply by the reciprocal of a divisor that it can see to be constant or broadcast. These quotients often
    lie exactly between two codes, where one ulp decides.
    """
    return a / jax.lax.optimization_barrier(jnp.broadcast_to(jnp.asarray(b, jnp.float32), a.shape))


def to_bytes(values: Array) -> UInt8[Array, "*rows n"]:
    """The little-endian bytes of the last axis."""
    raw = jax.lax.bitcast_convert_type(values, jnp.uint8)
    return _flat_behind(raw, values.ndim - 1) if raw.ndim > values.ndim else raw


def from_bytes(raw: UInt8[Array, "*rows n"], dtype: jnp.dtype) -> Array:
    """The inverse of `to_bytes`."""
    size = jnp.dtype(dtype).itemsize
    if size > 1:
        raw = raw.reshape(*raw.shape[:-1], raw.shape[-1] // size, size)
    return jax.lax.bitcast_convert_type(raw, dtype)


def encode_e4m3(values: Float[Array, "*rows n"]) -> UInt8[Array, "*rows n"]:
    """E4M3 codes. Values beyond 448 saturate: the cast alone would make them NaN."""
    clipped = jnp.clip(values.astype(jnp.float32), -E4M3_MAX, E4M3_MAX)
    return jax.lax.bitcast_convert_type(clipped.astype(jnp.float8_e4m3fn), jnp.uint8)


def decode_e4m3(codes: UInt8[Array, "*rows n"]) -> Float[Array, "*rows n"]:
    """The float32 values of E4M3 codes."""
    return jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn).astype(jnp.float32)


def encode_e2m1(values: Float[Array, "*rows n"]) -> UInt8[Array, "*rows n"]:
    """E2M1 codes 0..15, one to a byte; values beyond 6 saturate. Midpoints go to the even code."""
    size = jnp.abs(values)
    above = [size > 0.25, size >= 0.75, size > 1.25, size >= 1.75, size > 2.5, size >= 3.5, size > 5.0]
    code = sum(step.astype(jnp.uint8) for step in above)
    return code | (jnp.signbit(values).astype(jnp.uint8) << 3)


def decode_e2m1(codes: UInt8[Array, "*rows n"]) -> Float[Array, "*rows n"]:
    """The float32 values of E2M1 codes 0..15."""
    size = jnp.array(E2M1_HALVES, jnp.float32)[codes & 7] / 2
    return jnp.where(codes & 8, -size, size)


def pack_nibbles(codes: UInt8[Array, "*rows n"]) -> UInt8[Array, "*rows n/2"]:
    """Two codes to a byte, the even element in the low nibble; n must be even."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: UInt8[Array, "*rows n"]) -> UInt8[Array, "*rows 2*n"]:
    """The inverse of `pack_nibbles`."""
    return _flat_behind(jnp.stack([packed & 15, packed >> 4], axis=-1), packed.ndim - 1)


def encode_fp8_groups(values: Float[Array, "*rows n"], group: int) -> tuple[UInt8[Array, "*rows n"], Array]:
    """E4M3 codes and one float32 scale per `group` values: max(amax / 448, the smallest normal float32)."""
    grouped = _groups(values, group)
    scales = jnp.maximum(divide(jnp.max(jnp.abs(grouped), axis=-1), E4M3_MAX), SMALLEST_NORMAL)
    return _ungroup(encode_e4m3(divide(grouped, scales[..., None])), values), scales


def encode_nvfp4_groups(values: Float[Array, "*rows n"], group: int) -> tuple[UInt8[Array, "*rows n"], Array]:
    """E2M1 codes and one E4M3 scale byte per `group` values.

    The scale is amax / 6 rounded to E4M3; values are multiplied by the reciprocal of the *decoded* scale. Where that is
    zero, so are all codes.
    """
    grouped = _groups(values, group)
    scales = encode_e4m3(divide(jnp.max(jnp.abs(grouped), axis=-1), E2M1_MAX))
    decoded = decode_e4m3(scales)[..., None]
    codes = encode_e2m1(grouped * (1.0 / jnp.where(decoded > 0, decoded, 1.0)))
    return _ungroup(jnp.where(decoded > 0, codes, 0), values), scales


def scale_groups(
    values: Float[Array, "*rows n"], scales: Float[Array, "*rows groups"], group: int
) -> Float[Array, "*rows n"]:
    """Each value times the scale of its group."""
    return _ungroup(_groups(values, group) * scales[..., None], values)


def encode_index_key(
    keys: Float[Array, "*rows D"],
) -> tuple[UInt8[Array, "*rows D"], Float[Array, "*rows 1"]]:
    """E4M3 codes of an index key and its float32 scale: max(amax, 1e-4) / 448, rounded up to a power of two."""
    keys = keys.astype(jnp.float32)
    amax = jnp.max(jnp.abs(keys), axis=-1, keepdims=True)
    scale = power_of_two_at_least(divide(jnp.maximum(amax, LEAST_INDEX_AMAX), E4M3_MAX))
    return encode_e4m3(keys / scale), scale


def power_of_two_at_least(x: Float[Array, "*rows"]) -> Float[Array, "*rows"]:
    """The smallest power of two that is not below x; x must be positive and normal."""
    bits = jax.lax.bitcast_convert_type(x, jnp.int32)
    return jax.lax.bitcast_convert_type(((bits + 0x7FFFFF) >> 23) << 23, jnp.float32)


def _groups(values: Float[Array, "*rows n"], group: int) -> Float[Array, "*rows groups group"]:
    values = values.astype(jnp.float32)
    short = -values.shape[-1] % group
    padded = jnp.pad(values, [(0, 0)] * (values.ndim - 1) + [(0, short)])
    return padded.reshape(*values.shape[:-1], padded.shape[-1] // group, group)


def _ungroup(grouped: Array, like: Array) -> Array:
    return _flat_behind(grouped, like.ndim - 1)[..., : like.shape[-1]]


def _flat_behind(array: Array, axes: int) -> Array:
    """All axes behind the first few as one, whose size -1 could not name where there are no rows."""
    return array.reshape(*array.shape[:axes], math.prod(array.shape[axes:]))
