"""Quantising inside Pallas-Triton kernels: tiles of values become the 32-bit words, or the bytes, of a pool.

The number formats are `cache.codecs`, whose elementwise functions lower as they are. A *unit* is what a kernel stores:
a word where every field is whole words, else a byte. Words make offsets four times smaller and stores wider.
"""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int, UInt8

from glm_dcp_jax.cache import codecs

WORD = 4
"""Bytes of a word."""
_OFFSETS_END = 2**31


def unit_bytes(*byte_counts: int) -> int:
    """Bytes of a unit, 4 or 1, for fields with these offsets and lengths."""
    return 1 if any(count % WORD for count in byte_counts) else WORD


def as_units(raw: UInt8[Array, "*rows n"], unit: int) -> Array:
    """Bytes as uint32 words [*rows, n/4], which costs a GPU nothing, or as they are when a unit is a byte.

    Raises ValueError for 2 GiB or more that stay bytes: Pallas's offsets are int32 in arrays of up to 4 GiB. They count
    elements, so wider elements are safe (2 bytes: fewer than 2**31 elements), and above 4 GiB offsets are int64.
    """
    if unit == WORD:
        words = raw.reshape(*raw.shape[:-1], raw.shape[-1] // WORD, WORD)
        return jax.lax.bitcast_convert_type(words, jnp.uint32)
    if raw.size >= _OFFSETS_END:
        raise ValueError(
            f"a pool of {raw.size} bytes whose fields are not whole 32-bit words is too large for 32-bit offsets; "
            "keep it below 2 GiB, or choose widths that make each field a multiple of 4 bytes"
        )
    return raw


def as_bytes(units: Array) -> UInt8[Array, "*rows n"]:
    """The inverse of `as_units`."""
    return codecs.to_bytes(units) if units.dtype == jnp.uint32 else units


def positions(*shape: int) -> Int[Array, "1 *shape"]:
    """0, 1, 2, ... in row-major order, behind an axis for a tile's rows. Sizes must be powers of two.

    Summed up from the axes: Triton does not see that a reshaped range is contiguous, and would load element by element.
    """
    total, stride = jnp.zeros((1, *shape), jnp.int32), 1
    for axis in range(len(shape), 0, -1):
        total += stride * jax.lax.broadcasted_iota(jnp.int32, (1, *shape), axis)
        stride *= shape[axis - 1]
    return total


def per_row(values: Array, like: Array) -> Array:
    """[rows] as [rows, 1, ...], with as many axes as `like`."""
    return values.reshape(*values.shape, *[1] * (like.ndim - 1))


def divide(a: Float[Array, "..."], b: Float[Array, "..."] | float, interpret: bool) -> Float[Array, "..."]:
    """a / b in float32, correctly rounded; b broadcasts to a.

    Compilers' own divisions are not: Triton's is off by up to 2 ulp, and XLA multiplies by the reciprocal of a divisor
    that is constant or broadcast. The quotients here often lie exactly between two codes, where one ulp decides.
    """
    divisor = jnp.broadcast_to(jnp.asarray(b, jnp.float32), a.shape)
    if interpret:
        return a / jax.lax.optimization_barrier(divisor)
    (quotient,) = plt.elementwise_inline_asm(
        "div.rn.f32 $0, $1, $2;",
        args=[a, divisor],
        constraints="=f,f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(a.shape, jnp.float32)],
    )
    return quotient


def amax(values: Float[Array, "*rows a b"]) -> Float[Array, "*rows"]:
    """The largest magnitude over the last two axes."""
    return jnp.max(jnp.max(jnp.abs(values), axis=-1), axis=-1)


def join(codes: Int[Array, "*rows n"], bits: int) -> Int[Array, "*rows"]:
    """The codes of the last axis, `bits` wide each, in one int32: the first in the lowest bits."""
    codes = codes.astype(jnp.int32)
    return jnp.sum(codes << (bits * _along_last_axis(codes.shape)), axis=-1)


def split(values: Int[Array, "*rows"], nbytes: int, unit: int) -> Int[Array, "*rows units"]:
    """The `nbytes` low bytes of each integer as units, lowest first; a unit's bits above its own are to be cut off."""
    shape = (*values.shape, nbytes // unit)
    return jnp.broadcast_to(values[..., None], shape) >> (8 * unit * _along_last_axis(shape))


def split_float32(values: Float[Array, "*rows"], unit: int) -> Int[Array, "*rows units"]:
    """float32 numbers as units."""
    return split(jax.lax.bitcast_convert_type(values, jnp.int32), WORD, unit)


def join_bfloat16(values: Float[Array, "*rows n"], unit: int) -> Int[Array, "*rows units"]:
    """Values, n = max(unit / 2, 1) of them, as bfloat16 units."""
    bits = jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return split(join(bits, 16), max(unit, 2), unit)


def e4m3_rows(
    values: Float[Array, "rows a unit"], scale: Float[Array, " rows"], interpret: bool
) -> Int[Array, "rows a"]:
    """Units of E4M3 codes of values times the reciprocal of their row's scale."""
    reciprocal = divide(jnp.ones_like(scale), scale, interpret)
    return join(codecs.encode_e4m3(values * per_row(reciprocal, values)), 8)


def fp8_groups(values: Float[Array, "rows groups a unit"], interpret: bool) -> tuple[Array, Array]:
    """(int32 [rows, groups, a] units of codes, float32 [rows, groups] scales) as `codecs.encode_fp8_groups`."""
    scales = jnp.maximum(divide(amax(values), codecs.E4M3_MAX, interpret), codecs.SMALLEST_NORMAL)
    return join(codecs.encode_e4m3(divide(values, scales[..., None, None], interpret)), 8), scales


def nvfp4_groups(values: Float[Array, "rows groups unit a 2*unit"], interpret: bool) -> tuple[Array, Array]:
    """(int32 [rows, groups, unit, a] units of codes, int32 [rows, groups] units of scales).

    Groups come `unit` at a time, as many as scales in a unit; the codes are `codecs.encode_nvfp4_groups`.
    """
    scales = codecs.encode_e4m3(divide(amax(values), codecs.E2M1_MAX, interpret))
    decoded = codecs.decode_e4m3(scales)
    positive = decoded > 0
    reciprocal = divide(jnp.ones_like(decoded), jnp.where(positive, decoded, 1.0), interpret)
    codes = codecs.encode_e2m1(values * reciprocal[..., None, None]).astype(jnp.int32)
    return join(jnp.where(positive[..., None, None], codes, 0), 4), join(scales, 8)


def _along_last_axis(shape: tuple[int, ...]) -> Int[Array, "..."]:
    return jax.lax.broadcasted_iota(jnp.int32, shape, len(shape) - 1)
