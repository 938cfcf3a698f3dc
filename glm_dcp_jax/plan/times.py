"""How long one instruction of a schedule takes by a model: nothing here was measured.

Each estimate says what it rests on:

xla       XLA's own model of a fusion, which it writes into the text (`Instruction.modelled_times`). Of its models
          "performance" understands matrix products best: its memory time is their operands' and results' over the
          bandwidth, where "indexing-cost-model" counts weights twice and "experimental-gemm-cost-model" follows the
          default tiling that a real GPU's autotuning replaces. Its compute time is left out there, since it counts
          ordinary multiply-adds, not tensor cores. Of small products for each head it reads the weights again for every
          row, 14 us in place of 1: there "indexing-cost-model" has the smaller total, which counts. Other fusions take
          the smaller of "performance" and "indexing-cost-model": the first counts what Triton keeps in registers as
          computed and read again and again (3.6 ms for the norm of 4 rows). "sol" is not used: it is a constant for
          small fusions, and unknown to some GPUs.
declared  the cost that our kernel declares (kernel_costs.py): bytes over the bandwidth, or multiply-adds over the
          data sheet's rate of bfloat16 products, whichever is longer.
bytes     operands and results over the bandwidth: copies, sorts, library calls, fusions that XLA did not model.
nothing   names for data, and the done of what was started before.
unknown   no model; counted as 0 seconds, and listed.

All are near the least that the hardware could take: no launch, no gap between kernels, full bandwidth, tensor cores
never waiting. So a window is really longer than it is said to be, more is hidden in it, and a step takes longer.
`least_seconds` is what every kernel takes at least.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.experts.cost import expected_experts
from glm_dcp_jax.plan.gpus import Target
from glm_dcp_jax.plan.kernel_costs import Workload, declared_cost, kernel_name
from glm_dcp_jax.plan.schedule import Instruction, arrays_of, shape_bytes

__all__ = ["Basis", "Estimate", "Times", "expected_experts", "xla_seconds"]

Basis = Literal["xla", "declared", "bytes", "nothing", "unknown"]

_PRODUCTS = {"H200": 989e12, "B200": 2250e12, "RTX-PRO-6000": 504e12}
"""Data sheets' dense bfloat16 products with float32 sums, FLOP/s."""
_FUSIONS = ("performance", "indexing-cost-model")
_GEMM = re.compile(r'"kind":"__triton\w*gemm')
_TARGET = re.compile(r'custom_call_target="([^"]*)"')
_LIBRARY = re.compile(r"cublas|cub_sort|TopK|__gpu\$xla\.gpu\.ext", re.IGNORECASE)
_WORKSPACE = re.compile(r", s8\[\d+\](?:\{[\d,]*\})?\)$")
"""cuBLAS's scratch memory, the last of its results."""
NAMES_FOR_DATA = set(
    "parameter constant tuple get-tuple-element bitcast after-all add-dependency opt-barrier partition-id replica-id"
    " copy-done".split()
)
"""Instructions that take no time."""


class Estimate(NamedTuple):
    """A modelled time in seconds, and what it rests on. added: part of it, because no kernel takes less than that."""

    seconds: float
    basis: Basis
    added: float = 0.0


@dataclass(frozen=True)
class Times:
    """The model of one GPU's instructions.

    bandwidth: bytes/s of its memory. products: FLOP/s of matrix products; None: unknown, and never what takes longest.
    least_seconds: of any kernel.
    """

    workload: Workload
    bandwidth: float
    products: float | None = None
    least_seconds: float = 0.0

    @staticmethod
    def on(target: Target, workload: Workload, least_seconds: float = 0.0) -> "Times":
        """The model with a GPU's data sheet."""
        return Times(workload, target.memory_bandwidth, _PRODUCTS.get(target.gpu), least_seconds)

    def of(self, instruction: Instruction, shapes: Mapping[str, str]) -> Estimate:
        """One run of an instruction that is no loop, branch, call or collective. shapes: of its operands, by name."""
        if instruction.opcode in NAMES_FOR_DATA:
            return Estimate(0.0, "nothing")
        estimate = self._modelled(instruction, shapes)
        if estimate.basis in ("nothing", "unknown"):
            return estimate
        added = max(self.least_seconds - estimate.seconds, 0.0)
        return estimate._replace(seconds=estimate.seconds + added, added=added)

    def _modelled(self, instruction: Instruction, shapes: Mapping[str, str]) -> Estimate:
        if (seconds := xla_seconds(instruction)) is not None:
            return Estimate(seconds, "xla")
        if instruction.opcode == "custom-call":
            return self._custom_call(instruction, shapes)
        if instruction.opcode.endswith("-done"):
            return Estimate(0.0, "nothing")
        if instruction.opcode.endswith("-start") and instruction.opcode != "copy-start":
            return Estimate(0.0, "unknown")
        return self._all_bytes(instruction, shapes)

    def _custom_call(self, instruction: Instruction, shapes: Mapping[str, str]) -> Estimate:
        if name := kernel_name(instruction):
            operands = [array for operand in instruction.operands for array in arrays_of(shapes[operand])]
            cost = declared_cost(name, operands, arrays_of(instruction.shape), self.workload)
            if cost is not None:
                return Estimate(self._seconds(cost), "declared")
        called = _TARGET.search(instruction.attributes)
        if called and _LIBRARY.search(called[1]):
            return self._all_bytes(instruction, shapes)
        return Estimate(0.0, "unknown")

    def _seconds(self, cost: Cost) -> float:
        computing = cost.flops / self.products if self.products else 0.0
        return max(cost.bytes_moved / self.bandwidth, computing)

    def _all_bytes(self, instruction: Instruction, shapes: Mapping[str, str]) -> Estimate:
        read = sum(shape_bytes(shapes[operand]) for operand in instruction.operands)
        if instruction.opcode == "copy-start":  # its result names the operand once more
            return Estimate(2 * read / self.bandwidth, "bytes")
        written = shape_bytes(_WORKSPACE.sub(")", instruction.shape))
        return Estimate((read + written) / self.bandwidth, "bytes")


def xla_seconds(instruction: Instruction) -> float | None:
    """XLA's estimate of a fusion, by the model that suits it; None where it has none. See the top of this file."""
    modelled = instruction.modelled_times
    known = {model: modelled[model].total_us for model in _FUSIONS if model in modelled}
    if "performance" in modelled and _GEMM.search(instruction.attributes):
        known["performance"] = modelled["performance"].memory_us
    return min(known.values()) * 1e-6 if known else None
