"""Masked MLA attention in plain JAX, with the latent kept (absorbed) or expanded to heads."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from glm_dcp_jax.kernels.row_blocks import map_row_blocks
from glm_dcp_jax.kernels.seen_blocks import map_seen_blocks
from glm_dcp_jax.kernels.softmax import masked_softmax

_LOWEST = -1e30
"""Stands in for the maximum of a row that sees nothing, so that its exponentials are 0 and not NaN."""


def absorbed_attention(
    q: Float[Array, "S H CR"],
    context: Float[Array, "L CR"],
    mask: Bool[Array, "S L"],
    latent_width: int,
    scale: float,
) -> tuple[Float[Array, "S H C"], Float[Array, "S H"]]:
    """Attention of absorbed queries over a shared context; values are its first `latent_width` columns.

    Returns the normalised output and natural-log LSE, both float32; rows that see nothing give 0 and -inf. Columns
    that no row may see must be finite.
    """

    def attend(block_q: Array, block_mask: Array) -> tuple[Array, Array]:
        scores = jnp.einsum("shd,ld->shl", block_q, context, preferred_element_type=jnp.float32) * scale
        probabilities, lse = masked_softmax(scores, block_mask[:, None, :])
        values = context[:, :latent_width]
        out = jnp.einsum(
            "shl,lc->shc", probabilities.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return out, lse

    return map_row_blocks(attend, q.shape[1] * context.shape[0] * 4, q, mask)


def expanded_attention(
    q_nope: Float[Array, "S H N"],
    q_rope: Float[Array, "S H R"],
    context: Float[Array, "L CR"],
    key_expansion: Float[Array, "H N C"],
    value_expansion: Float[Array, "H v C"],
    mask: Bool[Array, "S L"],
    scale: float,
) -> Float[Array, "S H v"]:
    """The same attention with keys and values expanded from the latent once, for prefill: fewer FLOPs per score.

    Returns float32 [S, H, v]; rows that see nothing give 0.
    """
    width = key_expansion.shape[2]
    latent, rope_keys = context[:, :width], context[:, width:]
    columns = context.shape[0]
    ones = jnp.ones((columns, 1), context.dtype)
    one_past_last = jnp.max(jnp.where(mask, jnp.arange(1, columns + 1), 0), axis=1)

    def one_head(head: tuple[Array, Array, Array, Array]) -> Array:
        nope, rope, expand_key, expand_value = head
        keys = jnp.concatenate([latent @ expand_key.T, rope_keys], axis=1)
        # A column of ones makes the product with the values sum the probabilities as well.
        values = jnp.concatenate([latent @ expand_value.T, ones], axis=1)

        def rows(n: int, q: Array, seen: Array) -> Array:
            scores = jnp.einsum("sd,ld->sl", q, keys[:n], preferred_element_type=jnp.float32) * scale
            scores = jnp.where(seen[:, :n], scores, -jnp.inf)
            top = jnp.maximum(jnp.max(scores, axis=1, keepdims=True), _LOWEST)
            weights = jnp.exp(scores - top).astype(values.dtype)
            return jnp.einsum("sl,lv->sv", weights, values[:n], preferred_element_type=jnp.float32)

        q = jnp.concatenate([nope, rope], axis=1)
        summed = map_seen_blocks(rows, 4 * columns, columns, one_past_last, q, mask)
        total = summed[:, -1:]
        return summed[:, :-1] / jnp.where(total > 0, total, 1.0)

    # Head by head, a block of scores stays in the cache of a CPU: 3 times faster there than all heads at once.
    heads = (q_nope.swapaxes(0, 1), q_rope.swapaxes(0, 1), key_expansion, value_expansion)
    return jax.lax.map(one_head, heads).swapaxes(0, 1)
