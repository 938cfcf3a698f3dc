"""Softmax pieces that stay finite when a row sees nothing."""

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float


def masked_softmax(
    scores: Float[Array, "*rows K"], valid: Bool[Array, "*rows K"]
) -> tuple[Float[Array, "*rows K"], Float[Array, "*rows"]]:
    """Probabilities over the valid entries and the natural log of the sum of exponentials, in float32.

    A row without valid entries gets probabilities 0 and lse -inf, the neutral element of a merge.
    """
    scores = jnp.where(valid, scores, -jnp.inf)
    top = jnp.max(scores, axis=-1, keepdims=True)
    top = jnp.where(jnp.isfinite(top), top, 0.0)
    exponentials = jnp.exp(scores - top)
    total = jnp.sum(exponentials, axis=-1, keepdims=True)
    probabilities = exponentials / jnp.where(total > 0, total, 1.0)
    return probabilities, (top + jnp.log(total))[..., 0]
