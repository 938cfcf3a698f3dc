"""What NVIDIA's assembler says of a kernel: registers, spills, shared memory.

ptxas comes with the package nvidia-cuda-nvcc-cu12 (40 MB to download, 99 MB installed; needs no driver and no GPU) or
with a CUDA toolkit. XLA itself needs it to compile, so where `compile_for` works it is usually found here too.
"""

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from glm_dcp_jax.plan.ptx import PtxKernel

_PACKAGES = ("nvidia.cuda_nvcc", "nvidia.cu13")
_TOOLKIT = Path("/usr/local/cuda/bin")


@dataclass(frozen=True)
class KernelResources:
    """What one thread or block of a kernel takes, by `ptxas -v`.

    registers: of a thread. spill_stores, spill_loads: bytes of registers that do not fit and go through local memory.
    stack_bytes: local memory of a thread, spills included. shared_memory_bytes: static, of a block; Triton's kernels
    take theirs at launch (`PtxKernel.launch.shared_memory_bytes`).
    """

    registers: int
    spill_stores: int
    spill_loads: int
    stack_bytes: int
    shared_memory_bytes: int


def find_ptxas() -> Path | None:
    """NVIDIA's package, then $CUDA_HOME, the PATH, and the usual place of a CUDA toolkit; None if it is in none."""
    places: list[str] = []
    for package in _PACKAGES:
        spec = find_spec(package) if find_spec("nvidia") else None
        places += [os.path.join(folder, "bin") for folder in (spec and spec.submodule_search_locations) or ()]
    if home := os.environ.get("CUDA_HOME"):
        places.append(os.path.join(home, "bin"))
    places += [os.environ.get("PATH", ""), str(_TOOLKIT)]
    found = shutil.which("ptxas", path=os.pathsep.join(places))
    return Path(found) if found else None


def assemble(kernels: Iterable[PtxKernel]) -> dict[str, KernelResources] | None:
    """The kernels' resources by name, a fraction of a second each; None where there is no ptxas.

    Raises RuntimeError with ptxas's message if it cannot assemble a kernel.
    """
    ptxas = find_ptxas()
    if ptxas is None:
        return None
    return {kernel.name: _resources(kernel.name, _assemble(ptxas, kernel)) for kernel in kernels}


def _assemble(ptxas: Path, kernel: PtxKernel) -> str:
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(kernel.text)
        command = [
            str(ptxas),
            "-v",
            f"-arch={kernel.architecture}",
            str(source),
            "-o",
            f"{folder}/kernel.cubin",
        ]
        done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(
            f"{ptxas} cannot assemble {kernel.name} for {kernel.architecture}; a newer nvidia-cuda-nvcc-cu12 may. "
            f"It says: {done.stderr.strip()}"
        )
    return done.stderr + done.stdout


def _resources(name: str, output: str) -> KernelResources:
    """The part of ptxas's output about one entry, which begins where the entry is named."""
    part = output[output.index(f"Compiling entry function '{name}'") :]
    part = part[: part.find("Compiling entry function", 1)]

    def number(pattern: str) -> int:
        found = re.search(pattern, part)
        return int(found[1]) if found else 0

    return KernelResources(
        registers=number(r"Used (\d+) registers"),
        spill_stores=number(r"(\d+) bytes spill stores"),
        spill_loads=number(r"(\d+) bytes spill loads"),
        stack_bytes=number(r"(\d+) bytes stack frame"),
        shared_memory_bytes=number(r"(\d+) bytes smem"),
    )
