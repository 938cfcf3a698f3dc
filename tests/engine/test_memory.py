"""How many pages the cache gets."""

import jax
import numpy as np
import pytest
from tiny import tiny_llm

from glm_dcp_jax.cache.capacity import page_bytes
from glm_dcp_jax.config import CacheConfig, ConfigError, ParallelConfig, engine_config
from glm_dcp_jax.engine import memory
from glm_dcp_jax.engine.memory import CPU_DEFAULT_BYTES, free_bytes, number_of_pages
from glm_dcp_jax.parallel.mesh import make_mesh

GIB = 2**30


class Gpu:
    """A device that is none, with memory to divide."""

    platform = "cuda"

    def __init__(self, limit: int, used: int) -> None:
        self.stats = {"bytes_limit": limit, "bytes_in_use": used}

    def memory_stats(self) -> dict[str, int]:
        return self.stats


class GpuMesh:
    """As much of a mesh as sizing looks at."""

    def __init__(self, *devices: Gpu) -> None:
        self.devices = np.array(devices)
        self.local_devices = list(devices)


def pages(llm, cache: CacheConfig, mesh, workspace=lambda pages: 0) -> int:
    runner, model = llm.engine.runner, llm.engine.model_config
    return number_of_pages(cache, model, runner.layout, runner.record, mesh, workspace)


def test_on_a_cpu_256_mib_unless_told_otherwise(llm):
    runner, mesh = llm.engine.runner, make_mesh(ParallelConfig())
    each = page_bytes(llm.engine.model_config, runner.layout, runner.record)
    assert pages(llm, CacheConfig(), mesh) == CPU_DEFAULT_BYTES // each
    assert pages(llm, CacheConfig(kv_cache_memory_bytes=10 * each + 1), mesh) == 10
    assert pages(llm, CacheConfig(kv_cache_memory_bytes=10 * each, num_gpu_blocks_override=3), mesh) == 4


def test_the_smallest_cache_on_a_cpu_must_fit_too(llm, monkeypatch):
    monkeypatch.setattr(memory, "_available_host_bytes", lambda: 1000)
    monkeypatch.setattr(memory, "CPU_DEFAULT_BYTES", 1)
    with pytest.raises(ConfigError, match="a cache of this size takes .*--block-size"):
        pages(llm, CacheConfig(), make_mesh(ParallelConfig()))


@pytest.mark.parametrize("name", ["dcp_exchange_memory", "dcp_context_memory"])
def test_exchanges_beyond_memory_are_refused(name, devices):
    devices(2)
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} .* has 10.00 GiB; lower it"):
        parallel = ParallelConfig(2, 2, **{name: 11 * GIB})
        memory.check_exchange_memory(parallel, GpuMesh(Gpu(10 * GIB, 0)))
    parallel = ParallelConfig(2, 2, **{name: 10 * GIB})
    memory.check_exchange_memory(parallel, GpuMesh(Gpu(10 * GIB, 0)))
    with pytest.raises(ConfigError, match="2 virtual devices together"):
        memory.check_exchange_memory(ParallelConfig(2, 2, **{name: 2**50}), make_mesh(ParallelConfig(2, 2)))


def test_on_gpus_the_fullest_one_decides_and_the_workspace_is_set_aside(llm, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.0")
    runner = llm.engine.runner
    each = page_bytes(llm.engine.model_config, runner.layout, runner.record)
    mesh = GpuMesh(Gpu(200 * each, 20 * each), Gpu(200 * each, 60 * each))
    cache = CacheConfig(gpu_memory_utilization=0.5)
    seen = []

    def workspace(most: int) -> int:
        seen.append(most)
        return 15 * each

    assert pages(llm, cache, mesh, workspace) == 25
    assert seen == [40]


@pytest.mark.parametrize(
    ("utilization", "fraction", "left"),
    [(0.9, 0.9, 8), (0.9, 0.75, 8), (0.75, 0.75, 8), (0.6, 0.9, 5), (1.0, 1.0, 8)],
)
def test_the_share_is_of_the_whole_device_and_within_what_jax_may_take(utilization, fraction, left):
    """jax is given 9 GiB: 90 % of 10, or 75 % of 12. Of 10, 60 % are 6."""
    found = free_bytes([{"bytes_limit": 9 * GIB, "bytes_in_use": GIB}], utilization, fraction)
    assert found == pytest.approx(left * GIB, abs=2)


def test_too_little_memory_says_what_takes_it(llm, monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.0")
    with pytest.raises(ConfigError, match=r"weights take 9.00 GiB.*90% of 10.00 GiB.*--tensor-parallel-size"):
        free_bytes([{"bytes_limit": 10 * GIB, "bytes_in_use": 9 * GIB}], 0.9)
    mesh = GpuMesh(Gpu(10 * GIB, GIB))
    with pytest.raises(ConfigError, match=r"workspace, but beside the weights only 8.20 GiB.*--max-num-seqs"):
        pages(llm, CacheConfig(), mesh, lambda most: 9 * GIB)


def test_the_workspace_is_that_of_the_largest_steps(directory):
    llm = tiny_llm(directory)
    runner, model = llm.engine.runner, llm.engine.model_config
    small = runner._workspace(engine_config("m", max_num_batched_tokens=16, max_model_len=64), model, 20)
    large = runner._workspace(engine_config("m", max_num_batched_tokens=64, max_model_len=64), model, 20)
    assert jax.devices()[0].platform != "cpu" or 0 < small < large
