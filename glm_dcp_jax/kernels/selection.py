"""The selection of a Full layer: index scores and top-k, in row blocks whose scores fit a workspace."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.each_request import each_request
from glm_dcp_jax.kernels.index_keys import gather_index_keys
from glm_dcp_jax.kernels.index_scores import (
    index_scores,
    paged_index_scores,
    paged_scores_and_maxima,
    row_bytes,
)
from glm_dcp_jax.kernels.index_scores.reference import Paging
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES, map_row_blocks
from glm_dcp_jax.kernels.seen_blocks import map_seen_blocks
from glm_dcp_jax.kernels.topk import maxima_group, select_mask, select_positions


class _Choice(NamedTuple):
    """What is chosen: each row's k best, as positions, as a mask, or scored: as scores and positions."""

    form: Literal["positions", "mask", "scored"]
    k: int
    paging: Paging
    workspace: int

    def of(
        self,
        scores: Float[Array, "T L"],
        visible: Int[Array, " T"],
        backend: Backend,
        maxima: UInt32[Array, "T M"] | None = None,
    ) -> Any:
        """The choice from each row's first `visible` columns; maxima: those of `select_positions`."""
        with jax.named_scope("top_k"):
            if self.form == "mask":
                return select_mask(scores, visible, self.k)
            positions = select_positions(scores, visible, self.k, backend, maxima)
            if self.form == "positions":
                return positions
            return jnp.take_along_axis(scores, jnp.maximum(positions, 0), axis=1), positions


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
    choice = _Choice("mask" if as_mask else "positions", k, paging, workspace)
    plane = jnp.asarray(layer, jnp.int32)
    return _select(choice, backend, q, head_weights, pool, plane, page_table, visible)


def select_scored(
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
    workspace: int = WORKSPACE_BYTES,
    backend: Backend = "auto",
) -> tuple[Float[Array, "N S k"], Int[Array, "N S k"]]:
    """The positions of `select_paged`, after their float32 scores; those of position -1 are anything."""
    choice = _Choice("scored", k, Paging(index, page_tokens, block_size), workspace)
    plane = jnp.asarray(layer, jnp.int32)
    return _select(choice, backend, q, head_weights, pool, plane, page_table, visible)


def _select(choice: _Choice, backend: Backend, *arrays: Array) -> Any:
    prefixes, blocks = partial(_select_prefixes, choice), partial(_select_blocks, choice)
    return dispatch(backend, prefixes, blocks, *arrays)


def _select_prefixes(
    choice: _Choice,
    q: Array,
    head_weights: Array,
    pool: Array,
    layer: Array,
    page_table: Array,
    visible: Array,
) -> Any:
    """In plain JAX: a request's keys are gathered once, and blocks of rows need only the columns that they see."""
    paging, workspace = choice.paging, choice.workspace
    _, rows, heads, width = q.shape
    context = page_table.shape[1] * paging.page_tokens
    per_row = row_bytes(rows, heads, context)
    # The blocks below are cut for WORKSPACE_BYTES: what is given is what a row takes of that.
    share = WORKSPACE_BYTES / workspace

    def one_request(request_q: Array, request_w: Array, pages: Array, rows_visible: Array) -> Any:
        with jax.named_scope("index_scores"):
            keys = gather_index_keys(pool, layer, pages[None], *paging, q.dtype)[0]

        def some_rows(n: int, block_q: Array, block_w: Array, block_visible: Array) -> Any:
            with jax.named_scope("index_scores"):
                scores = index_scores(block_q, block_w, keys[:n])
            chosen = choice.of(scores, block_visible, "reference")
            return jnp.pad(chosen, ((0, 0), (0, context - n))) if choice.form == "mask" else chosen

        return map_seen_blocks(
            some_rows, int(per_row * share), context, rows_visible, request_q, request_w, rows_visible
        )

    bytes_each = max(context * width * q.dtype.itemsize, min(rows * per_row, workspace))
    return each_request(one_request, int(bytes_each * share), q, head_weights, page_table, visible)


def _select_blocks(
    choice: _Choice,
    q: Array,
    head_weights: Array,
    pool: Array,
    layer: Array,
    page_table: Array,
    visible: Array,
    *,
    interpret: bool,
) -> Any:
    """By kernels: requests are scored and searched together, or rows of one request at a time."""
    paging, workspace = choice.paging, choice.workspace
    backend: Backend = "interpret" if interpret else "triton"
    requests, rows = visible.shape
    context = page_table.shape[1] * paging.page_tokens
    # float32 scores, and the numbers of the same size that `select_mask` makes of them; maxima are an eighth.
    per_row = context * (8 if choice.form == "mask" else 4)

    group = 0 if choice.form == "mask" else maxima_group(context, choice.k)

    def together(block_q: Array, block_w: Array, pages: Array, seen: Array) -> Any:
        given = (block_q, block_w, pool, layer, pages, seen, *paging)
        maxima = None
        with jax.named_scope("index_scores"):
            if group:
                scores, maxima = paged_scores_and_maxima(*given, group, backend=backend)
                maxima = maxima.reshape(-1, context // group)
            else:
                scores = paged_index_scores(*given, backend=backend)
        chosen = choice.of(scores.reshape(-1, context), seen.reshape(-1), backend, maxima)
        return jax.tree.map(lambda part: part.reshape(*seen.shape, -1), chosen)

    def one_request(request_q: Array, request_w: Array, pages: Array, seen: Array) -> Any:
        def some_rows(*block: Array) -> Any:
            block_q, block_w, block_seen = (part[None] for part in block)
            chosen = together(block_q, block_w, pages[None], block_seen)
            return jax.tree.map(lambda part: part[0], chosen)

        return map_row_blocks(some_rows, per_row, request_q, request_w, seen, workspace=workspace)

    if rows * per_row <= workspace:
        return map_row_blocks(
            together, rows * per_row, q, head_weights, page_table, visible, workspace=workspace
        )
    if requests == 1:
        chosen = one_request(q[0], head_weights[0], page_table[0], visible[0])
        return jax.tree.map(lambda part: part[None], chosen)
    return jax.lax.map(lambda parts: one_request(*parts), (q, head_weights, page_table, visible))
