"""The selection of a Full layer: index scores and top-k, in row blocks whose scores fit a workspace."""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.each_request import each_request
from glm_dcp_jax.kernels.index_keys import gather_index_keys
from glm_dcp_jax.kernels.index_scores import index_scores, paged_index_scores, row_bytes
from glm_dcp_jax.kernels.index_scores.reference import Paging
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES, map_row_blocks
from glm_dcp_jax.kernels.seen_blocks import map_seen_blocks
from glm_dcp_jax.kernels.topk import select_mask, select_positions


def select_paged(
    q: Float[Array, "N S I D"],
    head_weights: Float[Array, "N S I"],
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""] | int,
    page_table: Int[Array, "N P"],
    visible: Int[Array, "N S"],
    k: int,
    index: IndexKeyFormat,
    page_tokens: int,
    block_size: int,
    as_mask: bool,
    workspace: int = WORKSPACE_BYTES,
    backend: Backend = "auto",
) -> Int[Array, "N S k"] | Bool[Array, "N S P*page_tokens"]:
    """Each row's k best of its request's first `visible` keys: positions, or the same as a mask over all positions.

    Positions come in the order of `topk.select_positions`, -1 behind. The other arrays are those of
    `index_scores.paged_index_scores`. workspace: bytes that the scores of one block of rows may take, though a block
    has at least one row. Results do not depend on it.
    """
    paging = Paging(index, page_tokens, block_size)
    return dispatch(
        backend,
        partial(_select_prefixes, k=k, paging=paging, as_mask=as_mask, workspace=workspace),
        partial(_select_blocks, k=k, paging=paging, as_mask=as_mask, workspace=workspace),
        q,
        head_weights,
        pool,
        jnp.asarray(layer, jnp.int32),
        page_table,
        visible,
    )


def _select_prefixes(
    q: Array,
    head_weights: Array,
    pool: Array,
    layer: Array,
    page_table: Array,
    visible: Array,
    *,
    k: int,
    paging: Paging,
    as_mask: bool,
    workspace: int,
) -> Array:
    """In plain JAX: a request's keys are gathered once, and blocks of rows need only the columns that they see."""
    _, rows, heads, width = q.shape
    context = page_table.shape[1] * paging.page_tokens
    choose = select_mask if as_mask else partial(select_positions, backend="reference")
    per_row = row_bytes(rows, heads, context)
    # The blocks below are cut for WORKSPACE_BYTES: what is given is what a row takes of that.
    share = WORKSPACE_BYTES / workspace

    def one_request(request_q: Array, request_w: Array, pages: Array, rows_visible: Array) -> Array:
        keys = gather_index_keys(pool, layer, pages[None], *paging, q.dtype)[0]

        def some_rows(n: int, block_q: Array, block_w: Array, block_visible: Array) -> Array:
            chosen = choose(index_scores(block_q, block_w, keys[:n]), block_visible, k)
            return jnp.pad(chosen, ((0, 0), (0, context - n))) if as_mask else chosen

        return map_seen_blocks(
            some_rows, int(per_row * share), context, rows_visible, request_q, request_w, rows_visible
        )

    bytes_each = max(context * width * q.dtype.itemsize, min(rows * per_row, workspace))
    return each_request(one_request, int(bytes_each * share), q, head_weights, page_table, visible)


def _select_blocks(
    q: Array,
    head_weights: Array,
    pool: Array,
    layer: Array,
    page_table: Array,
    visible: Array,
    *,
    k: int,
    paging: Paging,
    as_mask: bool,
    workspace: int,
    interpret: bool,
) -> Array:
    """By kernels: requests are scored and searched together, or rows of one request at a time."""
    backend: Backend = "interpret" if interpret else "triton"
    requests, rows = visible.shape
    context = page_table.shape[1] * paging.page_tokens
    choose = select_mask if as_mask else partial(select_positions, backend=backend)
    # float32 scores, and the numbers of the same size that `select_mask` makes of them.
    per_row = context * (8 if as_mask else 4)

    def together(block_q: Array, block_w: Array, pages: Array, seen: Array) -> Array:
        scores = paged_index_scores(block_q, block_w, pool, layer, pages, seen, *paging, backend=backend)
        return choose(scores.reshape(-1, context), seen.reshape(-1), k).reshape(*seen.shape, -1)

    def one_request(request_q: Array, request_w: Array, pages: Array, seen: Array) -> Array:
        def some_rows(*block: Array) -> Array:
            block_q, block_w, block_seen = (part[None] for part in block)
            return together(block_q, block_w, pages[None], block_seen)[0]

        return map_row_blocks(some_rows, per_row, request_q, request_w, seen, workspace=workspace)

    if rows * per_row <= workspace:
        return map_row_blocks(
            together, rows * per_row, q, head_weights, page_table, visible, workspace=workspace
        )
    if requests == 1:
        return one_request(q[0], head_weights[0], page_table[0], visible[0])[None]
    return jax.lax.map(lambda parts: one_request(*parts), (q, head_weights, page_table, visible))
