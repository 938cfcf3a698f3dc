"""What jax needs from its process, set before jax starts: devices, threads, compilation cache. Imports no jax itself.

jax reads its own options when it is imported and XLA's when its backend starts, so `prepare` comes before both, at the
top of the server's and of `LLM`'s start. What the user has set, as environment variables or in `jax.config`, is kept.

PJRT_NPROC is the size of the CPU backend's thread pool, by default the number of cores. A virtual device that waits in
a collective holds one of these threads; when more of them wait than the pool has, the ones they wait for never run, and
the process hangs and then aborts ("Expected 8 threads to join the rendezvous"). So a mesh of virtual devices gets a
pool with room for several queued programs on each.
"""

import os
import re
import shutil
import sys
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.config.engine import MAX_VIRTUAL_DEVICES

MIN_POOL_THREADS = 32
THREADS_PER_DEVICE = 4
CACHED_COMPILE_SECONDS = 0.3
"""Programs that compile faster than this are not worth a file in the persistent cache."""

_MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"
_JAX_MEMORY_FRACTION = 0.75
"""jax's own, where nothing is said."""
_DEVICE_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")
_JAX_DEFAULTS = {
    "jax_platforms": None,
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
}


def has_nvidia_gpu() -> bool:
    """True if jax is to run on NVIDIA GPUs: one is visible, and the user has not asked jax for something else."""
    platforms = _jax_option("jax_platforms")
    if platforms and not {"cuda", "gpu"} & set(str(platforms).split(",")):
        return False
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and (not visible.strip() or visible.strip().startswith("-1")):
        return False
    if any(Path("/dev").glob("nvidia[0-9]*")):
        return True
    return Path("/dev/dxg").exists() and shutil.which("nvidia-smi") is not None  # Windows' Linux subsystem


def prepare(num_devices: int, gpu_memory_utilization: float | None = None) -> None:
    """Set up the process so that jax starts with `num_devices` devices.

    On NVIDIA GPUs the compilation cache is set, and the share of their memory that jax may take. Without one, jax is
    kept on the CPU, which gets that many virtual devices and enough threads. May be called more than once; a later call
    may ask for more while jax has not started.

    Raises ConfigError for more virtual devices than MAX_VIRTUAL_DEVICES, if jax has already started with fewer CPU
    devices, or if there is a GPU but no jax for it.
    """
    _cache_compilations()
    # XLA's C++ notes would stand between the lines of a log; its warnings and errors still come.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "1")
    if has_nvidia_gpu():
        if not any(find_spec(plugin) for plugin in ("jax_cuda12_plugin", "jax_cuda13_plugin")):
            raise ConfigError(
                "this machine has an NVIDIA GPU, but jax is installed without CUDA; install glm-dcp-jax[cuda13] "
                "(driver 580 or newer) or glm-dcp-jax[cuda12], or set JAX_PLATFORMS=cpu to run on the CPU"
            )
        if gpu_memory_utilization is not None:
            os.environ.setdefault(_MEMORY_FRACTION, str(gpu_memory_utilization))
        return
    _default_option("jax_platforms", "cpu")
    # jax loads every plugin it finds: without a GPU, the CUDA plugin would print a page about missing libraries.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    if num_devices > 1:
        _virtual_devices(num_devices)


def gpu_memory_fraction() -> float:
    """The share of a GPU's memory that is jax's `bytes_limit`."""
    try:
        return min(max(float(os.environ.get(_MEMORY_FRACTION, "")), 0.01), 1.0)
    except ValueError:
        return _JAX_MEMORY_FRACTION


def _virtual_devices(count: int) -> None:
    if count > MAX_VIRTUAL_DEVICES:
        raise ConfigError(
            f"{count} virtual CPU devices would take this machine down; lower tensor_parallel_size, which is at most "
            f"{MAX_VIRTUAL_DEVICES} without a GPU"
        )
    threads = max(MIN_POOL_THREADS, THREADS_PER_DEVICE * count)
    given = os.environ.get("PJRT_NPROC", "")
    pool = int(given) if given.isdecimal() else os.cpu_count() or 1
    os.environ["PJRT_NPROC"] = str(max(threads, pool))

    flags = os.environ.get("XLA_FLAGS", "")
    present = max((int(number) for number in _DEVICE_COUNT.findall(flags)), default=1)
    if present < count:
        kept = _DEVICE_COUNT.sub("", flags).split()
        os.environ["XLA_FLAGS"] = " ".join([*kept, f"--xla_force_host_platform_device_count={count}"])

    jax = sys.modules.get("jax")
    if jax is None:
        return
    try:
        # XLA reads XLA_FLAGS only once in a process; a jax already imported is told directly.
        jax.config.update("jax_num_cpu_devices", max(count, present))
    except RuntimeError:  # its backend has started: too late for all of the above
        if jax.device_count() < count:
            raise ConfigError(
                f"{count} devices are needed, but jax has already started with {jax.device_count()}; before jax is "
                f"first used, set PJRT_NPROC={threads} and XLA_FLAGS=--xla_force_host_platform_device_count={count}"
            ) from None
        if pool < threads:
            warnings.warn(
                f"jax started before PJRT_NPROC was set; programs on {count} virtual devices may hang. "
                f"Set PJRT_NPROC={threads} before jax is first used.",
                RuntimeWarning,
                stacklevel=3,
            )


def _cache_compilations() -> None:
    """Keep compiled programs between processes: $JAX_COMPILATION_CACHE_DIR, or a folder of ours in the user's cache."""
    if _jax_option("jax_compilation_cache_dir") is None:
        folder = cache_folder("xla")
        if folder is None:
            return  # a read-only home costs compile time, nothing else; jax itself would warn once per program
        _default_option("jax_compilation_cache_dir", str(folder))
    _default_option("jax_persistent_cache_min_compile_time_secs", CACHED_COMPILE_SECONDS)


def cache_folder(name: str) -> Path | None:
    """A folder of ours in the user's cache, made if needed; None where that cannot be."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(base) / "glm_dcp_jax" / name
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return None
    return folder


def _jax_option(name: str) -> Any:
    """One of jax's options as it stands, or None: in a loaded jax its value, else the environment variable's."""
    if "jax" in sys.modules:
        return getattr(sys.modules["jax"].config, name)
    return os.environ.get(name.upper())


def _default_option(name: str, value: str | float) -> None:
    """Set one of jax's options for this process and its children, unless the user has."""
    if "jax" in sys.modules:
        config = sys.modules["jax"].config
        if getattr(config, name) == _JAX_DEFAULTS[name] and name.upper() not in os.environ:
            config.update(name, value)
    os.environ.setdefault(name.upper(), str(value))
