"""How many pages the cache gets, from flags or from what the devices have left."""

from collections.abc import Callable, Iterable, Mapping

from jax.sharding import Mesh

from glm_dcp_jax import environment
from glm_dcp_jax.cache.capacity import GIB, page_bytes, pages_in
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import CacheConfig, ConfigError, ModelConfig, ParallelConfig

CPU_DEFAULT_BYTES = 256 * 2**20

Workspace = Callable[[int], int]
"""Bytes per device that the largest steps need beside weights and a cache of so many pages."""


def pages_by_flags(
    cache: CacheConfig,
    model: ModelConfig,
    layout: Layout,
    record: RecordFormat,
    on_cpu: bool,
    mtp_layers: int,
) -> int | None:
    """Pages of each pool, null page included, where they are known before the weights are loaded; else None.

    num_gpu_blocks_override counts usable pages; kv_cache_memory_bytes is per device. On the CPU there is a default.
    Raises ConfigError when that is too little.
    """
    if cache.num_gpu_blocks_override is not None:
        return cache.num_gpu_blocks_override + 1
    if cache.kv_cache_memory_bytes is not None:
        return pages_in(cache.kv_cache_memory_bytes, model, layout, record, mtp_layers)
    if on_cpu:
        # An unset cache on the CPU holds at least one page of any geometry.
        return max(2, CPU_DEFAULT_BYTES // page_bytes(model, layout, record, mtp_layers))
    return None


def number_of_pages(
    cache: CacheConfig,
    model: ModelConfig,
    layout: Layout,
    record: RecordFormat,
    mesh: Mesh,
    workspace: Workspace,
    mtp_layers: int = 0,
) -> int:
    """Pages of each pool, null page included; called when the weights are loaded.

    By flags, as pages_by_flags says; else what gpu_memory_utilization leaves of every GPU beside weights and the steps'
    workspace. mtp_layers: those that draft, with caches in the same pages. Raises ConfigError when that is too little.
    """
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    pages = pages_by_flags(cache, model, layout, record, on_cpu, mtp_layers)
    if pages is not None:
        _require_room(pages * page_bytes(model, layout, record, mtp_layers), mesh, on_cpu)
        return pages
    stats = [device.memory_stats() for device in mesh.local_devices]
    budget = free_bytes(stats, cache.gpu_memory_utilization, environment.gpu_memory_fraction())
    needed = workspace(pages_in(budget, model, layout, record, mtp_layers))
    if needed >= budget:
        raise ConfigError(
            f"steps need {needed / GIB:.2f} GiB of workspace, but beside the weights only {budget / GIB:.2f} GiB are "
            "left; lower --max-num-batched-tokens, --max-num-seqs or --max-model-len, or raise --tensor-parallel-size"
        )
    return pages_in(budget - needed, model, layout, record, mtp_layers)


def check_exchange_memory(parallel: ParallelConfig, mesh: Mesh) -> None:
    """Raise ConfigError if exchanged records or gathered contexts were allowed more than devices have.

    The defaults are ceilings that small models stay far below, whatever there is.
    """
    if parallel.decode_context_parallel_size == 1:
        return
    on_cpu = mesh.devices.flat[0].platform == "cpu"
    for name, size, default in (
        ("--dcp-exchange-memory", parallel.dcp_exchange_memory, ParallelConfig.dcp_exchange_memory),
        ("--dcp-context-memory", parallel.dcp_context_memory, ParallelConfig.dcp_context_memory),
    ):
        if size == default:
            continue
        wanted, there, where = _wanted_and_there(size, mesh, on_cpu)
        if wanted > there:
            raise ConfigError(
                f"{name} {size} allows {wanted / GIB:,.2f} GiB on {where} has {there / GIB:,.2f} GiB; lower it: "
                "what does not fit goes in rounds, or by path queries"
            )


def _require_room(cache_bytes: int, mesh: Mesh, on_cpu: bool) -> None:
    """Raise ConfigError for a cache that the machine cannot hold, instead of being killed while it is made."""
    wanted, there, where = _wanted_and_there(cache_bytes, mesh, on_cpu)
    if wanted > there:
        raise ConfigError(
            f"a cache of this size takes {wanted / GIB:,.2f} GiB on {where} has {there / GIB:,.2f} GiB; lower "
            "--kv-cache-memory-bytes or --num-gpu-blocks-override, or --block-size where that was set"
        )


def _wanted_and_there(bytes_each: int, mesh: Mesh, on_cpu: bool) -> tuple[int, int, str]:
    """What bytes on every device come to, what there is, and where, in words: virtual devices share the host's."""
    if on_cpu:
        devices = len(mesh.local_devices)
        where = f"{devices} virtual devices together, and this machine"
        return bytes_each * devices, _available_host_bytes(), where
    there = min(int(device.memory_stats()["bytes_limit"]) for device in mesh.local_devices)
    return bytes_each, there, "each GPU, which"


def _available_host_bytes() -> int:
    """Memory the host can still give out: Linux's own estimate, without a say elsewhere."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            fields = dict(line.split(":", 1) for line in file)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return 2**63


def free_bytes(stats: Iterable[Mapping[str, int]], utilization: float, fraction: float = 1.0) -> int:
    """What the fullest device has left of `utilization` of its memory, and of what jax may take.

    stats: jax's memory_stats() of each. fraction: of a device's memory that is bytes_limit. Raises ConfigError if that
    is nothing.
    """
    share = min(utilization / fraction, 1.0)
    fullest = min(stats, key=lambda device: device["bytes_limit"] * share - device["bytes_in_use"])
    total, used = int(fullest["bytes_limit"] / fraction), fullest["bytes_in_use"]
    left = int(fullest["bytes_limit"] * share) - used
    if left <= 0:
        raise ConfigError(
            f"weights take {used / GIB:.2f} GiB, which leaves nothing of {utilization:.0%} of {total / GIB:.2f} GiB "
            "for the cache; raise --tensor-parallel-size or --gpu-memory-utilization"
        )
    return left
