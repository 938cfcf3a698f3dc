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
_FIELDS = {
    "device_memory_size": (2**30, 2**50),
    "memory_bandwidth": (10**9, 10**16),
    "shared_memory_per_block_optin": (2**14, 2**30),
    "core_count": (1, 100_000),
    "fpus_per_core": (1, 2**16),
    "threads_per_warp": (1, 2**10),
    "threads_per_block_limit": (1, 2**16),
    "threads_per_core_limit": (1, 2**16),
    "shared_memory_per_block": (2**10, 2**30),
    "shared_memory_per_core": (2**10, 2**30),
    "l2_cache_size": (2**10, 2**40),
    "clock_rate_ghz": (0.01, 100.0),
    "block_dim_limit_x": (1, 2**31),
    "block_dim_limit_y": (1, 2**31),
    "block_dim_limit_z": (1, 2**31),
    "registers_per_core_limit": (1, 2**30),
    "registers_per_block_limit": (1, 2**30),
}
"""What a description must say, each once: the least and the most that a GPU can have. XLA divides by most of it."""
_CAPABILITY = {"major": (5, 99), "minor": (0, 9)}
_STRING_OR_COMMENT = re.compile(r'("(?:[^"\\\n]|\\.)*")|#[^\n]*')
_LONGEST_SHOWN = 40
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
    found = re.fullmatch(r"([0-9]{1,9})\s*x\s*(\w.*)", name.strip(), re.IGNORECASE)
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
    if found := re.fullmatch(r"([0-9]{1,9})\s*x\s*(.+)", name):
        count, path = int(found[1]), Path(found[2])
    if not 1 <= count <= MAX_COUNT:
        raise ConfigError(
            f"{name!r} does not say how many GPUs there are, or not 1 to {MAX_COUNT}; {allowed}"
        )
    try:
        text = path.read_text()
    except (OSError, ValueError) as error:  # not UTF-8, or a path with a NUL
        raise ConfigError(
            f"the GPU's description {str(path)!r} cannot be read ({error}); {allowed}"
        ) from error
    return _parse(path.stem.upper().replace("_", "-"), count, text, str(path))


def _parse(gpu: str, count: int, text: str, where: str = "") -> Target:
    """where: the file, if it is one's own. Strings and comments hold no fields."""
    where = where or gpu
    plain = _STRING_OR_COMMENT.sub(lambda found: '""' if found[1] else "", text)
    capability = " ".join(re.findall(r"\bcuda_compute_capability\s*:?\s*\{([^{}]*)", plain))
    given = {field: _values(field, plain) for field in _FIELDS}
    given["cuda_compute_capability { major: ... }"] = _values("major", capability)
    lacks = [field for field, values in given.items() if not values]
    if lacks:
        raise _no_description(where, f"it lacks {', '.join(lacks)}")
    number = {field: _number(where, field, given[field], bounds) for field, bounds in _FIELDS.items()}
    major, minor = (
        _number(where, f"cuda_compute_capability's {field}", _values(field, capability) or ["0"], bounds)
        for field, bounds in _CAPABILITY.items()
    )
    return Target(
        gpu=gpu,
        count=count,
        compute_capability=(int(major), int(minor)),
        memory_bytes=int(number["device_memory_size"]),
        memory_bandwidth=int(number["memory_bandwidth"]),
        shared_memory_per_block=int(number["shared_memory_per_block_optin"]),
        multiprocessors=int(number["core_count"]),
        description=text,
    )


def _values(field: str, text: str) -> list[str]:
    """All that are given to a field."""
    return re.findall(rf"\b{field}\s*:\s*([^\s,;{{}}]*)", text)


def _number(where: str, field: str, values: list[str], bounds: tuple[float, float]) -> float:
    """The one value of a field. Raises ConfigError if there are several, or it is none of those that can be."""
    least, most = bounds
    if len(values) > 1:
        raise _no_description(where, f"{field} is given {len(values)} times; leave one")
    (value,) = values
    whole = isinstance(least, int)
    pattern = "[0-9]{1,18}" if whole else r"[0-9]{1,18}(\.[0-9]{0,18})?"
    if re.fullmatch(pattern, value) and least <= (number := int(value) if whole else float(value)) <= most:
        return number
    shown = value if len(value) <= _LONGEST_SHOWN else f"{value[:_LONGEST_SHOWN]}..."
    what = "an integer" if whole else "a number"
    raise _no_description(where, f"{field} must be {what} from {least} to {most}, but is {shown!r}")


def _no_description(where: str, why: str) -> ConfigError:
    return ConfigError(
        f"{where} is no description of a GPU: {why}; copy one of glm_dcp_jax/plan/targets and change its figures"
    )


def compiler_plugin() -> str | None:
    """The module of the installed jax plugin that holds XLA's GPU compiler; None if there is none."""
    return next((plugin for plugin in _PLUGINS if find_spec(plugin)), None)


def devices(where: str | Target) -> tuple[jax.Device, ...]:
    """jax devices of GPUs that are not here: for meshes, shardings and compiling, not for running. Equal at every call.

    Starts jax, on the CPU where there is no GPU, if it has not been started. Raises ConfigError for an unknown name,
    for a description that XLA cannot read, and where no CUDA compiler is installed.
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
    try:
        found = topologies.get_topology_desc(
            platform="cuda", topology=topology, target_config=where.description
        )
    except RuntimeError as error:
        raise _no_description(where.gpu, f"XLA cannot read it, as is said above ({error})") from error
    return tuple(found.devices)
