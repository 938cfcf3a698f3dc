"""Cases of sparse attention: rows of a decode step over what they selected, and over the step's own records."""

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PRNGKeyArray

from glm_dcp_jax.cache.records import RecordFormat
from kernel_check import ops
from kernel_check.case import Case, Sizes, format_name
from kernel_check.differences import relative
from kernel_check.index_cases import DRAFT_ROWS
from kernel_check.record_cases import plane_groups, record_pool

LIMITS = {"output": 2e-3, "lse": 1e-5}
"""As shares of the largest magnitude. The kernel rounds weights to bfloat16, which is up to 2**-9; nothing else."""
SCALE = (192 + 64) ** -0.5
"""GLM-5.2's, of its query heads' 192 + 64 columns."""


def attention_cases(sizes: Sizes) -> Iterator[Case]:
    """Every format, number of rows and number of local heads."""
    for record in sizes.records:
        for rows in sizes.rows:
            for heads in sizes.heads:
                yield _attend(record, rows, heads, sizes)


def _attend(record: RecordFormat, rows: int, heads: int, sizes: Sizes) -> Case:
    calls, groups = plane_groups(sizes.planes(record), 1, sizes)
    own = min(rows, DRAFT_ROWS)

    def place(resident: tuple[Array, ...], number: int) -> tuple[Array, Array]:
        pool, planes = groups(resident, number)
        return pool, planes[0]

    def fixed(key: PRNGKeyArray) -> tuple[Array, Array, Array]:
        width = record.latent_width + record.rope_width
        q = jax.random.normal(key, (rows, heads, width)).astype(jnp.bfloat16)
        values = jax.random.normal(jax.random.fold_in(key, 1), (rows, own, width)).astype(jnp.bfloat16)
        current = record.encode(values[..., : record.latent_width], values[..., record.latent_width :])
        return q, current, jnp.ones((rows, own), bool)

    def fresh(key: PRNGKeyArray, awkward: bool) -> Array:
        slots = jax.random.randint(key, (rows, sizes.selected), 0, sizes.tokens, jnp.int32)
        if not awkward:
            return slots
        # Rows of different lengths, a gap in each, and the pool's last slot.
        length = sizes.selected - jnp.arange(rows)[:, None] * sizes.selected // max(rows, 2)
        column = jnp.arange(sizes.selected)
        return jnp.where((column < length) & (column != 1), slots, -1).at[0, 0].set(sizes.tokens - 1)

    def run(place: Any, given: tuple[Array, Array, Array], slots: Array, backend: Any) -> tuple[Array, Array]:
        q, current, valid = given
        return ops.sparse_attention(
            q,
            *place,
            slots,
            record,
            SCALE,
            current=current,
            current_valid=valid,
            backend=backend,
            shared_memory=sizes.shared_memory,
        )

    def exact(place: tuple[Array, Array], given: Any, slots: Array) -> tuple[Array, Array]:
        """The reference in float32, over the records' decoded values as a pool of its own."""
        q, current, valid = given
        pool, plane = place
        packed = ops.pack_records(pool, plane[None], slots.ravel(), backend="reference")
        listed = jnp.where(slots >= 0, jnp.arange(slots.size).reshape(slots.shape), -1)
        decoded, current = (
            record.decode(each, jnp.bfloat16).astype(jnp.float32) for each in (packed, current)
        )
        plain = RecordFormat.sized("float32", record.latent_width, record.rope_width, record.index.width)
        return ops.sparse_attention(
            q.astype(jnp.float32),
            decoded,
            0,
            listed,
            plain,
            SCALE,
            current=current,
            current_valid=valid,
            backend="reference",
        )

    def differences(resident: Any, given: Any, slots: Array, expected: Any, backend: Any) -> dict[str, Array]:
        out, lse = run(place(resident, 0), given, slots, backend)
        exact_out, exact_lse = exact(place(resident, 0), given, slots)
        return {"output": relative(out, exact_out), "lse": relative(lse, exact_lse)}

    return Case(
        op="sparse_attention",
        shape=f"{format_name(record)}, {rows} rows, {heads} heads",
        cost=ops.sparse_attention_cost(
            rows,
            heads,
            sizes.selected,
            record,
            jnp.bfloat16,
            current=own,
            shared_memory=sizes.shared_memory,
        ),
        resident=record_pool(record, sizes),
        rotated_bytes=calls * sizes.tokens * record.record_bytes,
        calls=calls,
        place=place,
        fixed=fixed,
        fresh=fresh,
        run=run,
        differences=differences,
        limits=LIMITS,
    )
