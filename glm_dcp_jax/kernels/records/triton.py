"""Record movement as Pallas-Triton kernels: a program takes a few rows of one plane. Quantised pools move as words."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache import codecs
from glm_dcp_jax.cache.records import FP8_GROUP, Field, RecordFormat
from glm_dcp_jax.kernels import encode_tiles, tiles
from glm_dcp_jax.kernels.encode_tiles import per_row, positions

_MOVED_BYTES = 4096
"""What a program of pack or unpack moves: so little that a few hundred records occupy a GPU."""
_ENCODED_ROWS = 4


def moved_rows(records: int, record_bytes: int) -> int:
    """Records that a program of pack or unpack moves."""
    return min(max(_MOVED_BYTES // tiles.next_power(record_bytes), 1), tiles.next_power(records))


def encoded_rows(records: int) -> int:
    """Records that a program of write_records encodes."""
    return min(_ENCODED_ROWS, tiles.next_power(records))


def pack_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    interpret: bool,
) -> Shaped[Array, "P N width"]:
    """See the op."""
    if 0 in (planes.size, slots.size, pool.size):
        return jnp.zeros((planes.size, slots.size, pool.shape[-1]), pool.dtype)
    units = _as_units(pool, pool.shape[-1])
    step = moved_rows(slots.size, pool.shape[-1] * pool.dtype.itemsize)
    out = jax.ShapeDtypeStruct((planes.size, slots.size, units.shape[-1]), units.dtype)

    def kernel(planes: jax.Ref, slots: jax.Ref, pool: jax.Ref, packed: jax.Ref) -> None:
        rows = _rows(planes, slots, pool, step)
        column = positions(tiles.next_power(pool.shape[-1]))
        inside = column < pool.shape[-1]
        mask = per_row(rows.kept, column) & inside
        records = tiles.load(pool, *rows.in_pool(column), mask=mask)
        mask = per_row(rows.row < slots.shape[0], column) & inside
        tiles.store(packed, *rows.in_step(column), value=records, mask=mask)

    return _as_stored(_launch(kernel, "pack_records", step, out, interpret, planes, slots, units), pool)


def unpack_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    packed: Shaped[Array, "P N width"],
    interpret: bool,
) -> Shaped[Array, "layers slots width"]:
    """See the op."""
    if 0 in (packed.size, pool.size):
        return pool
    units, source = _as_units(pool, pool.shape[-1]), _as_units(packed, pool.shape[-1])
    step = moved_rows(slots.size, pool.shape[-1] * pool.dtype.itemsize)

    def kernel(planes: jax.Ref, slots: jax.Ref, packed: jax.Ref, _: jax.Ref, pool: jax.Ref) -> None:
        rows = _rows(planes, slots, pool, step)
        column = positions(tiles.next_power(pool.shape[-1]))
        mask = per_row(rows.kept, column) & (column < pool.shape[-1])
        records = tiles.load(packed, *rows.in_step(column), mask=mask)
        tiles.store(pool, *rows.in_pool(column), value=records, mask=mask)

    return _as_stored(
        _launch(kernel, "unpack_records", step, units, interpret, planes, slots, source, units), pool
    )


def write_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    latent: Float[Array, "P N C"],
    rope_key: Float[Array, "P N R"],
    *outer_scales: Float[Array, " P"],
    record: RecordFormat,
    interpret: bool,
) -> Shaped[Array, "layers slots width"]:
    """See the op."""
    if 0 in (planes.size, slots.size, pool.size):
        return pool
    units = _as_units(pool, *(size for field in record.fields for size in (field.offset, field.nbytes)))
    step, unit = encoded_rows(slots.size), units.dtype.itemsize

    def kernel(*refs: jax.Ref) -> None:
        planes, slots, latent, rope_key, *outer_scales, _, pool = refs
        rows = _rows(planes, slots, pool, step)
        if record.quantised:
            parts = _latent_parts(rows, latent, outer_scales, record, unit, interpret)
            parts |= _rope_parts(rows, rope_key, record, unit, interpret)
        else:
            parts = {
                "latent": _values(rows, latent, tiles.next_power(record.latent_width)),
                "rope": _values(rows, rope_key, tiles.next_power(record.rope_width)),
            }
        for field in record.fields:
            _store_field(pool, rows, field, unit, parts.get(field.name))

    inputs = (planes, slots, latent, rope_key, *outer_scales)
    return _as_stored(_launch(kernel, "write_records", step, units, interpret, *inputs, units), pool)


class _Rows(NamedTuple):
    """A program's rows, [rows], of one plane, [1], all int32. plane, slot: in the pool. ordinal, row: in the step."""

    plane: Array
    slot: Array
    kept: Bool[Array, " rows"]
    ordinal: Array
    row: Array

    def in_pool(self, column: Array) -> tuple[Array, Array, Array]:
        """Indices of the pool at these columns."""
        return per_row(self.plane, column), per_row(self.slot, column), column

    def in_step(self, column: Array) -> tuple[Array, Array, Array]:
        """Indices of an array [P, N, width] at these columns."""
        return per_row(self.ordinal, column), per_row(self.row, column), column


def _rows(planes: jax.Ref, slots: jax.Ref, pool: jax.Ref, step: int) -> _Rows:
    ordinal = jnp.full((1,), pl.program_id(1), jnp.int32)
    row = pl.program_id(0) * step + jnp.arange(step, dtype=jnp.int32)
    slot = tiles.load(slots, row, mask=row < slots.shape[0], other=-1)
    kept = (slot >= 0) & (slot < pool.shape[1])
    # Interpreted, a masked store writes back what it found; it must not find the slot of another row.
    slot = jnp.where(kept, slot, pool.shape[1])
    return _Rows(tiles.load(planes, ordinal), slot, kept, ordinal, row)


def _values(rows: _Rows, source: jax.Ref, *shape: int) -> Float[Array, "rows *shape"]:
    """Rows of [P, N, width] in float32, laid out in the tile's shape, zeros past the width."""
    column = positions(*shape)
    mask = per_row(rows.kept, column) & (column < source.shape[-1])
    return tiles.load(source, *rows.in_step(column), mask=mask).astype(jnp.float32)


def _latent_parts(
    rows: _Rows,
    latent: jax.Ref,
    outer_scales: list[jax.Ref],
    record: RecordFormat,
    unit: int,
    interpret: bool,
) -> dict[str, Array]:
    """Units of a quantised record's fields `latent` and `latent_scales`."""
    fp8 = record.name == "fp8_ds_mla"
    scales = record.field("latent_scales").count
    groups = tiles.next_power(scales if fp8 else -(-scales // unit))
    shape = (groups, FP8_GROUP // unit, unit) if fp8 else (groups, unit, 8 // unit, 2 * unit)
    values = _values(rows, latent, *shape)
    for scale in outer_scales:
        values = encode_tiles.divide(values, per_row(tiles.load(scale, rows.ordinal), values), interpret)
    if fp8:
        codes, float_scales = encode_tiles.fp8_groups(values, interpret)
        return {"latent": codes, "latent_scales": encode_tiles.split_float32(float_scales, unit)}
    codes, scale_codes = encode_tiles.nvfp4_groups(values, interpret)
    return {"latent": codes, "latent_scales": scale_codes}


def _rope_parts(
    rows: _Rows, rope_key: jax.Ref, record: RecordFormat, unit: int, interpret: bool
) -> dict[str, Array]:
    """Units of a quantised record's field `rope`, and of `rope_scale` where it has one."""
    if not record.has("rope_scale"):
        together = max(unit // 2, 1)
        values = _values(rows, rope_key, tiles.next_power(-(-record.rope_width // together)), together)
        return {"rope": encode_tiles.join_bfloat16(values, unit)}
    values = _values(rows, rope_key, tiles.next_power(-(-record.rope_width // unit)), unit)
    scale = encode_tiles.divide(encode_tiles.amax(values), codecs.E4M3_MAX, interpret)
    codes = encode_tiles.e4m3_rows(values, jnp.where(scale > 0, scale, 1.0), interpret)
    return {"rope": codes, "rope_scale": encode_tiles.split_float32(scale, unit)}


def _store_field(pool: jax.Ref, rows: _Rows, field: Field, unit: int, units: Array | None) -> None:
    """Units [rows, ...] of a field; those past its end are the tile's padding. None stands for zeros."""
    count = field.nbytes // unit
    if units is None:
        units = jnp.zeros((rows.slot.size, tiles.next_power(count)), pool.dtype)
    column = positions(*units.shape[1:])
    mask = per_row(rows.kept, column) & (column < count)
    indices = rows.in_pool(field.offset // unit + column)
    tiles.store(pool, *indices, value=units.astype(pool.dtype), mask=mask)


def _as_units(array: Array, *byte_counts: int) -> Array:
    """Quantised records as units; floats as they are."""
    if array.dtype != jnp.uint8:
        return array
    return encode_tiles.as_units(array, encode_tiles.unit_bytes(*byte_counts))


def _as_stored(units: Array, pool: Array) -> Array:
    return encode_tiles.as_bytes(units) if pool.dtype == jnp.uint8 else units


def _launch(
    kernel: Callable[..., None],
    name: str,
    step: int,
    out: Array | jax.ShapeDtypeStruct,
    interpret: bool,
    *inputs: Array,
) -> Array:
    """A program per `step` slots, inputs[1], and plane, inputs[0]. A last input that is `out` is written in place."""
    in_place = out is inputs[-1]
    return pl.pallas_call(
        kernel,
        grid=(-(-inputs[1].size // step), inputs[0].size),  # only the first axis may exceed 65,535
        out_shape=jax.ShapeDtypeStruct(out.shape, out.dtype),
        input_output_aliases={len(inputs) - 1: 0} if in_place else {},
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name=name,
    )(*inputs)
