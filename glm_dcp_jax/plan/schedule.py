"""The order in which a compiled program starts its work, read from XLA's scheduled HLO text.

A GPU executes each computation (the entry, a loop's body) from top to bottom. A collective that is split into a start
and a done runs beside what stands between the two; any other stops everything. That is what the schedule says, not how
long anything takes: a start may come late, and its compute may be too short to hide it.
"""

import json
import math
import re
from collections import defaultdict
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

COLLECTIVES = (
    "all-gather all-reduce reduce-scatter all-to-all ragged-all-to-all collective-permute collective-broadcast"
).split()
_IDLE = set(
    "parameter constant iota tuple get-tuple-element bitcast after-all add-dependency opt-barrier partition-id "
    "replica-id copy copy-start".split()
)
"""Instructions that compute nothing: names for data, and copies."""

_COMPUTATION = re.compile(r"(ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"\s+(?:ROOT )?%([\w.\-]+) = (\(.*?\)|\S+) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,<=]*)\]")
_OP_NAME = re.compile(r'op_name="([^"]*)"')
_COSTS = re.compile(r'"reification_cost":(\[[^\]]*\])')
_TRIP_COUNT = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')


class ModelledTime(NamedTuple):
    """XLA's estimate for one execution of an instruction, in microseconds: a model, nothing was measured.

    total_us is not the sum of the others: compute and memory access overlap.
    """

    total_us: float
    compute_us: float
    memory_us: float


@dataclass(frozen=True)
class Instruction:
    """One line of HLO. shape: its result as text. operands: names. attributes: what follows the operands.

    number: of a parameter, else None.
    """

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str = field(repr=False)
    number: int | None = None

    @property
    def collective(self) -> str | None:
        """Which collective this runs or starts, if any."""
        kind = self.opcode.removesuffix("-start")
        return kind if kind in COLLECTIVES else None

    @property
    def op_name(self) -> str:
        """Where in the traced function it comes from: jax's named scopes and primitives, separated by `/`; or ""."""
        found = _OP_NAME.search(self.attributes)
        return found[1] if found else ""

    @property
    def computes(self) -> bool:
        """True of kernels, library calls, loops and branches; not of copies, collectives, and names for data."""
        return not (self.collective or self.opcode.endswith("-done") or self.opcode in _IDLE)

    @cached_property
    def modelled_times(self) -> dict[str, ModelledTime]:
        """XLA's estimates for this instruction by the model's name; none for Pallas kernels and collectives.

        "performance": its analytical GPU model. "indexing-cost-model", "experimental-gemm-cost-model": for fusions that
        Triton compiles. "sol": from tables measured on Hopper and B200 (absent for other GPUs).
        """
        found = _COSTS.search(self.attributes)
        return {
            cost["name"] or "performance": ModelledTime(
                cost["exec_time_us"], cost["compute_time_us"], cost["memory_access_time_us"]
            )
            for cost in (json.loads(found[1]) if found else ())
        }


@dataclass(frozen=True)
class Computation:
    """A list of instructions in the order of their execution.

    executions: how often the program runs it, branches counted as if taken; None where a loop's length is not known to
    the compiler.
    """

    name: str
    instructions: tuple[Instruction, ...] = field(repr=False)
    executions: int | None


@dataclass(frozen=True)
class Collective:
    """One exchange between GPUs, and what runs beside it.

    kind: all-gather, all-reduce, ... start, done: positions in the instructions of `computation`, equal if the program
    waits for it. ranks: how many GPUs exchange with one another; 0 if the text does not say. operand_bytes,
    result_bytes: of one GPU. compute_between: names of the instructions between start and done that compute.
    """

    name: str
    kind: str
    computation: str
    executions: int | None
    start: int
    done: int
    ranks: int
    operand_bytes: int
    result_bytes: int
    compute_between: tuple[str, ...]

    @property
    def instructions_between(self) -> int:
        """Instructions of any kind between start and done."""
        return max(self.done - self.start - 1, 0)

    @property
    def blocks(self) -> bool:
        """True if nothing computes beside it."""
        return not self.compute_between


@dataclass(frozen=True)
class Schedule:
    """Computations that a program executes, in the text's order: what a loop or branch runs comes before it.

    Bodies of fusions and of reductions are not among them: they are part of the instruction that uses them. bodies:
    these, by name, in no order of execution.
    """

    computations: dict[str, Computation]
    bodies: dict[str, tuple[Instruction, ...]] = field(default_factory=dict, repr=False)

    @property
    def entry(self) -> Computation:
        """Where the program begins: the text's last computation."""
        return next(reversed(self.computations.values()))

    @cached_property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives, in the order of their starts within each computation."""
        return tuple(
            found for computation in self.computations.values() for found in _collectives(computation)
        )

    @cached_property
    def modelled_times(self) -> dict[str, dict[str, ModelledTime]]:
        """By instruction and then by model: see Instruction.modelled_times."""
        return {
            instruction.name: times
            for computation in self.computations.values()
            for instruction in computation.instructions
            if (times := instruction.modelled_times)
        }


def parse_schedule(hlo: str) -> Schedule:
    """Read HLO text as `Compiled.as_text()` gives it. Raises ValueError if that text is not scheduled."""
    if "is_scheduled=true" not in hlo.partition("\n")[0]:
        raise ValueError(
            "this HLO has no order of execution; pass the text of a compiled program, not of a lowered one"
        )
    computations: dict[str, list[Instruction]] = {}
    entry, current = "", []
    for line in hlo.splitlines():
        if found := _INSTRUCTION.match(line):
            name, shape, opcode, rest = found.groups()
            operands, _, attributes = rest.partition(")")
            names = tuple(re.findall(r"%([\w.\-]+)", operands))
            number = int(operands) if opcode == "parameter" else None
            current.append(Instruction(name, opcode, shape, names, attributes, number))
        elif found := _COMPUTATION.match(line):
            current = computations[found[2]] = []
            entry = found[2] if found[1] else entry
    executions = _executions(computations, entry)
    return Schedule(
        {
            name: Computation(name, tuple(instructions), executions[name])
            for name, instructions in computations.items()
            if name in executions
        },
        {name: tuple(instructions) for name, instructions in computations.items() if name not in executions},
    )


def _executions(computations: dict[str, list[Instruction]], entry: str) -> dict[str, int | None]:
    """How often each computation that is reached from the entry runs."""
    executions: dict[str, int | None] = defaultdict(int)

    def visit(name: str, times: int | None) -> None:
        before = executions[name]
        executions[name] = None if before is None or times is None else before + times
        for instruction in computations[name]:
            for called, repeats in calls(instruction):
                visit(called, None if times is None or repeats is None else times * repeats)

    visit(entry, 1)
    return executions


def calls(instruction: Instruction) -> list[tuple[str, int | None]]:
    """Computations that an instruction runs as such, and how often: None for a loop of unknown length.

    A conditional runs one of its branches.
    """
    attributes = instruction.attributes

    def named(key: str) -> list[str]:
        found = re.search(rf"\b{key}=(\{{[^}}]*\}}|%[\w.\-]+)", attributes)
        return re.findall(r"%([\w.\-]+)", found[1]) if found else []

    if instruction.opcode == "while":
        trips = _TRIP_COUNT.search(attributes)
        count = int(trips[1]) if trips else None
        return [(body, count) for body in named("body")]
    if instruction.opcode == "conditional":
        keys = ("branch_computations", "true_computation", "false_computation")
        return [(branch, 1) for key in keys for branch in named(key)]
    if instruction.opcode == "call":
        return [(called, 1) for called in named("to_apply")]
    return []


def _collectives(computation: Computation) -> list[Collective]:
    instructions = computation.instructions
    position = {instruction.name: place for place, instruction in enumerate(instructions)}
    done_at = {
        instruction.operands[0]: place
        for place, instruction in enumerate(instructions)
        if instruction.opcode.endswith("-done")
    }
    found = []
    for start, instruction in enumerate(instructions):
        if instruction.collective is None:
            continue
        done = done_at.get(instruction.name, start)
        between = instructions[start + 1 : done]
        found.append(
            Collective(
                name=instruction.name,
                kind=instruction.collective,
                computation=computation.name,
                executions=computation.executions,
                start=start,
                done=done,
                ranks=_ranks(instruction.attributes),
                operand_bytes=sum(
                    shape_bytes(instructions[position[name]].shape) for name in instruction.operands
                ),
                result_bytes=shape_bytes(instructions[done].shape),
                compute_between=tuple(other.name for other in between if other.computes),
            )
        )
    return found


class ArrayShape(NamedTuple):
    """An array as HLO writes it: f32[8,16]."""

    dtype: str
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """A type's first number is its bits; pred has 8, and a token none."""
        bits = re.search(r"\d+", self.dtype)
        return -(-math.prod(self.sizes) * (int(bits[0]) if bits else 8 * (self.dtype == "pred")) // 8)


def arrays_of(shape: str) -> list[ArrayShape]:
    """The array of a shape, or all arrays of a tuple's."""
    return [
        ArrayShape(dtype, tuple(int(size) for size in sizes.replace("<=", "").split(",") if size))
        for dtype, sizes in _ARRAY.findall(shape)
    ]


def shape_bytes(shape: str) -> int:
    """Bytes of an array's shape, or of all arrays in a tuple's."""
    return sum(array.nbytes for array in arrays_of(shape))


def _ranks(attributes: str) -> int:
    """The size of a collective's groups in any of the ways that XLA writes them."""
    if found := re.search(r"replica_groups=\{\{([\d,]+)\}", attributes):
        return found[1].count(",") + 1
    if found := re.search(r"replica_groups=\[\d+,(\d+)\]<=", attributes):
        return int(found[1])
    if found := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):  # from jax 0.12 on
        sizes = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", found[1])}
        ranks = 1
        for axis in re.findall(r"'(\w+)'", found[2]):
            ranks *= sizes[axis]
        return ranks
    if found := re.search(r"source_target_pairs=\{(.*?)\}\}", attributes):
        return len(set(re.findall(r"\d+", found[1])))
    return 0
