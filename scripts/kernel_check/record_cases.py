"""Cases of the ops that move records: what they write must be right, and nothing else may change."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PRNGKeyArray

from glm_dcp_jax.cache.records import RecordFormat
from kernel_check import ops
from kernel_check.case import Case, Resident, Sizes, format_name
from kernel_check.differences import CODE_LIMITS, records_apart, unequal


def record_pool(record: RecordFormat, sizes: Sizes) -> Resident:
    """[planes, tokens, width] records of normally distributed numbers."""

    def make(key: PRNGKeyArray) -> tuple[Array, ...]:
        def plane(key: PRNGKeyArray) -> Array:
            return record.encode(*_values(key, record, sizes.tokens))

        return (jax.lax.map(plane, jax.random.split(key, sizes.planes(record))),)

    return Resident(f"records: {format_name(record)}", make)


def plane_groups(planes: int, together: int, sizes: Sizes) -> tuple[int, Any]:
    """How many groups of planes calls can take turns on, and `Case.place`: the pool and a group, the last one first."""

    def place(resident: tuple[Array, ...], number: int) -> tuple[Array, Array]:
        # Falling, as a constant: XLA would compute a rising one on the device, by a kernel of its own.
        last = planes - 1 - number * together
        return resident[0], jnp.asarray(np.arange(last, last - together, -1, dtype=np.int32))

    return min(planes // together, sizes.calls), place


def scattered(key: PRNGKeyArray, count: int, size: int) -> Int[Array, " N"]:
    """`count` different numbers below `size`, a power of two, in an order without a pattern.

    Each step maps the numbers below `size` one to one. A permutation would need a sort, which is slow to compile.
    """
    factors = jax.random.bits(key, (4,), jnp.uint32) | 1
    number = jnp.arange(count, dtype=jnp.uint32)
    for factor in factors:
        number = (number * factor + (factor >> 16)) % size
        number ^= number >> (size.bit_length() // 2)
    return number.astype(jnp.int32)


def distinct_slots(count: int, tokens: int, key: PRNGKeyArray, awkward: bool) -> Int[Array, " N"]:
    """Slots, none twice. Awkward: every seventh skipped, and the last one of the pool first."""
    slots = scattered(key, count, tokens)
    if not awkward:
        return slots
    skipped = (jnp.arange(count) % 7 == 3) | (slots == tokens - 1)
    return jnp.where(skipped, -1, slots).at[0].set(tokens - 1)


def record_cases(sizes: Sizes) -> Iterator[Case]:
    """pack_records, unpack_records and write_records in every format."""
    for record in sizes.records:
        for rows in sizes.rows:
            yield _move(record, rows, sizes, unpack=False)
        for rows in sizes.rows:
            yield _move(record, rows, sizes, unpack=True)
        for rows in (*sizes.rows, sizes.prefill):
            yield _write(record, rows, sizes)


def _move(record: RecordFormat, rows: int, sizes: Sizes, unpack: bool) -> Case:
    """All that `rows` rows selected, of the Shared layers of a group."""
    planes, count = sizes.shared_layers, rows * sizes.selected
    calls, place = plane_groups(sizes.planes(record), planes, sizes)

    def packed(key: PRNGKeyArray) -> Array:
        return record.encode(*_values(key, record, planes, count))

    def run(place: Any, packed: Any, slots: Array, backend: Any) -> Array:
        if unpack:
            return ops.unpack_records(*place, slots, packed, backend=backend)
        return ops.pack_records(*place, slots, backend=backend)

    def differences(
        resident: Any, packed: Any, slots: Array, expected: Any, backend: Any
    ) -> dict[str, Array]:
        results = [run(place(resident, 0), packed, slots, each) for each in (backend, "reference")]
        return {"unequal": unequal(*results)}

    return Case(
        op="unpack_records" if unpack else "pack_records",
        shape=f"{format_name(record)}, {planes} planes x {count} slots",
        cost=ops.pack_cost(planes, count, record.record_bytes),
        resident=record_pool(record, sizes),
        rotated_bytes=calls * planes * sizes.tokens * record.record_bytes,
        calls=calls,
        place=place,
        fixed=packed if unpack else lambda key: (),
        fresh=lambda key, awkward: distinct_slots(count, sizes.tokens, key, awkward),
        run=run,
        differences=differences,
        limits={"unequal": 0},
        in_place=unpack,
    )


def _write(record: RecordFormat, rows: int, sizes: Sizes) -> Case:
    """New records of all layers of a group."""
    planes = sizes.group
    calls, place = plane_groups(sizes.planes(record), planes, sizes)

    def run(place: Any, values: tuple[Array, Array], slots: Array, backend: Any) -> Array:
        return ops.write_records(*place, slots, *values, record, backend=backend)

    def differences(
        resident: Any, values: Any, slots: Array, expected: Array, backend: Any
    ) -> dict[str, Array]:
        pool, numbers = place(resident, 0)
        after = run((pool, numbers), values, slots, backend)
        written = ops.pack_records(after, numbers, slots, backend="reference")
        rest = ops.unpack_records(pool, numbers, slots, written, backend="reference")
        wanted = jnp.where((slots >= 0)[:, None], expected, 0)
        return records_apart(written, wanted, record) | {"elsewhere": unequal(after, rest)}

    return Case(
        op="write_records",
        shape=f"{format_name(record)}, {planes} planes x {rows} rows",
        cost=ops.write_cost(planes, rows, record, jnp.dtype(jnp.bfloat16).itemsize),
        resident=record_pool(record, sizes),
        rotated_bytes=calls * planes * sizes.tokens * record.record_bytes,
        calls=calls,
        place=place,
        fixed=lambda key: _values(key, record, planes, rows),
        fresh=lambda key, awkward: distinct_slots(rows, sizes.tokens, key, awkward),
        run=run,
        differences=differences,
        limits=CODE_LIMITS | {"elsewhere": 0},
        in_place=True,
        expected=lambda values, slots: record.encode(*values),
    )


def _values(key: PRNGKeyArray, record: RecordFormat, *rows: int) -> tuple[Array, Array]:
    """Latents and roped keys, bfloat16."""
    values = jax.random.normal(key, (*rows, record.latent_width + record.rope_width)).astype(jnp.bfloat16)
    return values[..., : record.latent_width], values[..., record.latent_width :]
