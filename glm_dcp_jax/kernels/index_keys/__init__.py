"""Index keys in their pools: write at slots, gather by page.

Float keys lie in [full, slots, D]. Quantised ones are planar: [full, blocks, block_size * (D + 4)] bytes, a block being
its block_size keys as E4M3 codes, then their float32 scales; slot s is key s % block_size of block s // block_size.
"""

from functools import partial

import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.dispatch import Backend, dispatch
from glm_dcp_jax.kernels.index_keys import reference, triton
from glm_dcp_jax.kernels.index_keys.reference import gather_index_keys

__all__ = ["gather_index_keys", "write_index_keys"]


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

    layer: the Full layer's number in the pool; may be traced. A slot below 0 or past the pool's end is skipped, and
    none comes twice. Writes into the given pool when it is donated.
    """
    return dispatch(
        backend,
        partial(reference.write_index_keys, index=index, block_size=block_size),
        partial(triton.write_index_keys, index=index, block_size=block_size),
        pool,
        jnp.asarray(layer, jnp.int32),
        slots,
        keys,
    )
