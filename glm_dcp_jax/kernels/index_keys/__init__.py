"""Index keys in their pools: write at slots, gather by page, pack and unpack at slots.

Float keys lie in [full, slots, D]. Quantised ones are planar: [full, blocks, block_size * (D + 4)] bytes, a block being
its block_size keys as E4M3 codes, then their float32 scales; slot s is key s % block_size of block s // block_size.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, DTypeLike, Float, Int, Shaped

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.fit import (
    check_axes,
    check_dtype,
    check_floats,
    check_index_pages,
    check_index_pool,
    int32,
)
from glm_dcp_jax.kernels.index_keys import reference, triton

__all__ = ["gather_index_keys", "pack_index_keys", "unpack_index_keys", "write_index_keys"]


def write_index_keys(
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""] | int,
    slots: Int[Array, " T"],
    keys: Float[Array, "T D"],
    index: IndexKeyFormat,
    block_size: int,
    backend: Backend = "auto",
) -> Shaped[Array, "full *pool"]:
    """The pool with a layer's new keys, encoded as the format says, at these slots.

    layer: the Full layer's number in the pool; may be traced, and must exist. A slot below 0 or past the pool's end is
    skipped, and none may come twice. Writes into the given pool when it is donated. Raises ValueError for arrays that
    do not fit together, and for byte-wise pools of 2 GiB or more.
    """
    layer, slots = int32("layer", layer), int32("slots", slots)
    check_index_pool(pool, index, block_size)
    sizes = {"D": (index.width, f"{index.kind} keys")}
    check_axes(sizes, layer=(layer, ""), slots=(slots, "T"), keys=(keys, "T D"))
    check_floats(keys=keys)
    return dispatch(
        backend,
        partial(reference.write_index_keys, index=index, block_size=block_size),
        partial(triton.write_index_keys, index=index, block_size=block_size),
        pool,
        layer,
        slots,
        keys,
    )


def gather_index_keys(
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""] | int,
    pages: Int[Array, "N P"],
    index: IndexKeyFormat,
    page_tokens: int,
    block_size: int,
    dtype: DTypeLike,
) -> Float[Array, "N P*page_tokens D"]:
    """Decoded keys of one layer's whole pages, in page-table order, which is the order of positions; plain JAX.

    A page is page_tokens / block_size consecutive blocks. A negative page reads page 0; others must exist, as must the
    layer. The products of E4M3 codes and powers of two are exact in bfloat16 as in float32. Raises ValueError for
    arrays that do not fit together.
    """
    layer, pages = int32("layer", layer), int32("pages", pages)
    check_index_pages(pool, index, page_tokens, block_size)
    check_axes({}, layer=(layer, ""), pages=(pages, "N P"))
    return reference.gather_index_keys(jnp.asarray(pool), layer, pages, index, page_tokens, block_size, dtype)


def pack_index_keys(
    pool: Shaped[Array, "full *pool"], slots: Int[Array, " N"], index: IndexKeyFormat, block_size: int
) -> Shaped[Array, "full N key"]:
    """Every layer's keys at the same slots, in one contiguous buffer; plain JAX on every platform.

    Of float keys `key` is D elements; of quantised ones D + 4 bytes, a key's codes and its scale. A slot below 0 or
    past the pool's end packs as zeros. Raises ValueError for arrays that do not fit together.
    """
    slots = int32("slots", slots)
    check_index_pool(pool, index, block_size)
    check_axes({}, slots=(slots, "N"))
    return reference.pack_index_keys(jnp.asarray(pool), slots, index, block_size)


def unpack_index_keys(
    pool: Shaped[Array, "full *pool"],
    slots: Int[Array, " N"],
    packed: Shaped[Array, "full N key"],
    index: IndexKeyFormat,
    block_size: int,
) -> Shaped[Array, "full *pool"]:
    """The pool with packed keys at these slots of all layers: the inverse of `pack_index_keys`; plain JAX.

    A slot below 0 or past the pool's end is skipped, and none may come twice. Writes into the given pool when it is
    donated. Raises ValueError for arrays that do not fit together.
    """
    slots = int32("slots", slots)
    check_index_pool(pool, index, block_size)
    width = index.key_bytes if index.quantised else index.width
    sizes = {"F": (pool.shape[0], "layers of the pool"), "K": (width, f"{index.kind} keys")}
    check_axes(sizes, slots=(slots, "N"), packed=(packed, "F N K"))
    check_dtype(pool.dtype, "as the pool", packed=packed)
    return reference.unpack_index_keys(jnp.asarray(pool), slots, packed, index, block_size)
