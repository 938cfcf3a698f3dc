"""Packing and unpacking at GLM-5.2's sizes, compiled for GPUs that are not here: no pool is copied."""

import pytest

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import pool_shapes
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ParallelConfig
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.transfer.packing import PARTS, Caches

LAYERS, FULL_LAYERS, PAGES, ROWS = 78, 21, 512, 1024
RECORDS = {
    name: RecordFormat.sized(name, 512, 64, 128) for name in ("bfloat16", "fp8_ds_mla", "nvfp4_ds_mla")
}


@pytest.fixture(scope="module", params=[("h200", 8, 8, 1), ("rtx_pro_6000", 4, 4, 2)], ids=str)
def mesh_and_layout(request, absent_gpus):
    gpu, tp, dcp, shards = request.param
    mesh = make_mesh(ParallelConfig(tp, dcp), absent_gpus(gpu, tp))
    return mesh, Layout(64, dcp, 1, shards)


@pytest.mark.parametrize("name", RECORDS)
def test_nothing_but_the_rows_is_moved(mesh_and_layout, name):
    mesh, layout = mesh_and_layout
    half = pool_shapes(mesh, LAYERS // 2, FULL_LAYERS // 2, layout, RECORDS[name], PAGES)
    mtp = pool_shapes(mesh, 1, 1, layout.mtp_layout, RECORDS[name], PAGES)
    caches = Caches(mesh, layout, RECORDS[name], (half, half), mtp)
    for part in PARTS:
        rows = ROWS * caches.row_bytes(part)
        pools = caches.pools_of(part, caches.segments, mtp)
        held = sum(
            pool.sharding.shard_shape(pool.shape)[1] * pool.shape[0] * pool.shape[2] * pool.dtype.itemsize
            for pool in pools
        )
        packed = caches.pack(part, ROWS).memory_analysis()
        assert packed.output_size_in_bytes < 1.01 * rows + 4096
        assert packed.temp_size_in_bytes < 3 * rows, f"{part}: {packed.temp_size_in_bytes:,} for {rows:,}"
        unpacked = caches.unpack(part, ROWS).memory_analysis()
        assert unpacked.alias_size_in_bytes >= held, "a donated pool is not written in place"
        assert unpacked.temp_size_in_bytes < 3 * rows, f"{part}: {unpacked.temp_size_in_bytes:,} for {rows:,}"
