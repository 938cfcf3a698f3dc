"""Lightning-indexer scores of queries against index keys: of keys in a row, or of a request's keys in their pages."""

from functools import partial

from jaxtyping import Array, Float, Int, Shaped, UInt32

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.fit import check_axes, check_floats, check_index_pages, int32
from glm_dcp_jax.kernels.index_scores import reference, triton
from glm_dcp_jax.kernels.index_scores.reference import Paging, index_scores, row_bytes

__all__ = ["index_scores", "paged_index_scores", "paged_scores_and_maxima", "row_bytes"]


def paged_index_scores(
    q: Float[Array, "N S I D"],
    head_weights: Float[Array, "N S I"],
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""] | int,
    page_table: Int[Array, "N P"],
    visible: Int[Array, "N S"],
    index: IndexKeyFormat,
    page_tokens: int,
    block_size: int,
    backend: Backend = "auto",
) -> Float[Array, "N S P*page_tokens"]:
    """float32 scores of each row against its request's first `visible` keys, -inf behind; see `index_scores`.

    pool: as `index.pool_shape` says; a page of the table is page_tokens / block_size consecutive blocks of it, keys in
    position order. layer: the Full layer's number in the pool; may be traced, and must exist. Pages that no row sees
    are not read, and negative ones read page 0; others must exist. Keys are multiplied in q's dtype, bfloat16, float16
    or float32, and summed in float32. On GPUs a product that is NaN counts as 0. Raises ValueError for arrays that do
    not fit together, and for byte-wise pools of 2 GiB or more.
    """
    return _scored(
        q, head_weights, pool, layer, page_table, visible, index, page_tokens, block_size, 0, backend
    )[0]


def paged_scores_and_maxima(
    q: Float[Array, "N S I D"],
    head_weights: Float[Array, "N S I"],
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""] | int,
    page_table: Int[Array, "N P"],
    visible: Int[Array, "N S"],
    index: IndexKeyFormat,
    page_tokens: int,
    block_size: int,
    group: int,
    backend: Backend = "auto",
) -> tuple[Float[Array, "N S P*page_tokens"], UInt32[Array, "N S P*page_tokens/group"]]:
    """The scores of `paged_index_scores`, and of each group of neighbours the largest, which `topk` starts from.

    group: a power of two up to 16 that divides P * page_tokens. maxima: numbers in the order of scores, as
    `topk.reference.sortable` makes them, of visible keys alone; 0 where none is. Raises ValueError as
    `paged_index_scores` does, and for another group.
    """
    context = page_table.shape[1] * page_tokens
    if group not in (1, 2, 4, 8, 16) or context % group:
        raise ValueError(f"{context} keys cannot be in groups of {group}; use 1, 2, 4, 8 or 16, whole groups")
    scores, maxima = _scored(
        q, head_weights, pool, layer, page_table, visible, index, page_tokens, block_size, group, backend
    )
    return scores, maxima


def _scored(
    q: Array,
    head_weights: Array,
    pool: Array,
    layer: Array | int,
    page_table: Array,
    visible: Array,
    index: IndexKeyFormat,
    page_tokens: int,
    block_size: int,
    group: int,
    backend: Backend,
) -> tuple[Array, ...]:
    layer, page_table = int32("layer", layer), int32("page_table", page_table)
    visible = int32("visible", visible)
    check_index_pages(pool, index, page_tokens, block_size)
    check_axes(
        {"D": (index.width, f"{index.kind} keys")},
        q=(q, "N S I D"),
        head_weights=(head_weights, "N S I"),
        layer=(layer, ""),
        page_table=(page_table, "N P"),
        visible=(visible, "N S"),
    )
    check_floats(q=q, head_weights=head_weights)
    paging = Paging(index, page_tokens, block_size)
    return dispatch(
        backend,
        partial(reference.paged_index_scores, paging=paging, group=group),
        partial(triton.paged_index_scores, paging=paging, group=group),
        q,
        head_weights,
        pool,
        layer,
        page_table,
        visible,
    )
