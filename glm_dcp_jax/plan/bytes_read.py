"""Bytes that a compiled decode step reads on each GPU, by part, and the least that any program would have to.

What is read is what our kernels declare, and the operands of XLA's own instructions: fusions, matrix products and
copies. What collectives send is a part of its own, for every GPU that it is sent to: how often it is read depends on
how they are run. An array that one instruction writes and the next one reads counts, though it may still be in the
cache.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from glm_dcp_jax.plan.exposure import PartOf, Weight, no_parts
from glm_dcp_jax.plan.kernel_costs import Workload, declared_cost, kernel_name
from glm_dcp_jax.plan.operands import read_bytes
from glm_dcp_jax.plan.parts import COLLECTIVES, parts_of
from glm_dcp_jax.plan.schedule import Instruction, Schedule, arrays_of, calls
from glm_dcp_jax.plan.times import NAMES_FOR_DATA
from glm_dcp_jax.plan.weights import Leaf

Bytes = dict[str, float]


@dataclass(frozen=True)
class Program:
    """A compiled program of a step, in the order of its execution. leaves: of the parameters, those it takes; without
    any, all of it is one part. weight: how often its instructions run. times: how often a step runs all of it.
    """

    schedule: Schedule
    leaves: Sequence[Leaf] = ()
    weight: Weight = lambda position: 1.0
    times: float = 1.0

    @property
    def part_of(self) -> PartOf:
        """What its instructions belong to."""
        return parts_of(self.schedule, self.leaves) if self.leaves else no_parts


def bytes_read(programs: Sequence[Program], workload: Workload) -> Bytes:
    """Bytes by part (parts.PARTS) that one step of all programs reads on each GPU.

    Of a conditional, which holds what only overflows need, the branch that reads least; loops of a length that the
    compiler does not know, in such branches alone, count once.
    """
    total: Bytes = defaultdict(float)
    for program in programs:
        reader = _Reader(program.schedule, workload, program.part_of)
        for part, nbytes in reader.of(reader.schedule.entry.name, program.weight).items():
            total[part] += program.times * nbytes
    return dict(total)


def ratio(read: Mapping[str, float], floor: Mapping[str, float], sent: bool = False) -> float:
    """How many times the floor's bytes are read, all parts together; with what collectives send only if `sent`."""
    counted = (nbytes for part, nbytes in read.items() if sent or part != COLLECTIVES)
    return sum(counted) / sum(floor.values())


class _Reader:
    def __init__(self, schedule: Schedule, workload: Workload, part_of: PartOf) -> None:
        self.schedule, self.workload, self.part_of = schedule, workload, part_of

    def of(self, name: str, weight: Weight = lambda position: 1.0) -> Bytes:
        """What one run of a computation reads."""
        total: Bytes = defaultdict(float)
        instructions = self.schedule.computations[name].instructions
        shapes = {instruction.name: instruction.shape for instruction in instructions}
        for position, instruction in enumerate(instructions):
            times = weight(position)
            for part, nbytes in self._instruction(name, instruction, shapes).items():
                total[part] += times * nbytes
        return total

    def _instruction(self, computation: str, instruction: Instruction, shapes: dict[str, str]) -> Bytes:
        if instruction.opcode in NAMES_FOR_DATA or instruction.opcode.endswith("-done"):
            return {}
        if instruction.opcode == "conditional":
            branches = [self.of(branch) for branch, _ in calls(instruction)]
            return min(branches, key=lambda read: sum(read.values()))
        if called := calls(instruction):
            ((body, trips),) = called
            turns = 1 if trips is None else trips
            return {part: turns * nbytes for part, nbytes in self.of(body).items()}
        part = self.part_of(computation, instruction)
        if kernel := kernel_name(instruction):
            operands = [array for operand in instruction.operands for array in arrays_of(shapes[operand])]
            cost = declared_cost(kernel, operands, arrays_of(instruction.shape), self.workload)
            if cost is not None:
                return {part: float(cost.bytes_read)}
        return {part: float(sum(nbytes for _, nbytes in read_bytes(instruction, shapes, self.schedule)))}
