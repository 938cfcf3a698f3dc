"""Decoding inside Pallas-Triton kernels: stored records become tiles of latents and of roped keys.

Quantised records are read in *units*, 32-bit words or bytes (`encode_tiles.as_units`). A unit holds several codes: part
j of a tile is the jth code of every unit, and parts are woven together once they are values. That moves nothing between
threads, and Triton keeps the one result for both products of attention.
"""

from functools import reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, DTypeLike, Float, Int, Shaped

from glm_dcp_jax.cache import codecs
from glm_dcp_jax.cache.records import FP8_GROUP, NVFP4_GROUP, RecordFormat
from glm_dcp_jax.kernels import encode_tiles, tiles

_HALF_BIAS = 2.0**14
"""What an E2M1 code read as the leading bits of a float16 is too small by: their exponents' biases are 1 and 15."""

_Parts = list[Float[Array, "N units"]]


def as_stored(pool: Shaped[Array, "planes slots width"], record: RecordFormat) -> Array:
    """What kernels read: floats as they are, quantised records in units.

    Raises ValueError for byte-wise pools of 2 GiB or more, as `encode_tiles.as_units` does.
    """
    if not record.quantised:
        return pool
    sizes = (size for field in record.fields for size in (field.offset, field.nbytes))
    return encode_tiles.as_units(pool, encode_tiles.unit_bytes(*sizes))


def latent_columns(record: RecordFormat) -> int:
    """Columns of a tile of latents: a power of two that products take."""
    return max(tiles.next_power(record.latent_width), tiles.MIN_PRODUCT)


def rope_columns(record: RecordFormat) -> int:
    """Columns of a tile of roped keys: a power of two that products take."""
    return max(tiles.next_power(record.rope_width), tiles.MIN_PRODUCT)


def read_bytes(record: RecordFormat) -> int:
    """Bytes that decoding one record reads: all but its zeros."""
    return sum(field.nbytes for field in record.fields if field.kind != "zero")


class RecordTile(NamedTuple):
    """Which records a tile holds. stored: all of them, from `as_stored`. Invalid slots are zeros and never read."""

    stored: jax.Ref
    plane: Int[Array, ""]
    slots: Int[Array, " N"]
    valid: Bool[Array, " N"]
    record: RecordFormat

    @property
    def unit(self) -> int:
        """Bytes of an element of `stored`."""
        return self.stored.dtype.itemsize

    def units(self, name: str, columns: int) -> Shaped[Array, "N columns"]:
        """A field's elements as they are stored, then zeros."""
        field = self.record.field(name)
        return self._load(field.offset // self.unit, 1, field.nbytes // self.unit, columns)

    def integers(self, name: str, nbytes: int, columns: int) -> Int[Array, "N columns"]:
        """A field's little-endian integers of `nbytes`, which is no less than a unit, as uint32; then zeros."""
        field, step = self.record.field(name), nbytes // self.unit
        start, count = field.offset // self.unit, field.nbytes // nbytes
        parts = [self._load(start + k, step, count, columns).astype(jnp.uint32) for k in range(step)]
        return reduce(jnp.bitwise_or, [part << (8 * self.unit * k) for k, part in enumerate(parts)])

    def _load(self, start: int, step: int, count: int, columns: int) -> Shaped[Array, "N columns"]:
        """`count` elements of each record, at start, start + step, and so on."""
        column = jnp.arange(columns)
        mask = self.valid[:, None] & (column < count)[None, :]
        plane = jnp.broadcast_to(self.plane, (1, 1))
        slots = jnp.where(self.valid, self.slots, 0)[:, None]
        return tiles.load(self.stored, plane, slots, (start + step * column)[None, :], mask=mask)


def load_latent(
    tile: RecordTile, dtype: DTypeLike, outer_scale: Float[Array, ""] | None = None
) -> Float[Array, "N columns"]:
    """The latents that `RecordFormat.decode` returns, then zeros up to `latent_columns`."""
    columns = latent_columns(tile.record)
    if not tile.record.quantised:
        return tile.units("latent", columns).astype(dtype)
    decode = _fp8_latent if tile.record.name == "fp8_ds_mla" else _nvfp4_latent
    parts, scale = decode(tile, columns)
    scale = scale if outer_scale is None else scale * outer_scale
    return tiles.weave([(part * scale).astype(dtype) for part in parts])


def load_rope(tile: RecordTile, dtype: DTypeLike) -> Float[Array, "N columns"]:
    """The roped keys that `RecordFormat.decode` returns, then zeros up to `rope_columns`."""
    columns = rope_columns(tile.record)
    if not tile.record.quantised:
        return tile.units("rope", columns).astype(dtype)
    if tile.record.has("rope_scale"):
        scale = _float32(tile.integers("rope_scale", 4, 1))
        parts = [part * scale for part in _e4m3(tile.units("rope", columns // tile.unit))]
    elif tile.unit == encode_tiles.WORD:
        words = tile.units("rope", columns // 2)
        parts = [_bfloat16(words), _bfloat16(words >> 16)]
    else:
        parts = [_bfloat16(tile.integers("rope", 2, columns))]
    return tiles.weave([part.astype(dtype) for part in parts])


def _fp8_latent(tile: RecordTile, columns: int) -> tuple[_Parts, Float[Array, "N units"]]:
    """Parts of the codes, and what each unit is to be multiplied by.

    Units are taken in pairs. Four parts would fit the layout in which a product takes its operand, and Triton would
    decode once more for it, in twice as many threads.
    """
    groups = max(columns // FP8_GROUP, 1)
    scale = _float32(tile.integers("latent_scales", 4, groups))
    even, odd = _unweave(tile.units("latent", columns // tile.unit))
    return _e4m3(even) + _e4m3(odd), tiles.repeat(scale, even.shape[1] // groups)


def _nvfp4_latent(tile: RecordTile, columns: int) -> tuple[_Parts, Float[Array, "N units"]]:
    """Parts of the codes, and what each unit is to be multiplied by."""
    codes, groups = 2 * tile.unit, columns // NVFP4_GROUP
    scale = tiles.weave(_e4m3(tile.units("latent_scales", groups // tile.unit))) * _HALF_BIAS
    return _e2m1_halves(tile.units("latent", columns // codes)), tiles.repeat(scale, NVFP4_GROUP // codes)


def _e4m3(units: Int[Array, "N units"]) -> _Parts:
    """Parts of E4M3 codes, in float32."""
    return [codecs.decode_e4m3((units >> 8 * j).astype(jnp.uint8)) for j in range(units.dtype.itemsize)]


def _e2m1_halves(units: Int[Array, "N units"]) -> _Parts:
    """Parts of E2M1 codes divided by _HALF_BIAS, in float32.

    A code's exponent and mantissa become the lowest exponent bits and the highest mantissa bit of a float16, its sign
    the sign: in both halves of a word at once, which is 2 instructions a code where a table takes 5.
    """
    words, codes = units.astype(jnp.uint32), 2 * units.dtype.itemsize
    magnitude, sign = np.uint32(0x0E000E00), np.uint32(0x80008000)
    pairs = [
        (_shifted(words, 9 - 4 * j) & magnitude) | (_shifted(words, 12 - 4 * j) & sign)
        for j in range(min(codes, 4))
    ]
    bits = [(pairs[j % 4] >> (16 * (j // 4))).astype(jnp.uint16) for j in range(codes)]
    return [jax.lax.bitcast_convert_type(half, jnp.float16).astype(jnp.float32) for half in bits]


def _shifted(words: Int[Array, "N units"], left: int) -> Int[Array, "N units"]:
    return words << left if left >= 0 else words >> -left


def _float32(bits: Int[Array, "N n"]) -> Float[Array, "N n"]:
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _bfloat16(bits: Int[Array, "N n"]) -> Float[Array, "N n"]:
    """The bfloat16 in the low half of each integer."""
    return jax.lax.bitcast_convert_type(bits.astype(jnp.uint16), jnp.bfloat16)


def _unweave(woven: Shaped[Array, "N n"]) -> tuple[Shaped[Array, "N n/2"], Shaped[Array, "N n/2"]]:
    """The two parts that `tiles.weave` would make this of."""
    even, odd = jnp.unstack(woven.reshape(woven.shape[0], -1, 2), axis=-1)
    return even, odd
