"""Copies of pages within the pools, for a sequence that goes on writing where another's prefix ends."""

from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int, Shaped

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import Pools, pool_specs

COPIES_AT_ONCE = 8
"""Pairs that one run of the program takes; the null page onto itself fills it up."""


def page_copier(mesh: Mesh, layout: Layout) -> Callable[[Pools, Any], Pools]:
    """A program of (pools, pairs [8, 2] int32 of source and target page) that copies them in order, in place."""

    def on_device(pools: Pools, pairs: Int[Array, "n 2"]) -> Pools:
        pages = pools.ckv.shape[1] // layout.block_size
        return Pools(*(_copied(pool, pairs, pool.shape[1] // pages) for pool in pools))

    specs = pool_specs(layout)
    program = jax.shard_map(on_device, mesh=mesh, in_specs=(specs, P()), out_specs=specs, check_vma=False)
    return jax.jit(program, donate_argnums=0)


def _copied(
    pool: Shaped[Array, "layers slots width"], pairs: Int[Array, "n 2"], rows: int
) -> Shaped[Array, "layers slots width"]:
    """rows: of a page, along the second axis."""

    def one(at: Array, pool: Array) -> Array:
        page = jax.lax.dynamic_slice_in_dim(pool, pairs[at, 0] * rows, rows, axis=1)
        return jax.lax.dynamic_update_slice_in_dim(pool, page, pairs[at, 1] * rows, axis=1)

    return jax.lax.fori_loop(0, pairs.shape[0], one, pool)
