"""Choosing from a vocabulary that is split over all tensor-parallel ranks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from glm_dcp_jax.parallel.mesh import TENSOR_AXES


def highest(own: Float[Array, "M v"], vocab_size: int) -> Int[Array, " M"]:
    """The token of each row's highest logit, the lowest of equal ones; NaN counts as -inf. Runs inside `shard_map`.

    own: float32 logits of this rank's part of the vocabulary, with padding behind vocab_size. Only each rank's best
    travels.
    """
    first = jax.lax.axis_index(TENSOR_AXES) * own.shape[1]
    real = first + jnp.arange(own.shape[1]) < vocab_size
    own = jnp.where(real & ~jnp.isnan(own), own, -jnp.inf)
    token = first + jnp.argmax(own, axis=1).astype(jnp.int32)
    best = jax.lax.bitcast_convert_type(jnp.max(own, axis=1), jnp.int32)
    bests, tokens = jnp.unstack(jax.lax.all_gather(jnp.stack([best, token]), TENSOR_AXES), axis=1)
    winner = jnp.argmax(jax.lax.bitcast_convert_type(bests, jnp.float32), axis=0)
    return jnp.take_along_axis(tokens, winner[None], axis=0)[0]
