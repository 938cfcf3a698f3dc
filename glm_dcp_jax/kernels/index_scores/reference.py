"""Index scores in plain JAX."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.each_request import each_request
from glm_dcp_jax.kernels.index_keys import gather_index_keys
from glm_dcp_jax.kernels.topk.reference import sortable

_ROWS_AT_ONCE = 16
"""Up to this many rows, all heads are scored by one product; above, head by head, which needs 1/I of the memory."""


class Paging(NamedTuple):
    """How keys lie in the pool: their format, the tokens of a page of the page table, and of a block of the pool."""

    keys: IndexKeyFormat
    page_tokens: int
    block_size: int


def row_bytes(rows: int, heads: int, columns: int) -> int:
    """Workspace of one row when `rows` are scored together: float32 scores of all heads, or of one and their sum."""
    return 4 * columns * (heads if rows <= _ROWS_AT_ONCE else 4)


def index_scores(
    q: Float[Array, "S I D"], head_weights: Float[Array, "S I"], keys: Float[Array, "L D"]
) -> Float[Array, "S L"]:
    """score[s, t] = sum_i head_weights[s, i] * relu(q[s, i] . keys[t]), in float32.

    The factors I**-0.5 and D**-0.5 belong into `head_weights` (float32). -0.0 is returned as +0.0, because sorting
    tells them apart. Formula: the DeepSeek-V3.2 lightning indexer.
    """
    if q.shape[0] <= _ROWS_AT_ONCE:
        dots = jnp.einsum("sid,td->sit", q, keys, preferred_element_type=jnp.float32)
        scores = jnp.einsum("sit,si->st", jax.nn.relu(dots), head_weights)
    else:

        def add_head(total: Array, head: tuple[Array, Array]) -> tuple[Array, None]:
            head_q, weight = head
            dots = jnp.einsum("sd,td->st", head_q, keys, preferred_element_type=jnp.float32)
            return total + weight[:, None] * jax.nn.relu(dots), None

        zero = jnp.zeros((q.shape[0], keys.shape[0]), jnp.float32)
        scores, _ = jax.lax.scan(add_head, zero, (q.swapaxes(0, 1), head_weights.T))
    return jnp.where(scores == 0, 0.0, scores)


def paged_index_scores(
    q: Float[Array, "N S I D"],
    head_weights: Float[Array, "N S I"],
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""],
    page_table: Int[Array, "N P"],
    visible: Int[Array, "N S"],
    paging: Paging,
    group: int,
) -> tuple[Array, ...]:
    """See the op; scores, and maxima if group is not 0."""
    _, rows, heads, width = q.shape
    context = page_table.shape[1] * paging.page_tokens

    def one_request(request_q: Array, request_w: Array, pages: Array, seen: Array) -> tuple[Array, ...]:
        keys = gather_index_keys(pool, layer, pages[None], *paging, q.dtype)[0]
        return with_maxima(index_scores(request_q, request_w, keys), seen, group)

    bytes_each = max(context * width * q.dtype.itemsize, rows * row_bytes(rows, heads, context))
    return each_request(one_request, bytes_each, q, head_weights, page_table, visible)


def with_maxima(scores: Float[Array, "*rows L"], seen: Int[Array, "*rows"], group: int) -> tuple[Array, ...]:
    """Scores with -inf behind what is seen, and if group is not 0 the maxima of groups of what is."""
    visible = jnp.arange(scores.shape[-1]) < seen[..., None]
    shown = jnp.where(visible, scores, -jnp.inf)
    if not group:
        return (shown,)
    numbers = jnp.where(visible, sortable(scores), jnp.uint32(0))
    return shown, jnp.max(numbers.reshape(*seen.shape, -1, group), axis=-1, initial=jnp.uint32(0))
