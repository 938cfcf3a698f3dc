"""Index keys in plain JAX."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Shaped, UInt8

from glm_dcp_jax.cache import codecs
from glm_dcp_jax.cache.records import IndexKeyFormat


def write_index_keys(
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""],
    slots: Int[Array, " T"],
    keys: Float[Array, "T D"],
    index: IndexKeyFormat,
    block_size: int,
) -> Shaped[Array, "full *pool"]:
    """See the op."""
    if not index.quantised:
        past_the_end = jnp.where(slots < 0, pool.shape[1], slots)
        return pool.at[layer, past_the_end].set(keys.astype(pool.dtype), mode="drop")
    codes, scales = codecs.encode_index_key(keys)
    block, offset = slots // block_size, slots % block_size
    pool = _put(pool, layer, block, offset * index.width, codes)
    return _put(pool, layer, block, block_size * index.width + 4 * offset, codecs.to_bytes(scales))


def gather_index_keys(
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""],
    pages: Int[Array, "N P"],
    index: IndexKeyFormat,
    page_tokens: int,
    block_size: int,
    dtype: DTypeLike,
) -> Float[Array, "N P*page_tokens D"]:
    """See the op."""
    requests, count = pages.shape
    blocks = page_tokens // block_size
    page_width = blocks * pool.shape[2] if index.quantised else page_tokens * index.width
    found = pool.reshape(pool.shape[0], -1, page_width)[layer, jnp.maximum(pages, 0)]
    if not index.quantised:
        return found.reshape(requests, count * page_tokens, index.width).astype(dtype)
    planar = found.reshape(requests, count, blocks, pool.shape[2])
    codes, scales = jnp.split(planar, [block_size * index.width], axis=-1)
    values = codecs.decode_e4m3(codes).reshape(*planar.shape[:3], block_size, index.width)
    keys = values * codecs.from_bytes(scales, jnp.float32)[..., None]
    return keys.reshape(requests, count * page_tokens, index.width).astype(dtype)


def _put(
    pool: UInt8[Array, "full blocks bytes"],
    layer: Int[Array, ""],
    block: Int[Array, " T"],
    start: Int[Array, " T"],
    raw: UInt8[Array, "T n"],
) -> UInt8[Array, "full blocks bytes"]:
    """Each row of raw at its bytes start .. start + n - 1 of its block.

    Blocks below 0, which `lax.scatter` does not wrap around as `.at` does, and blocks past the end are skipped.
    """
    dimensions = jax.lax.ScatterDimensionNumbers(
        update_window_dims=(1,), inserted_window_dims=(0, 1), scatter_dims_to_operand_dims=(0, 1, 2)
    )
    indices = jnp.stack([jnp.full_like(block, layer), block, start], axis=-1)
    return jax.lax.scatter(pool, indices, raw, dimensions, mode=jax.lax.GatherScatterMode.FILL_OR_DROP)


def pack_index_keys(
    pool: Shaped[Array, "full *pool"], slots: Int[Array, " N"], index: IndexKeyFormat, block_size: int
) -> Shaped[Array, "full N key"]:
    """See the op."""
    if not index.quantised:
        kept = (slots >= 0) & (slots < pool.shape[1])
        return jnp.where(kept[None, :, None], pool[:, jnp.where(kept, slots, 0)], 0)
    kept = (slots >= 0) & (slots < pool.shape[1] * block_size)
    block, at = jnp.divmod(jnp.where(kept, slots, 0), block_size)
    columns = _columns(at, index, block_size)
    return jnp.where(kept[None, :, None], pool[:, block[:, None], columns], 0)


def unpack_index_keys(
    pool: Shaped[Array, "full *pool"],
    slots: Int[Array, " N"],
    packed: Shaped[Array, "full N key"],
    index: IndexKeyFormat,
    block_size: int,
) -> Shaped[Array, "full *pool"]:
    """See the op."""
    if not index.quantised:
        past_the_end = jnp.where(slots < 0, pool.shape[1], slots)
        return pool.at[:, past_the_end].set(packed, mode="drop")
    block, at = jnp.divmod(slots, block_size)
    block = jnp.where(slots < 0, pool.shape[1], block)
    return pool.at[:, block[:, None], _columns(at, index, block_size)].set(packed, mode="drop")


def _columns(at: Int[Array, " N"], index: IndexKeyFormat, block_size: int) -> Int[Array, "N key"]:
    """The bytes of a block's keys number `at`: their codes, then their scales."""
    codes = at[:, None] * index.width + jnp.arange(index.width)
    scales = block_size * index.width + at[:, None] * 4 + jnp.arange(4)
    return jnp.concatenate([codes, scales], axis=1)
