"""The device arrays of the cache, as one pytree that steps take by donation and give back."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat


class Pools(NamedTuple):
    """ckv: [layers, W * pages * block_size, width], slots sharded on "dcp" (each rank: its own pages, null page first).

    index_keys: [full layers, ...] as IndexKeyFormat.pool_shape says. Replicated, a page being in position order; in S
    parts, the second axis is sharded on "dcp": W of them, of which those of ranks r and r + S hold the same keys.
    In the same shape it describes the pools by PartitionSpecs or ShapeDtypeStructs, hence the open types.
    """

    ckv: Any
    index_keys: Any


def pool_specs(layout: Layout) -> Pools:
    """How the pools lie on the mesh, as PartitionSpecs."""
    return Pools(ckv=P(None, "dcp"), index_keys=P() if layout.index_shards == 1 else P(None, "dcp"))


def pool_shapes(
    mesh: Mesh, layers: int, full_layers: int, layout: Layout, record: RecordFormat, num_pages: int
) -> Pools:
    """Pools of so many layers, those with an indexer among them, and pages, the null page included.

    As jax.ShapeDtypeStructs of global arrays, with shardings.
    """
    copies = 1 if layout.index_shards == 1 else layout.world
    index_slots = num_pages * layout.index_layout.block_size * copies
    index_shape = record.index.pool_shape(full_layers, index_slots, layout.block_size)
    ckv_shape = (layers, num_pages * layout.virtual_block, record.width)
    specs = pool_specs(layout)

    def place(shape: tuple[int, ...], dtype: Any, spec: P) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    return Pools(
        ckv=place(ckv_shape, record.dtype, specs.ckv),
        index_keys=place(index_shape, record.index.dtype, specs.index_keys),
    )


def make_pools(shapes: Pools) -> Pools:
    """Zeroed pools of these shapes, created already sharded."""
    build = jax.jit(
        lambda: Pools(*(jnp.zeros(leaf.shape, leaf.dtype) for leaf in shapes)),
        out_shardings=Pools(*(leaf.sharding for leaf in shapes)),
    )
    return build()
