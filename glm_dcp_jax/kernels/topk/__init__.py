"""Exact, deterministic selection: score descending, then lowest position."""

from functools import partial

from jaxtyping import Array, Float, Int

from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.topk import reference, triton
from glm_dcp_jax.kernels.topk.reference import select_mask

__all__ = ["select_mask", "select_positions"]


def select_positions(
    scores: Float[Array, "T L"], visible: Int[Array, " T"], k: int, backend: Backend = "auto"
) -> Int[Array, "T k"]:
    """The k best of each row's first `visible` columns: score descending, then lowest position; -1 behind.

    Rows with fewer than k visible columns select all of them. -0.0 in scores must already be +0.0. NaN ranks as -inf.
    scores: float32. On GPUs rows of more than `triton.SORTED_COLUMNS` columns are searched, whatever k: sorting them
    takes several kernels, which move every column many times.
    """
    return dispatch(
        backend,
        partial(reference.select_positions, k=k),
        partial(triton.select_positions, k=k),
        scores,
        visible,
    )
