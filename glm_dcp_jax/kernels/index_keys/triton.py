"""Writing index keys as a Pallas-Triton kernel: a program takes a few keys. Quantised pools are seen as words."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache import codecs
from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels import encode_tiles, tiles
from glm_dcp_jax.kernels.encode_tiles import per_row, positions

_WRITTEN_KEYS = 8


def written_keys(keys: int) -> int:
    """Keys that a program writes."""
    return min(_WRITTEN_KEYS, tiles.next_power(keys))


def write_index_keys(
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""],
    slots: Int[Array, " T"],
    keys: Float[Array, "T D"],
    index: IndexKeyFormat,
    block_size: int,
    interpret: bool,
) -> Shaped[Array, "full *pool"]:
    """See the op."""
    if 0 in (slots.size, pool.size):
        return pool
    step, width = written_keys(slots.size), index.width
    per_block = block_size if index.quantised else 1
    units = encode_tiles.as_units(pool, encode_tiles.unit_bytes(width)) if index.quantised else pool
    unit = units.dtype.itemsize

    def kernel(layer: jax.Ref, slots: jax.Ref, keys: jax.Ref, _: jax.Ref, pool: jax.Ref) -> None:
        rows = _rows(layer, slots, pool, step, per_block)
        if not index.quantised:
            values = _values(rows, keys, tiles.next_power(width))
            _store(pool, rows, jnp.zeros_like(rows.offset), width, values)
            return
        values = _values(rows, keys, tiles.next_power(-(-width // unit)), unit)
        amax = jnp.maximum(encode_tiles.amax(values), codecs.LEAST_INDEX_AMAX)
        scale = codecs.power_of_two_at_least(encode_tiles.divide(amax, codecs.E4M3_MAX, interpret))
        codes = encode_tiles.e4m3_rows(values, scale, interpret)
        _store(pool, rows, rows.offset * (width // unit), width // unit, codes)
        first = (block_size * width + encode_tiles.WORD * rows.offset) // unit
        _store(pool, rows, first, encode_tiles.WORD // unit, encode_tiles.split_float32(scale, unit))

    written = pl.pallas_call(
        kernel,
        grid=(-(-slots.size // step),),
        out_shape=jax.ShapeDtypeStruct(units.shape, units.dtype),
        input_output_aliases={3: 0},
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name="write_index_keys",
    )(layer[None], slots, keys, units)
    return encode_tiles.as_bytes(written) if index.quantised else written


class _Rows(NamedTuple):
    """A program's keys, [rows] int32 (layer: [1]). row: in the step. offset: in the block."""

    layer: Array
    block: Array
    offset: Array
    kept: Bool[Array, " rows"]
    row: Array


def _rows(layer: jax.Ref, slots: jax.Ref, pool: jax.Ref, step: int, per_block: int) -> _Rows:
    row = pl.program_id(0) * step + jnp.arange(step, dtype=jnp.int32)
    slot = tiles.load(slots, row, mask=row < slots.shape[0], other=-1)
    kept = (slot >= 0) & (slot < pool.shape[1] * per_block)
    # Interpreted, a masked store writes back what it found; it must not find the key of another row.
    block = jnp.where(kept, jax.lax.div(slot, per_block), pool.shape[1])
    offset = jax.lax.rem(slot, per_block)
    return _Rows(tiles.load(layer, jnp.zeros((1,), jnp.int32)), block, offset, kept, row)


def _values(rows: _Rows, keys: jax.Ref, *shape: int) -> Float[Array, "rows *shape"]:
    """Keys in float32, laid out in the tile's shape, zeros past the width."""
    column = positions(*shape)
    mask = per_row(rows.kept, column) & (column < keys.shape[-1])
    return tiles.load(keys, per_row(rows.row, column), column, mask=mask).astype(jnp.float32)


def _store(pool: jax.Ref, rows: _Rows, first: Int[Array, " rows"], count: int, units: Array) -> None:
    """Units [rows, a] at first .. first + count - 1 of their blocks; those past `count` are the tile's padding."""
    column = positions(units.shape[1])
    mask = per_row(rows.kept, column) & (column < count)
    place = per_row(first, column) + column
    if count < units.shape[1]:
        place = jnp.where(column < count, place, pool.shape[2])  # not the next key either; see _rows
    indices = per_row(rows.layer, column), per_row(rows.block, column), place
    tiles.store(pool, *indices, value=units.astype(pool.dtype), mask=mask)
