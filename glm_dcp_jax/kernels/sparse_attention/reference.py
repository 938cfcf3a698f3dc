"""Sparse MLA attention in plain JAX."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.softmax import masked_softmax


def attend_gathered(
    q: Float[Array, "T H CR"],
    records: Float[Array, "T K CR"],
    valid: Bool[Array, "T K"],
    latent_width: int,
    scale: float,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Attention of absorbed queries over each row's records, whose first `latent_width` columns are also the values.

    Returns the normalised output (float32) and the natural-log LSE (float32). Invalid records may hold anything, NaN
    included. A row without valid records gets output 0 and LSE -inf.
    """
    records = jnp.where(valid[:, :, None], records, 0)
    # Records come first in one product and whole in the other: XLA:CPU would copy them transposed, or sliced.
    scores = jnp.einsum("tkd,thd->tkh", records, q, preferred_element_type=jnp.float32) * scale
    probabilities, lse = masked_softmax(scores.swapaxes(1, 2), valid[:, None, :])
    out = jnp.einsum(
        "thk,tkd->thd", probabilities.astype(records.dtype), records, preferred_element_type=jnp.float32
    )
    return out[:, :, :latent_width], lse


def sparse_attention(
    q: Float[Array, "T H CR"],
    pool: Shaped[Array, "planes slots width"],
    plane: Int[Array, ""],
    slots: Int[Array, "T K"],
    record: RecordFormat,
    scale: float,
    outer_scale: Float[Array, ""] | None = None,
    current: Shaped[Array, "T S width"] | None = None,
    current_valid: Bool[Array, "T S"] | None = None,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """See the op."""
    records, valid = pool[plane, jnp.maximum(slots, 0)], slots >= 0
    if current is not None and current_valid is not None:
        records = jnp.concatenate([records, current], axis=1)
        valid = jnp.concatenate([valid, current_valid], axis=1)
    decoded = record.decode(records, q.dtype, outer_scale)
    return attend_gathered(q, decoded, valid, record.latent_width, scale)
