"""GPUs that need not be here: their data sheets, and jax devices to compile for.

targets/*.txtpb are XLA's descriptions (GpuTargetConfigProto as text) with figures from data sheets. A GPU is added by
adding its file; one that is not among them is named by a file of one's own.
"""

import re
from dataclasses import dataclass
from functools import cache
from importlib import resources
from importlib.util import find_spec
from pathlib import Path

import jax
from jax.experimental import topologies

from glm_dcp_jax import environment
from glm_dcp_jax.config import ConfigError

MAX_COUNT = 8
"""GPUs of one host, which is what a target describes."""

_PLUGINS = ("jax_cuda12_plugin", "jax_cuda13_plugin")
_SUFFIX = ".txtpb"
_FIELDS = ("device_memory_size", "memory_bandwidth", "shared_memory_per_block_optin", "core_count")
_TEXTS = resources.files(__package__) / "targets"


@dataclass(frozen=True)
class Target:
    """`count` GPUs of one kind on one host, as their data sheet describes them.

    compute_capability: (major, minor). memory_bandwidth: bytes/s. shared_memory_per_block: bytes, the most that a
    kernel can ask for. multiprocessors: SMs. description: XLA's text, what is compiled for.
    """

    gpu: str
    count: int
    compute_capability: tuple[int, int]
    memory_bytes: int
    memory_bandwidth: int
    shared_memory_per_block: int
    multiprocessors: int
    description: str

    def __str__(self) -> str:
        return f"{self.count}x{self.gpu}"


def known_gpus() -> list[str]:
    """Names that `target` takes: B200, H200, RTX-PRO-6000."""
    stems = (file.name.removesuffix(".txtpb") for file in _TEXTS.iterdir() if file.name.endswith(".txtpb"))
    return sorted(stem.upper().replace("_", "-") for stem in stems)


def target(name: str, count: int = 0) -> Target:
    """A target by name: "8xH200", "4xrtx-pro-6000"; case does not matter, and spaces and `_` are as good as `-`.

    In place of the GPU's name may be the file of a description, which ends in .txtpb: "8xdir/b300.txtpb". count: how
    many GPUs a file that is named alone describes; 0 where it must not be.

    Raises ConfigError, which lists what is known, for any other name, for counts that are not 1 to 8, and for files
    that cannot be read or lack something.
    """
    allowed = (
        f"use COUNTxGPU, as in 8xH200, with a count of 1 to {MAX_COUNT} and one of {', '.join(known_gpus())}, or the "
        "path of a description that ends in .txtpb"
    )
    if name.strip().endswith(_SUFFIX):
        return _from_file(name.strip(), count, allowed)
    found = re.fullmatch(r"(\d+)\s*x\s*(\w.*)", name.strip(), re.IGNORECASE)
    if not found:
        raise ConfigError(f"{name!r} does not name GPUs; {allowed}")
    count, gpu = int(found[1]), re.sub(r"[\s_-]+", "-", found[2]).upper()
    if gpu not in known_gpus():
        raise ConfigError(f"no GPU {gpu!r} is known; {allowed}")
    if not 1 <= count <= MAX_COUNT:
        raise ConfigError(f"{count} GPUs do not make one host; {allowed}")
    return _parse(gpu, count, (_TEXTS / f"{gpu.lower().replace('-', '_')}.txtpb").read_text())


def _from_file(name: str, count: int, allowed: str) -> Target:
    path = Path(name)
    if found := re.fullmatch(r"(\d+)\s*x\s*(.+)", name):
        count, path = int(found[1]), Path(found[2])
    if not 1 <= count <= MAX_COUNT:
        raise ConfigError(
            f"{name!r} does not say how many GPUs there are, or not 1 to {MAX_COUNT}; {allowed}"
        )
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the GPU's description {path} cannot be read ({error}); {allowed}") from error
    return _parse(path.stem.upper().replace("_", "-"), count, text, str(path))


def _parse(gpu: str, count: int, text: str, where: str = "") -> Target:
    number = {key: int(value) for key, value in re.findall(r"(\w+): (\d+)$", text, re.MULTILINE)}
    capability = re.search(r"cuda_compute_capability \{ major: (\d+)(?: minor: (\d+))? \}", text)
    lacks = [field for field in _FIELDS if field not in number]
    lacks += [] if capability else ["cuda_compute_capability { major: ... }"]
    if lacks or not capability:
        raise ConfigError(
            f"{where or gpu} is no description of a GPU: it lacks {', '.join(lacks)}; copy one of "
            "glm_dcp_jax/plan/targets and change its figures"
        )
    return Target(
        gpu=gpu,
        count=count,
        compute_capability=(int(capability[1]), int(capability[2] or 0)),
        memory_bytes=number["device_memory_size"],
        memory_bandwidth=number["memory_bandwidth"],
        shared_memory_per_block=number["shared_memory_per_block_optin"],
        multiprocessors=number["core_count"],
        description=text,
    )


def compiler_plugin() -> str | None:
    """The module of the installed jax plugin that holds XLA's GPU compiler; None if there is none."""
    return next((plugin for plugin in _PLUGINS if find_spec(plugin)), None)


def devices(where: str | Target) -> tuple[jax.Device, ...]:
    """jax devices of GPUs that are not here: for meshes, shardings and compiling, not for running. Equal at every call.

    Starts jax, on the CPU where there is no GPU, if it has not been started. Raises ConfigError for an unknown name,
    and where no CUDA compiler is installed.
    """
    return _devices(target(where) if isinstance(where, str) else where)


@cache
def _devices(where: Target) -> tuple[jax.Device, ...]:
    if compiler_plugin() is None:
        raise ConfigError(
            f"cannot compile for {where}: XLA's CUDA compiler is not installed; on a machine without GPUs install the "
            "extra [aot] (pip install -e '.[aot]'), on one with GPUs [cuda12] or [cuda13]"
        )
    environment.prepare(1)
    jax.devices()  # registers the plugin; the description below is understood only then
    topology = f"1x1x{where.count}"  # slices x hosts x GPUs
    found = topologies.get_topology_desc(platform="cuda", topology=topology, target_config=where.description)
    return tuple(found.devices)
