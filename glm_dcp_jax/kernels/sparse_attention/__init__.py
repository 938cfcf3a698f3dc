"""Absorbed MLA attention of each row over its own list of records."""

from collections.abc import Callable
from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.sparse_attention import reference, triton
from glm_dcp_jax.kernels.sparse_attention.reference import attend_gathered
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY

__all__ = ["MOST_ROWS", "attend_gathered", "sparse_attention"]

MOST_ROWS = 65_535
"""Rows that one call may have on a GPU, whose grids end there."""


def sparse_attention(
    q: Float[Array, "T H CR"],
    pool: Shaped[Array, "planes slots width"],
    plane: Int[Array, ""] | int,
    slots: Int[Array, "T K"],
    record: RecordFormat,
    scale: float,
    outer_scale: Float[Array, ""] | None = None,
    current: Shaped[Array, "T S width"] | None = None,
    current_valid: Bool[Array, "T S"] | None = None,
    backend: Backend = "auto",
    shared_memory: int = SHARED_MEMORY,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Attention of absorbed queries over the pool's records at each row's slots, and over a few that are not in it yet.

    q: bfloat16 or float32, and the dtype that records are decoded to. pool: records of one plane (layer) each, as
    `record` stores them. slots: int32, -1 for nothing; a slot that is listed twice counts twice. Kernels are fastest
    when -1 comes last. outer_scale: float32, what decoded latents are multiplied by (quantised records only). current:
    this step's own records, encoded, and which of them each row sees (current_valid). shared_memory: bytes that a
    program on the GPU may take; `tiling` makes use of them.

    Returns the normalised output over latents and the natural-log LSE, both float32. A row without records gets output
    0 and LSE -inf. What is not selected or not valid may hold anything, NaN included. Raises ValueError for arrays that
    do not fit together.
    """
    _check(q, pool, record, current, current_valid)
    if q.shape[0] > MOST_ROWS and backend == "triton":
        raise ValueError(
            f"{q.shape[0]} rows are more than a GPU's grid takes; call with at most {MOST_ROWS} at a time"
        )
    given = {"outer_scale": outer_scale, "current": current, "current_valid": current_valid}
    optional = {name: array for name, array in given.items() if array is not None}

    def named(op: Callable[..., tuple[Array, Array]]) -> Callable[..., tuple[Array, Array]]:
        """Takes the optional arrays behind the others."""
        return lambda q, pool, plane, slots, *more, **options: op(
            q, pool, plane, slots, record, scale, **dict(zip(optional, more, strict=True)), **options
        )

    return dispatch(
        backend,
        named(reference.sparse_attention),
        partial(named(triton.sparse_attention), shared_memory=shared_memory),
        q,
        pool,
        jnp.asarray(plane, jnp.int32),
        slots,
        *optional.values(),
    )


def _check(
    q: Array, pool: Array, record: RecordFormat, current: Array | None, current_valid: Array | None
) -> None:
    if q.shape[-1] != record.latent_width + record.rope_width:
        raise ValueError(
            f"q has {q.shape[-1]} columns, but absorbed queries of these records have "
            f"{record.latent_width} + {record.rope_width}"
        )
    if pool.shape[-1] != record.width or pool.dtype != record.dtype:
        raise ValueError(
            f"the pool keeps {pool.shape[-1]} x {pool.dtype} a record, but {record.name} is "
            f"{record.width} x {jnp.dtype(record.dtype)}; allocate it from the record format"
        )
    if (current is None) != (current_valid is None):
        raise ValueError("current and current_valid come together: pass both or neither")
