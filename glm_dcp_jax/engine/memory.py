"""How many pages the cache gets, from flags or from what the device has left."""

import logging

from jax.sharding import Mesh

from glm_dcp_jax.cache.capacity import GIB, page_bytes, pages_in
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ConfigError, EngineConfig, ModelConfig
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES

_log = logging.getLogger(__name__)

CPU_DEFAULT_BYTES = 256 * 2**20


def number_of_pages(
    config: EngineConfig, model: ModelConfig, layout: Layout, record: RecordFormat, mesh: Mesh
) -> int:
    """Pages of each pool, null page included; called when the weights are loaded.

    num_gpu_blocks_override counts usable pages; kv_cache_memory_bytes is per device; else what gpu_memory_utilization
    leaves of every GPU beside weights and step workspace. Raises ConfigError when that is too little.
    """
    cache = config.cache
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override + 1
    if cache.kv_cache_memory_bytes is not None:
        return pages_in(cache.kv_cache_memory_bytes, model, layout, record)
    if mesh.devices.flat[0].platform == "cpu":
        # An unset cache on the CPU holds at least one page of any geometry.
        return max(2, CPU_DEFAULT_BYTES // page_bytes(model, layout, record))
    available = min(_available(device, config) for device in mesh.local_devices)
    return pages_in(available, model, layout, record)


def _available(device: object, config: EngineConfig) -> int:
    stats = device.memory_stats()  # type: ignore[attr-defined]
    total, used = stats["bytes_limit"], stats["bytes_in_use"]
    budget = int(total * config.cache.gpu_memory_utilization) - used - _workspace(config)
    if budget <= 0:
        raise ConfigError(
            f"{device}: weights take {used / GIB:.2f} GiB and steps up to {_workspace(config) / GIB:.2f} GiB, which "
            f"leaves nothing of {config.cache.gpu_memory_utilization:.0%} of {total / GIB:.2f} GiB for the cache; "
            "raise --tensor-parallel-size or --gpu-memory-utilization"
        )
    return budget


def _workspace(config: EngineConfig) -> int:
    """What a step may need beside weights and pools: a few bounded row blocks of scores."""
    return 4 * WORKSPACE_BYTES
