"""Index scores in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_ROWS_AT_ONCE = 16
"""Up to this many rows, all heads are scored by one product; above, head by head, which needs 1/I of the memory."""


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
