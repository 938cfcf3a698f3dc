"""Absorbed MLA attention of each row over its own list of records."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.fit import check_axes, check_dtype, check_floats, int32, record_sizes
from glm_dcp_jax.kernels.sparse_attention import reference, triton
from glm_dcp_jax.kernels.sparse_attention.reference import attend_gathered
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY

__all__ = ["MOST_ROWS", "MOST_SHARERS", "attend_gathered", "sparse_attention"]

MOST_ROWS = 65_535
"""Rows that one call may have on a GPU, whose grids end there."""
MOST_SHARERS = 31
"""Of a list: bits of an int32 that are not its sign."""


def sparse_attention(
    q: Float[Array, "T H CR"],
    pool: Shaped[Array, "planes slots width"],
    plane: Int[Array, ""] | int,
    slots: Int[Array, "T K"],
    record: RecordFormat,
    scale: float,
    outer_scale: Float[Array, ""] | None = None,
    current: Shaped[Array, "T S width"] | None = None,
    current_valid: Bool[Array, "T S"] | Int[Array, "T S"] | None = None,
    backend: Backend = "auto",
    shared_memory: int = SHARED_MEMORY,
    seen_by: Int[Array, "T K"] | None = None,
    sharers: int = 1,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Attention of absorbed queries over the pool's records at each row's slots, and over a few that are not in it yet.

    q: bfloat16, float16 or float32, and the dtype that records are decoded to. pool: records of one plane (layer) each,
    as `record` stores them. slots: int32, -1 for nothing; a slot that is listed twice counts twice. Planes and slots
    must exist. Kernels are fastest when -1 comes last. sharers: queries that share each list, at most 31: a row's heads
    are that many equal parts, and bit b of `seen_by` says whether part b sees an entry; so does current_valid then, in
    int32. What is listed for any of them must be finite. outer_scale: float32, what decoded latents are multiplied by
    (quantised records only). current: this step's own records, encoded, and which of them each row sees
    (current_valid). shared_memory: bytes that a program on the GPU may take; `tiling` makes use of them.

    Returns the normalised output over latents and the natural-log LSE, both float32. A row without records gets output
    0 and LSE -inf. What is not selected or not valid may hold anything, NaN included. Raises ValueError for arrays that
    do not fit together, and for byte-wise pools of 2 GiB or more.
    """
    plane, slots = int32("plane", plane), int32("slots", slots)
    outer_scale = None if outer_scale is None else jnp.asarray(outer_scale)
    seen_by = None if seen_by is None else int32("seen_by", seen_by)
    _check(q, pool, plane, slots, record, outer_scale, current, current_valid)
    _check_sharers(q, slots, seen_by, sharers, current_valid)
    if q.shape[0] > MOST_ROWS and backend == "triton":
        raise ValueError(
            f"{q.shape[0]} rows are more than a GPU's grid takes; call with at most {MOST_ROWS} at a time"
        )
    if slots.shape[1] == 0:  # kernels take no lists without entries
        slots = jnp.full((slots.shape[0], 1), -1, jnp.int32)
        seen_by = None if seen_by is None else jnp.zeros_like(slots)
    if current is not None and current.shape[1] == 0:
        current = current_valid = None
    given = {
        "seen_by": seen_by,
        "outer_scale": outer_scale,
        "current": current,
        "current_valid": current_valid,
    }
    optional = {name: array for name, array in given.items() if array is not None}

    def named(op: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
        """Takes the optional arrays behind the others."""
        return lambda q, pool, plane, slots, *more, **options: op(
            q, pool, plane, slots, record, scale, sharers, **dict(zip(optional, more, strict=True)), **options
        )

    return dispatch(
        backend,
        named(reference.sparse_attention),
        partial(named(triton.sparse_attention), shared_memory=shared_memory),
        q,
        pool,
        plane,
        slots,
        *optional.values(),
    )


def _check(
    q: Array,
    pool: Array,
    plane: Array,
    slots: Array,
    record: RecordFormat,
    outer_scale: Array | None,
    current: Array | None,
    current_valid: Array | None,
) -> None:
    sizes, stored = record_sizes(record), f"{record.name} records"
    check_axes(
        sizes, q=(q, "T H CR"), pool=(pool, "planes slots width"), plane=(plane, ""), slots=(slots, "T K")
    )
    check_floats(q=q)
    check_dtype(record.dtype, stored, pool=pool)
    if pool.shape[1] == 0:
        raise ValueError("the pool has no slots; it must have at least one")
    if outer_scale is not None:
        check_axes({}, outer_scale=(outer_scale, ""))
        check_floats(outer_scale=outer_scale)
    if (current is None) != (current_valid is None):
        raise ValueError("current and current_valid come together: pass both or neither")
    if current is not None and current_valid is not None:
        rows = {"T": (q.shape[0], "q"), **sizes}
        check_axes(rows, current=(current, "T S width"), current_valid=(current_valid, "T S"))
        check_dtype(record.dtype, stored, current=current)


def _check_sharers(
    q: Array, slots: Array, seen_by: Array | None, sharers: int, current_valid: Array | None
) -> None:
    if not 1 <= sharers <= MOST_SHARERS or q.shape[1] % sharers:
        raise ValueError(
            f"sharers is {sharers}, but must be 1 to {MOST_SHARERS} and divide the {q.shape[1]} heads of q"
        )
    if (seen_by is None) != (sharers == 1):
        raise ValueError(
            "seen_by says which of several sharers see an entry: pass it if, and only if, sharers > 1"
        )
    if seen_by is not None:
        check_axes({"T": (slots.shape[0], "slots"), "K": (slots.shape[1], "slots")}, seen_by=(seen_by, "T K"))
    if current_valid is not None:
        if sharers == 1:
            check_dtype(jnp.bool_, "a mask", current_valid=current_valid)
        else:
            check_dtype(jnp.int32, "bits of several sharers", current_valid=current_valid)
