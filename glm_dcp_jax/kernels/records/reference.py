"""Record movement in plain JAX. Pools are indexed by (layer, slot) in one gather, so that no layer is sliced out."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def gather_records(
    pool: Float[Array, "layers slots width"], layer: Int[Array, ""] | int, slots: Int[Array, "*rows"]
) -> Float[Array, "*rows width"]:
    """One layer's records at `slots`. A negative slot reads the null page's first record: mask it afterwards."""
    return pool[layer, jnp.maximum(slots, 0)]


def gather_pages(
    pool: Float[Array, "layers slots width"],
    layer: Int[Array, ""] | int,
    pages: Int[Array, "N P"],
    page_size: int,
) -> Float[Array, "N P*page_size width"]:
    """One layer's whole pages, `page_size` slots each, in page-table order."""
    layers, slots, width = pool.shape
    paged = pool.reshape(layers, slots // page_size, page_size, width)
    found = paged[layer, jnp.maximum(pages, 0)]
    return found.reshape(pages.shape[0], pages.shape[1] * page_size, width)


def write_records(
    pool: Float[Array, "layers slots width"],
    layer: Int[Array, ""] | int,
    slots: Int[Array, " T"],
    records: Float[Array, "T width"],
) -> Float[Array, "layers slots width"]:
    """Write one layer's records at `slots`; negative slots are skipped."""
    return pool.at[layer, _past_the_end(slots, pool)].set(records, mode="drop")


def commit_records(
    pool: Float[Array, "layers slots width"],
    slots: Int[Array, " T"],
    records: Float[Array, "layers T width"],
) -> Float[Array, "layers slots width"]:
    """Write every layer's records of a step at `slots`; negative slots are skipped.

    One write at the end of a step, after every read: then XLA updates the donated pool in place. A write between reads
    that it cannot order makes it copy the whole pool.
    """
    return pool.at[:, _past_the_end(slots, pool)].set(records, mode="drop")


def _past_the_end(slots: Int[Array, " T"], pool: Array) -> Int[Array, " T"]:
    """mode="drop" ignores indices past the end, while -1 would wrap around to the last slot."""
    return jnp.where(slots < 0, pool.shape[1], slots)
