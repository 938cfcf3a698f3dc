"""Programs between the pools and rows of bytes: what a producer gives of some tokens, and a consumer takes in.

A row is all that one part of the caches has of a token, layer after layer, so it is the same in every layout:

    records   each layer's record, then the MTP layer's record and index key, if the engine has one
    keys      each Full layer's index key

Rows of records are placed by `layout`, rows of keys by `layout.index_layout`. A program takes a bucket of N rows; slots
that there are not, below 0 or past the end, are padding.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped, UInt8

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import Pools, pool_specs
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.index_keys import pack_index_keys, unpack_index_keys
from glm_dcp_jax.kernels.records import pack_records, unpack_records
from glm_dcp_jax.parallel.mesh import DCP, TENSOR_AXES

Part = Literal["records", "keys"]
PARTS: tuple[Part, ...] = ("records", "keys")
NOTHING = -1
"""The slot of padding."""


class PoolsLost(Exception):
    """A failed step took the caches with it: what pages held then is gone."""


@dataclass(frozen=True)
class Caches:
    """An engine's caches: their pools' shapes, each segment's (pools of its layers) and the MTP layer's, None for none.

    All on one mesh, ("replica", "dcp"). The same program serves every number of segments.
    """

    mesh: Mesh
    layout: Layout
    record: RecordFormat
    segments: tuple[Pools, ...]
    mtp: Pools | None

    def row_bytes(self, part: Part, with_mtp: bool | None = None) -> int:
        """Bytes of a row, of records with or without the MTP layer's at its end; None: as this engine has them."""
        layers, full = self.layers
        if part == "keys":
            return full * self.record.index.key_bytes
        extra = self.record.record_bytes + self.record.index.key_bytes
        with_mtp = self.mtp is not None if with_mtp is None else with_mtp
        return layers * self.record.record_bytes + extra * with_mtp

    @property
    def layers(self) -> tuple[int, int]:
        """Layers, and Full layers among them; without the MTP layer."""
        return sum(pools.ckv.shape[0] for pools in self.segments), sum(
            pools.index_keys.shape[0] for pools in self.segments
        )

    def placement(self, part: Part) -> Layout:
        """Where rows of a part lie."""
        return self.layout if part == "records" else self.layout.index_layout

    def copies(self, part: Part) -> int:
        """The first axis of what `unpack` takes: parts that ranks hold; 1 where all hold everything."""
        return self.layout.world if part == "records" or self.layout.index_shards > 1 else 1

    @cached_property
    def _specs(self) -> tuple[Pools, Pools]:
        return pool_specs(self.layout), pool_specs(self.layout.mtp_layout)

    def pools_of(self, part: Part, segments: tuple[Pools, ...], mtp: Pools | None) -> tuple[Any, ...]:
        """Those of the arrays that rows of a part are made of, in their order."""
        if part == "keys":
            return tuple(pools.index_keys for pools in segments)
        return (*(pools.ckv for pools in segments), *(() if mtp is None else mtp))

    def with_pools(
        self, part: Part, segments: tuple[Pools, ...], mtp: Pools | None, new: tuple[Any, ...]
    ) -> tuple[tuple[Pools, ...], Pools | None]:
        """The pools with these in the places of a part's."""
        if part == "keys":
            return tuple(
                pools._replace(index_keys=one) for pools, one in zip(segments, new, strict=True)
            ), mtp
        count = len(segments)
        segments = tuple(pools._replace(ckv=one) for pools, one in zip(segments, new[:count], strict=True))
        return segments, mtp if mtp is None else Pools(*new[count:])

    def pack(self, part: Part, rows: int) -> Callable[..., UInt8[Array, "rows bytes"]]:
        """A program of (pools, slots [tp, N] int32) to rows [tp * N, row_bytes]: each rank packs slots of its own."""
        pools = self._shapes(part)
        slots = self._array((self.mesh.size, rows), np.int32, P(TENSOR_AXES))
        return self._compiled("pack", part, pools, slots)

    def unpack(self, part: Part, rows: int) -> Callable[..., tuple[Any, ...]]:
        """A program of (pools, slots [W, N] int32, rows [W, N, row_bytes]) that writes the rows; the pools are donated.

        Where all ranks hold everything, W is 1.
        """
        spec = P(DCP) if self.copies(part) > 1 else P()
        slots = self._array((self.copies(part), rows), np.int32, spec)
        given = self._array((self.copies(part), rows, self.row_bytes(part)), np.uint8, spec)
        return self._compiled("unpack", part, self._shapes(part), slots, given)

    def rows_sharding(self, part: Part) -> NamedSharding:
        """How `unpack` takes slots and rows."""
        return NamedSharding(self.mesh, P(DCP) if self.copies(part) > 1 else P())

    @property
    def slots_sharding(self) -> NamedSharding:
        """How `pack` takes slots."""
        return NamedSharding(self.mesh, P(TENSOR_AXES))

    def _array(self, shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, spec))

    def _shapes(self, part: Part) -> tuple[Any, ...]:
        return self.pools_of(part, self.segments, self.mtp)

    def _pool_specs(self, part: Part) -> tuple[P, ...]:
        main, mtp = self._specs
        one = main.index_keys if part == "keys" else main.ckv
        extra = () if part == "keys" or self.mtp is None else tuple(mtp)
        return (*[one] * len(self.segments), *extra)

    @cached_property
    def _programs(self) -> dict[Any, Any]:
        return {}

    def _compiled(self, kind: str, part: Part, *shapes: Any) -> Any:
        """Compiled at the first call; the engine makes that call while it warms up."""
        key = (kind, part, *(each.shape for each in shapes[1:]))
        if key not in self._programs:
            here: Any = self._pack_here if kind == "pack" else self._unpack_here
            pools, rows = self._pool_specs(part), self.rows_sharding(part).spec
            given, out = (
                ((pools, P(TENSOR_AXES)), P(TENSOR_AXES)) if kind == "pack" else ((pools, rows, rows), pools)
            )
            program = jax.shard_map(
                partial(here, part), mesh=self.mesh, in_specs=given, out_specs=out, check_vma=False
            )
            jitted = jax.jit(program, donate_argnums=() if kind == "pack" else 0)
            self._programs[key] = jitted.lower(*shapes).compile()
        return self._programs[key]

    def _pack_here(
        self, part: Part, pools: tuple[Array, ...], slots: Int[Array, "1 N"]
    ) -> UInt8[Array, "N bytes"]:
        columns = [_rows(self._packed(pool, is_key, slots[0])) for pool, is_key in self._kinds(part, pools)]
        return jnp.concatenate(columns, axis=1)

    def _unpack_here(
        self,
        part: Part,
        pools: tuple[Array, ...],
        slots: Int[Array, "1 N"],
        rows: UInt8[Array, "1 N bytes"],
    ) -> tuple[Array, ...]:
        at, written = 0, []
        for pool, is_key in self._kinds(part, pools):
            each = self.record.index.key_bytes if is_key else self.record.record_bytes
            width = pool.shape[0] * each
            columns = rows[0, :, at : at + width]
            written.append(self._unpacked(pool, is_key, slots[0], columns))
            at += width
        return tuple(written)

    def _kinds(self, part: Part, pools: tuple[Array, ...]) -> list[tuple[Array, bool]]:
        """Each pool, and whether it holds index keys."""
        last = len(pools) - 1 if part == "records" and self.mtp is not None else None
        return [(pool, part == "keys" or at == last) for at, pool in enumerate(pools)]

    def _packed(self, pool: Array, is_key: bool, slots: Int[Array, " N"]) -> Array:
        if is_key:
            return pack_index_keys(pool, slots, self.record.index, self.layout.block_size)
        return pack_records(pool, jnp.arange(pool.shape[0], dtype=jnp.int32), slots)

    def _unpacked(
        self, pool: Array, is_key: bool, slots: Int[Array, " N"], columns: UInt8[Array, "N bytes"]
    ) -> Array:
        index = self.record.index
        dtype = index.dtype if is_key else self.record.dtype
        packed = _from_rows(columns, pool.shape[0], dtype)
        if is_key:
            return unpack_index_keys(pool, slots, packed, index, self.layout.block_size)
        return unpack_records(pool, jnp.arange(pool.shape[0], dtype=jnp.int32), slots, packed)


def _rows(packed: Shaped[Array, "P N width"]) -> UInt8[Array, "N bytes"]:
    """Elements of several planes as bytes, plane after plane."""
    if packed.dtype != jnp.uint8:
        raw = jax.lax.bitcast_convert_type(packed, jnp.uint8)
        packed = raw.reshape(*packed.shape[:2], -1)
    return packed.transpose(1, 0, 2).reshape(packed.shape[1], -1)


def _from_rows(rows: UInt8[Array, "N bytes"], planes: int, dtype: Any) -> Shaped[Array, "P N width"]:
    """The inverse of `_rows`."""
    size = jnp.dtype(dtype).itemsize
    raw = rows.reshape(rows.shape[0], planes, -1).transpose(1, 0, 2)
    if dtype == jnp.uint8:
        return raw
    return jax.lax.bitcast_convert_type(raw.reshape(*raw.shape[:2], -1, size), dtype)
