"""Compiling for GPUs that this machine does not have: the CUDA compiler alone, without driver or NVIDIA libraries."""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

TARGETS = Path(__file__).parent / "targets"
"""XLA's descriptions of GPUs (GpuTargetConfigProto as text), with figures from their data sheets."""
PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")


@pytest.fixture(scope="module", autouse=True)
def nothing_is_cached() -> Iterator[None]:
    """jax would store programs for absent GPUs in its persistent cache, but cannot read them back."""
    import jax

    name = "jax_persistent_cache_min_compile_time_secs"
    usual = getattr(jax.config, name)
    jax.config.update(name, float("inf"))
    yield
    jax.config.update(name, usual)


@pytest.fixture(scope="session")
def absent_gpus(request: pytest.FixtureRequest) -> Callable[[str, int], list]:
    """`absent_gpus("h200", 8)`: that many devices to compile for, on one host. Skips where there is no compiler."""
    if request.config.getoption("--platform") == "gpu":
        pytest.skip("compiles for GPUs that are not here; runs on the CPU, without --platform gpu")
    if not any(find_spec(plugin) for plugin in PLUGINS):
        pytest.skip(
            "the CUDA compiler is not installed: pip install -e '.[aot]' (scripts/test does, on a CPU machine)"
        )
    import jax
    from jax.experimental import topologies

    jax.devices()  # registers the plugin

    def of(target: str, count: int) -> list:
        text = (TARGETS / f"{target}.txtpb").read_text()
        topology = f"1x1x{count}"  # slices x hosts x GPUs
        return list(
            topologies.get_topology_desc(platform="cuda", topology=topology, target_config=text).devices
        )

    return of
