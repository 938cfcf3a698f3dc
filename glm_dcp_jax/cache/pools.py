"""The device arrays of the cache, as one pytree that steps take by donation and give back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ModelConfig


class Pools(NamedTuple):
    """ckv: [layers, W * pages * block_size, width], slots sharded on "dcp" (each rank: its own pages, null page first).

    index_keys: [full layers, ...] as IndexKeyFormat.pool_shape says, replicated; a page is in position order.
    In the same shape it describes the pools by PartitionSpecs or ShapeDtypeStructs, hence the open types.
    """

    ckv: Any
    index_keys: Any


POOL_SPECS = Pools(ckv=P(None, "dcp", None), index_keys=P())
"""How the pools lie on the mesh."""


def pool_shapes(model: ModelConfig, layout: Layout, record: RecordFormat, num_pages: int) -> Pools:
    """Global shapes and dtypes (jax.ShapeDtypeStruct) of pools with `num_pages` pages, the null page included."""
    slots = num_pages * layout.virtual_block
    return Pools(
        ckv=jax.ShapeDtypeStruct((model.num_hidden_layers, slots, record.width), record.dtype),
        index_keys=jax.ShapeDtypeStruct(
            record.index.pool_shape(model.num_full_layers, slots, layout.block_size), record.index.dtype
        ),
    )


def placed(mesh: Mesh, shapes: Pools) -> Pools:
    """The shapes with their shardings on a mesh: what ahead-of-time compilation needs."""
    return Pools(
        *(
            jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(mesh, spec))
            for leaf, spec in zip(shapes, POOL_SPECS, strict=True)
        )
    )


def make_pools(mesh: Mesh, shapes: Pools) -> Pools:
    """Zeroed pools, created already sharded."""
    shardings = Pools(*(NamedSharding(mesh, spec) for spec in POOL_SPECS))
    build = jax.jit(
        lambda: Pools(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes)), out_shardings=shardings
    )
    return build()
