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
    seen: Bool[Array, "T H K"] | None = None,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """Attention of absorbed queries over each row's records, whose first `latent_width` columns are also the values.

    seen: which of the valid records each head attends over, if not all.

    Returns the normalised output (float32) and the natural-log LSE (float32). Invalid records may hold anything, NaN
    included. A row without valid records gets output 0 and LSE -inf.
    """
    records = jnp.where(valid[:, :, None], records, 0)
    # Records come first in one product and whole in the other: XLA:CPU would copy them transposed, or sliced.
    scores = jnp.einsum("tkd,thd->tkh", records, q, preferred_element_type=jnp.float32) * scale
    mask = valid[:, None, :] if seen is None else valid[:, None, :] & seen
    probabilities, lse = masked_softmax(scores.swapaxes(1, 2), mask)
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
    sharers: int = 1,
    seen_by: Int[Array, "T K"] | None = None,
    outer_scale: Float[Array, ""] | None = None,
    current: Shaped[Array, "T S width"] | None = None,
    current_valid: Bool[Array, "T S"] | Int[Array, "T S"] | None = None,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """See the op."""
    records = pool[plane, jnp.maximum(slots, 0)]
    # Bit by bit which sharers see an entry; the only one sees all that is listed.
    bits = jnp.where(slots >= 0, 1 if seen_by is None else seen_by, 0)
    if current is not None and current_valid is not None:
        records = jnp.concatenate([records, current], axis=1)
        bits = jnp.concatenate([bits, current_valid.astype(jnp.int32)], axis=1)
    decoded = record.decode(records, q.dtype, outer_scale)
    seen = None
    if sharers > 1:
        by_sharer = (bits[:, None, :] >> jnp.arange(sharers)[None, :, None]) & 1 != 0
        seen = jnp.repeat(by_sharer, q.shape[1] // sharers, axis=1)
    return attend_gathered(q, decoded, bits != 0, record.latent_width, scale, seen)
