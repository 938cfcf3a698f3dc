"""What can be known about GPUs without having them: compiling for them, and reading what the compiler wrote.

`compile_for(function, "8xH200", *shapes)` runs all of XLA's GPU compiler for GPUs that are not here;
docs/ahead-of-time.md shows how. `python -m glm_dcp_jax.plan` says what a model needs there (docs/planner.md).
"""

from glm_dcp_jax.plan.compile import Compiled, Memory, compile_for, compile_lowered
from glm_dcp_jax.plan.gpus import Target, compiler_plugin, devices, known_gpus, target
from glm_dcp_jax.plan.ptx import Launch, PtxKernel
from glm_dcp_jax.plan.ptxas import KernelResources, assemble, find_ptxas
from glm_dcp_jax.plan.schedule import Collective, ModelledTime, Schedule
from glm_dcp_jax.plan.uncached import no_persistent_cache

__all__ = [
    "Collective",
    "Compiled",
    "KernelResources",
    "Launch",
    "Memory",
    "ModelledTime",
    "PtxKernel",
    "Schedule",
    "Target",
    "assemble",
    "compile_for",
    "compile_lowered",
    "compiler_plugin",
    "devices",
    "find_ptxas",
    "known_gpus",
    "no_persistent_cache",
    "target",
]
