"""Where the operands of a program's instructions come from, and how much of them an instruction reads.

An instruction names arrays of its own computation. Through bitcasts, tuples, loops and branches these lead back to the
program's arguments, whose names jax writes into the text: `leaves[3]` is a weight, `pools.ckv` a pool.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from glm_dcp_jax.plan.schedule import Instruction, Schedule, calls, shape_bytes

_SAME = ("bitcast", "copy", "opt-barrier", "copy-start", "copy-done", "reshape", "transpose")
_PARTIAL = ("dynamic-slice", "gather", "slice")
_INDEX = re.compile(r"\bindex=(\d+)")
_BODY = re.compile(r"\bcalls=%([\w.\-]+)")

Origin = Any
"""An argument's name, "" for what was computed, or a tuple of origins."""


@dataclass
class Origins:
    """The argument that each array of each computation is. names: by computation and instruction."""

    names: dict[tuple[str, str], Origin] = field(default_factory=dict)

    @staticmethod
    def of(schedule: Schedule) -> "Origins":
        """Of a whole program. What a loop carries is taken to be what it was given: weights are."""
        origins = Origins()
        origins._visit(schedule, schedule.entry.name, None)
        return origins

    def argument(self, computation: str, name: str) -> str:
        """The argument that an array is, or ""."""
        found = self.names.get((computation, name), "")
        return found if isinstance(found, str) else ""

    def _visit(self, schedule: Schedule, computation: str, given: list[Origin] | None) -> None:
        for instruction in schedule.computations[computation].instructions:
            known = [self.names.get((computation, name), "") for name in instruction.operands]
            self.names[computation, instruction.name] = _origin(instruction, known, given)
            for number, (called, _) in enumerate(calls(instruction)):
                self._visit(schedule, called, _passed(instruction, known, number))


def _origin(instruction: Instruction, known: list[Origin], given: list[Origin] | None) -> Origin:
    opcode = instruction.opcode
    if opcode == "parameter":
        if given is None:
            return instruction.op_name
        return given[instruction.number or 0]
    if opcode == "get-tuple-element":
        found = _INDEX.search(instruction.attributes)
        whole = known[0]
        return whole[int(found[1])] if found and isinstance(whole, tuple) else ""
    if opcode in ("tuple", "while"):
        return tuple(known) if opcode == "tuple" else known[0]
    return known[0] if opcode in _SAME and known else ""


def _passed(instruction: Instruction, known: list[Origin], number: int) -> list[Origin]:
    """What a called computation gets: a branch its own operand, behind the one that chooses."""
    if instruction.opcode == "conditional":
        return [known[1 + number]]
    return known


def read_bytes(
    instruction: Instruction, shapes: dict[str, str], schedule: Schedule
) -> Iterator[tuple[str, int]]:
    """(operand, bytes that are read of it) of an instruction that is none of our kernels; shapes: by name.

    A fusion reads of an operand that it only slices or gathers from as much as it takes, each time; of one that it
    updates in place, nothing.
    """
    body = _BODY.search(instruction.attributes)
    inner = schedule.bodies.get(body[1], ()) if body and instruction.opcode == "fusion" else ()
    if not inner and instruction.opcode in _PARTIAL and instruction.operands:
        yield instruction.operands[0], shape_bytes(instruction.shape)
        return
    parameters = {each.number: each.name for each in inner if each.opcode == "parameter"}
    for number, name in enumerate(instruction.operands):
        whole = shape_bytes(shapes[name])
        own = parameters.get(number)
        yield name, whole if own is None else min(whole, _taken(own, inner, whole))


def _taken(name: str, body: tuple[Instruction, ...], whole: int) -> int:
    """Bytes that a fusion's body takes of one of its parameters, or `whole` where that is all of it."""
    total = 0
    for user in body:
        if name not in user.operands:
            continue
        if user.opcode in ("bitcast", "get-tuple-element"):
            total += _taken(user.name, body, whole)
        elif user.opcode in _PARTIAL and user.operands[0] == name:
            total += shape_bytes(user.shape)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
            continue
        else:
            return whole
    return total
