"""Exact, deterministic selection: score descending, then lowest position."""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.fit import check_axes, check_dtype, int32
from glm_dcp_jax.kernels.topk import reference, triton

__all__ = ["maxima_group", "select_mask", "select_positions"]


def select_positions(
    scores: Float[Array, "T L"],
    visible: Int[Array, " T"],
    k: int,
    backend: Backend = "auto",
    maxima: UInt32[Array, "T M"] | None = None,
) -> Int[Array, "T k"]:
    """The k best of each row's first `visible` columns: score descending, then lowest position; -1 behind.

    Rows with fewer than k visible columns select all of them; no more are visible than there are. -0.0 in scores must
    already be +0.0. NaN ranks as -inf. scores: float32. On GPUs rows of more than `triton.SORTED_COLUMNS` columns are
    searched, for k up to 8,192 and 8 million columns: sorting them takes several kernels, which move every column many
    times. maxima: of groups of `maxima_group` columns, if they are known, as `index_scores.paged_scores_and_maxima`
    returns them; then not all scores are read. Raises ValueError for arrays that do not fit together, and for a
    negative k.
    """
    visible = _checked(scores, visible, k)
    known = () if maxima is None else (maxima,)
    for array in known:
        group = maxima_group(scores.shape[1], k)
        check_axes({"M": (scores.shape[1] // max(group, 1), "scores")}, maxima=(array, "T M"))
        check_dtype(jnp.uint32, "of maxima", maxima=array)
    return dispatch(
        backend,
        lambda scores, visible, *maxima: reference.select_positions(scores, visible, k),
        partial(triton.select_positions, k=k),
        scores,
        visible,
        *known,
    )


def maxima_group(columns: int, k: int) -> int:
    """Columns of a group whose maxima `select_positions` makes use of; 0 where it has no use for any."""
    levels = triton.Levels.of(columns, k)
    if columns <= triton.SORTED_COLUMNS or not k or levels is None or len(levels.sizes) == 1:
        return 0
    return levels.group if levels.sizes[1] * levels.group == columns else 0


def select_mask(scores: Float[Array, "S L"], visible: Int[Array, " S"], k: int) -> Bool[Array, "S L"]:
    """The same set as `select_positions`, as a mask over the columns; in plain JAX, without a sort.

    Cheaper than positions when many rows are selected at once. Raises ValueError as `select_positions` does.
    """
    return reference.select_mask(scores, _checked(scores, visible, k), k)


def _checked(scores: Array, visible: Array, k: int) -> Int[Array, " T"]:
    """`visible` as int32, of scores that can be selected from."""
    visible = int32("visible", visible)
    check_axes({}, scores=(scores, "T L"), visible=(visible, "T"))
    check_dtype(jnp.float32, "of index scores", scores=scores)
    if k < 0:
        raise ValueError(f"{k} positions cannot be selected; k must be 0 or more")
    return visible
