"""Masked MLA attention in plain JAX, with the latent kept (absorbed) or expanded to heads."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from glm_dcp_jax.kernels.row_blocks import map_row_blocks
from glm_dcp_jax.kernels.softmax import masked_softmax


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
    keys = jnp.einsum("lc,hnc->hln", latent, key_expansion)
    values = jnp.einsum("lc,hvc->hlv", latent, value_expansion)
    q_nope, q_rope = q_nope.swapaxes(0, 1), q_rope.swapaxes(0, 1)

    def attend(nope: Array, rope: Array, block_mask: Array) -> Array:
        nope, rope = nope.swapaxes(0, 1), rope.swapaxes(0, 1)
        scores = jnp.einsum("hsn,hln->hsl", nope, keys, preferred_element_type=jnp.float32)
        scores += jnp.einsum("hsr,lr->hsl", rope, rope_keys, preferred_element_type=jnp.float32)
        probabilities, _ = masked_softmax(scores * scale, block_mask[None])
        out = jnp.einsum(
            "hsl,hlv->hsv", probabilities.astype(values.dtype), values, preferred_element_type=jnp.float32
        )
        return out.swapaxes(0, 1)

    heads = q_nope.shape[0]
    bytes_per_row = heads * context.shape[0] * 4
    return map_row_blocks(attend, bytes_per_row, q_nope.swapaxes(0, 1), q_rope.swapaxes(0, 1), mask)
