"""Record movement in plain JAX. Pools are indexed by (layer, slot) at once, so that no layer is sliced out."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from glm_dcp_jax.cache.records import RecordFormat


def gather_pages(
    pool: Shaped[Array, "layers slots width"],
    layer: Int[Array, ""],
    pages: Int[Array, "N P"],
    page_size: int,
) -> Shaped[Array, "N P*page_size width"]:
    """See the op."""
    layers, slots, width = pool.shape
    paged = pool.reshape(layers, slots // page_size, page_size, width)
    found = paged[layer, jnp.maximum(pages, 0)]
    return found.reshape(pages.shape[0], pages.shape[1] * page_size, width)


def pack_records(
    pool: Shaped[Array, "layers slots width"], planes: Int[Array, " P"], slots: Int[Array, " N"]
) -> Shaped[Array, "P N width"]:
    """See the op."""
    if pool.size == 0:
        return jnp.zeros((planes.size, slots.size, pool.shape[2]), pool.dtype)
    kept = (slots >= 0) & (slots < pool.shape[1])
    found = pool[planes[:, None], jnp.where(kept, slots, 0)[None, :]]
    return jnp.where(kept[None, :, None], found, 0)


def unpack_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    packed: Shaped[Array, "P N width"],
) -> Shaped[Array, "layers slots width"]:
    """See the op.

    One write of every layer at the end of a step, after every read: then XLA updates the donated pool in place. A write
    between reads that it cannot order makes it copy the whole pool.
    """
    return pool.at[planes[:, None], _past_the_end(slots, pool)[None, :]].set(packed, mode="drop")


def write_records(
    pool: Shaped[Array, "layers slots width"],
    planes: Int[Array, " P"],
    slots: Int[Array, " N"],
    latent: Float[Array, "P N C"],
    rope_key: Float[Array, "P N R"],
    *outer_scales: Float[Array, " P"],
    record: RecordFormat,
) -> Shaped[Array, "layers slots width"]:
    """See the op."""
    scale = outer_scales[0][:, None, None] if outer_scales else None
    return unpack_records(pool, planes, slots, record.encode(latent, rope_key, scale))


def _past_the_end(slots: Int[Array, " T"], pool: Array) -> Int[Array, " T"]:
    """mode="drop" ignores indices past the end, while -1 would wrap around to the last slot."""
    return jnp.where(slots < 0, pool.shape[1], slots)
