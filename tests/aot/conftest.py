"""Compiling for GPUs that this machine does not have: the CUDA compiler alone, without driver or NVIDIA libraries."""

from collections.abc import Callable, Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_is_cached() -> Iterator[None]:
    """Also what is compiled without glm_dcp_jax.plan is kept out of jax's cache, which could not read it back."""
    from glm_dcp_jax import plan

    with plan.no_persistent_cache():
        yield


@pytest.fixture(scope="session")
def absent_gpus(request: pytest.FixtureRequest) -> Callable[[str, int], list]:
    """`absent_gpus("h200", 8)`: that many devices to compile for, on one host. Skips where there is no compiler."""
    from glm_dcp_jax import plan

    if request.config.getoption("--platform") == "gpu":
        pytest.skip("compiles for GPUs that are not here; runs on the CPU, without --platform gpu")
    if plan.compiler_plugin() is None:
        pytest.skip(
            "the CUDA compiler is not installed: pip install -e '.[aot]' (scripts/test does, on a CPU machine)"
        )
    return lambda gpu, count: list(plan.devices(f"{count}x{gpu}"))
