"""Tests that compile ask for `cuda_compiler`, and are skipped where there is none."""

import pytest


@pytest.fixture(scope="session")
def cuda_compiler(request: pytest.FixtureRequest) -> None:
    from glm_dcp_jax import plan

    if request.config.getoption("--platform") == "gpu":
        pytest.skip("compiles for GPUs that are not here; runs on the CPU, without --platform gpu")
    if plan.compiler_plugin() is None:
        pytest.skip(
            "the CUDA compiler is not installed: pip install -e '.[aot]' (scripts/test does, on a CPU machine)"
        )
