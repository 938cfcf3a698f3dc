"""One test run, one platform: 8 virtual CPU devices, or with `--platform gpu` the machine's real GPUs.

Everything is set before a test module imports jax. Subprocesses (servers, command lines) inherit it as environment.
"""

import gc
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from glm_dcp_jax import environment

VIRTUAL_DEVICES = 8
ROOT = Path(__file__).parent.parent
SHORT = ("cache", "config")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--platform",
        choices=("cpu", "gpu"),
        default="cpu",
        help=f"run on {VIRTUAL_DEVICES} virtual CPU devices (default), or on the real GPUs of this machine",
    )


def pytest_configure(config: pytest.Config) -> None:
    os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "xla-tests"))
    if config.getoption("--platform") == "gpu":
        os.environ["JAX_PLATFORMS"] = "cuda,cpu"
        if not environment.has_nvidia_gpu():
            raise pytest.UsageError("--platform gpu: this machine has no NVIDIA GPU that is visible")
        # GPUs multiply float32 in TF32 unless told otherwise, which no golden of ours survives.
        os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"
        # Tests start servers as processes of their own, which need memory beside this one.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    else:
        os.environ["JAX_PLATFORMS"] = "cpu"
        # Most of a run is compiling. Said first, so that whoever sets XLA_FLAGS has the last word.
        given = os.environ.get("XLA_FLAGS", "")
        os.environ["XLA_FLAGS"] = f"--xla_backend_optimization_level=0 {given}".strip()
    environment.prepare(VIRTUAL_DEVICES)


def pytest_collection_finish(session: pytest.Session) -> None:
    """What lives as long as the run is no garbage: thousands of tests need not look through it."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def pytest_report_header(config: pytest.Config) -> str:
    import jax

    found = jax.devices()
    return f"jax {jax.__version__}: {len(found)} x {found[0].device_kind}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    # Files of many short tests come last: whoever of several processes is done first takes them.
    items.sort(key=lambda item: item.path.relative_to(ROOT / "tests").parts[0] in SHORT)
    if config.getoption("--platform") == "gpu":
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a real GPU: scripts/test --platform gpu"))


@pytest.fixture(scope="session")
def devices() -> Callable[[int], list]:
    """`devices(n)`: the first n devices of this platform; skips the test, by name, where the machine has fewer."""
    import jax

    found = jax.devices()

    def first(count: int) -> list:
        if count > len(found):
            pytest.skip(f"needs {count} devices, this machine has {len(found)}")
        return found[:count]

    return first
