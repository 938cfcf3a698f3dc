"""Compile a function for GPUs that are not here, and report what the compiler made of it.

All of XLA's GPU compiler runs, in this process, and nothing else of the process is touched: what is to be dumped and
collected is asked for by options of the one compilation (jax 0.10.2 and 0.12.0 take `xla_dump_to`,
`xla_dump_emitter_re` and `xla_gpu_collect_cost_model_stats` there), not by XLA_FLAGS, which would need a process of its
own. The dump is the only way to PTX: the serialized executable holds machine code. For an 8-layer step of GLM-5.2
these options cost 1 to 2 s of 12 s, and leave the schedule as it is.

Limits: autotuning needs a device, so the tilings of XLA's own matrix products are defaults, and a real GPU may do
better; modelled times are models. Neither touches Pallas kernels: their tiles are their own, and they have no model.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.errors import JaxRuntimeError
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.plan.gpus import Target, devices, known_gpus
from glm_dcp_jax.plan.ptx import PtxKernel, kernels_of, launches_of
from glm_dcp_jax.plan.ptxas import KernelResources, assemble
from glm_dcp_jax.plan.schedule import Collective, ModelledTime, Schedule, parse_schedule
from glm_dcp_jax.plan.uncached import no_persistent_cache

Where = str | Target | Sequence[jax.Device]
"""A target by name, a target, or devices that `devices` gave."""

_SOL_PASS = "sol-gpu-cost-model-stats-collection"
_SOL_GPUS = ("NVIDIA H200", "NVIDIA B200")
"""XLA's "sol" model reads tables of measurements, and fails the compilation for a GPU that has none."""
_COMPILER_LACKS = ("No PTX compilation provider", "libdevice not found")


class Memory(NamedTuple):
    """What a program takes on each device, in bytes, as XLA planned it.

    alias_bytes: results written over donated arguments; they count among both. peak_bytes: all together.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int

    @property
    def peak_bytes(self) -> int:
        """Arguments, results and temporaries, what is aliased counted once."""
        return self.argument_bytes + self.output_bytes + self.temp_bytes - self.alias_bytes


@dataclass(frozen=True)
class Compiled:
    """A program that was compiled for absent GPUs.

    device_kind: as jax calls it, "NVIDIA H200". num_devices: of the program. hlo: optimised and scheduled, as text.
    kernels: their PTX by name. A kernel that several instructions share is there once; what XLA has as machine code,
    such as its top-k, is absent.
    """

    device_kind: str
    num_devices: int
    hlo: str = field(repr=False)
    memory: Memory
    kernels: dict[str, PtxKernel] = field(repr=False)

    @cached_property
    def schedule(self) -> Schedule:
        """The order of execution: computations, collectives and what runs beside them."""
        return parse_schedule(self.hlo)

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """The schedule's collectives."""
        return self.schedule.collectives

    @property
    def modelled_times(self) -> dict[str, dict[str, ModelledTime]]:
        """XLA's estimates by instruction and model, not measurements; `why_no_modelled_times` if there are none."""
        return self.schedule.modelled_times

    @property
    def why_no_modelled_times(self) -> str | None:
        """None where there are some."""
        if self.modelled_times:
            return None
        return "XLA models its own fusions only, and estimated none of this program's (or was told not to)"

    def resources(self) -> dict[str, KernelResources] | None:
        """Registers, spills and static shared memory by kernel; None where no ptxas was found (see ptxas.py)."""
        return assemble(self.kernels.values())


def compile_for(
    function: Callable[..., Any],
    where: Where,
    *arguments: Any,
    compiler_options: Mapping[str, Any] | None = None,
    **jit_options: Any,
) -> Compiled:
    """Compile function(*arguments) for absent GPUs.

    function: plain, or already jitted. where: "8xH200", a Target, or devices. arguments: as for the function, with
    jax.ShapeDtypeStruct in place of arrays (of arrays only shapes and dtypes are used). With one device, what has no
    sharding is put there, Python numbers as scalars, and a program without arguments, too; with several, give shardings
    on `devices(where)`, or let the function's shard_map say where.
    jit_options: static_argnums, donate_argnums, ... of jax.jit, for a plain function. compiler_options: XLA's, as in
    `jax.jit(..., compiler_options=...)`.

    Raises ConfigError if the compiler is not complete on this machine or `where` is neither, ValueError for arguments
    that put the program elsewhere than `where`, and whatever jax raises for a function that does not compile.
    """
    gpus = _devices(where)
    if hasattr(function, "trace"):
        if jit_options:
            raise ValueError(
                f"the function is already jitted; give {', '.join(jit_options)} to its jax.jit instead"
            )
        jitted: Any = function
    else:
        jitted = jax.jit(function, **jit_options)
    with _lowering_for(gpus[0]):
        traced = jitted.trace(*jax.tree.map(_abstract, arguments))
        # Only now: a function may compute something while it is traced, which an absent GPU cannot.
        with jax.default_device(gpus[0] if len(gpus) == 1 else None):
            lowered = traced.lower()
    return compile_lowered(lowered, gpus, compiler_options)


def compile_lowered(
    lowered: jax.stages.Lowered, where: Where, compiler_options: Mapping[str, Any] | None = None
) -> Compiled:
    """Compile what `jax.jit(...).lower(...)` gave for arguments on `devices(where)`. Raises as `compile_for` does."""
    gpus = _devices(where)
    with tempfile.TemporaryDirectory() as folder:
        options = _options(gpus[0].device_kind, compiler_options or {}, folder)
        try:
            with no_persistent_cache():
                compiled = lowered.compile(compiler_options=options)
        except JaxRuntimeError as error:
            if any(symptom in str(error) for symptom in _COMPILER_LACKS):
                raise ConfigError(
                    "XLA needs ptxas and libdevice to compile for CUDA, and did not find them: pip install "
                    f"nvidia-cuda-nvcc-cu12, or install a CUDA toolkit. It says: {str(error).splitlines()[0]}"
                ) from error
            raise
        num_devices = _num_devices(compiled, gpus)
        dumped = Path(folder)
        launches = "".join(path.read_text() for path in dumped.glob("*.thunk_sequence.txt"))
        modules = [path.read_text() for path in dumped.glob("*.ptx")]
    memory, hlo = compiled.memory_analysis(), compiled.as_text()
    assert memory is not None and hlo is not None  # of a CUDA program, XLA gives both
    return Compiled(
        device_kind=gpus[0].device_kind,
        num_devices=num_devices,
        hlo=hlo,
        memory=Memory(
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.alias_size_in_bytes,
        ),
        kernels=kernels_of(modules, launches_of(launches)),
    )


def _devices(where: Where) -> tuple[jax.Device, ...]:
    if isinstance(where, str | Target):
        return devices(where)
    gpus = tuple(where) if isinstance(where, Iterable) else ()
    if not gpus or not all(isinstance(gpu, jax.Device) and gpu.platform == "gpu" for gpu in gpus):
        raise ConfigError(
            f"there are no GPUs to compile for in {where!r}; give a name as '8xH200' ({', '.join(known_gpus())}), a "
            "Target, or some of what glm_dcp_jax.plan.devices(...) gives"
        )
    return gpus


@contextmanager
def _lowering_for(gpu: jax.Device) -> Iterator[None]:
    """jax 0.12 lowers Pallas kernels outside a shard_map only if something says for which GPU; 0.10.2 does not ask."""
    kind = AbstractDevice(device_kind=gpu.device_kind, num_cores=None, platform=gpu.platform)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=kind)):
        yield


def _abstract(leaf: Any) -> Any:
    """Arrays become shapes; what has none (static arguments, Python numbers) stays."""
    if isinstance(leaf, jax.ShapeDtypeStruct) or not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return leaf
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)


def _options(device_kind: str, given: Mapping[str, Any], folder: str) -> dict[str, Any]:
    if "xla_dump_to" in given:
        raise ValueError(
            "xla_dump_to is where kernels are read from, and temporary; for a dump of your own compile what "
            "jax.jit(...).lower(...) gives, with .compile(compiler_options=...)"
        )
    options = {
        "xla_dump_to": folder,
        "xla_dump_emitter_re": "ptx",  # without it, jax 0.12 dumps no PTX
        "xla_gpu_collect_cost_model_stats": True,
        "xla_backend_optimization_level": 3,  # XLA's default, whatever XLA_FLAGS ask of programs for the CPU
        **given,
    }
    if not device_kind.startswith(_SOL_GPUS):
        disabled = options.get("xla_disable_hlo_passes")
        options["xla_disable_hlo_passes"] = f"{disabled},{_SOL_PASS}" if disabled else _SOL_PASS
    return options


def _num_devices(compiled: jax.stages.Compiled, gpus: Sequence[jax.Device]) -> int:
    """How many of the GPUs the program uses. Raises ValueError if it uses any other device."""
    used = set()
    for sharding in jax.tree.leaves((compiled.input_shardings, compiled.output_shardings)):
        used |= sharding.device_set
    if not used <= set(gpus):
        elsewhere = sorted({device.device_kind for device in used - set(gpus)})
        raise ValueError(
            f"the program was placed on {len(used)} x {', '.join(elsewhere)}, not on the {len(gpus)} x "
            f"{gpus[0].device_kind} to compile for; give its arguments shardings on glm_dcp_jax.plan.devices(...)"
        )
    return len(used)
