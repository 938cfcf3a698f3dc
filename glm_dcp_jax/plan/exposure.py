"""Which communication a compiled step waits for, and for how long, under a model of its instructions and of the link.

A schedule is played from top to bottom on two streams. One computes: every instruction takes the time that `Times`
models. The other carries collectives: one begins when the compute stream reaches its start and those before it are
over, and its done makes the compute stream wait for its end. *Exposed* is what the compute stream waits. A start that
comes late, too little compute before the done, and a queue of collectives all show as exposed time; nothing is assumed
about them. That each stream slows the other down is not in the model.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.plan.link import Wire, wire_bytes
from glm_dcp_jax.plan.schedule import Collective, Computation, Instruction, Schedule, calls
from glm_dcp_jax.plan.times import Times

TP_ALL_REDUCE, OVERFLOW, OTHER = "tp_all_reduce", "overflow", "other"
PURPOSES = (
    "embed",
    TP_ALL_REDUCE,
    "head",
    "mtp_join",
    "full_exchange",
    "shared_exchange",
    "query_gather",
    "merge",
    "index_merge",
    OVERFLOW,
    OTHER,
)
"""What collectives are for: named scopes of the network and of the attention paths, and `other` outside of them."""

PartOf = Callable[[str, Instruction], str]
"""What an instruction of a computation (its name) belongs to, for sums of time."""


def no_parts(computation: str, instruction: Instruction) -> str:
    """All of a program is one part."""
    return OTHER


Weight = Callable[[int], float]
"""How often a step runs each instruction of the entry, by its position, for each time that the program runs it."""


class Played(NamedTuple):
    """One collective as it went. times: how often a step runs it. seconds: from start to end if it is alone.

    exposed: seconds that the compute stream waits for it each time.
    """

    collective: Collective
    purpose: str
    times: float
    wire_bytes: float
    seconds: float
    exposed: float


@dataclass
class Timeline:
    """A step, modelled. All sums are over a step, `times` counted.

    compute: seconds of compute by what the estimate rests on. by_part: the same by what instructions belong to, without
    `launches`: what kernels take longer because each takes a least time. kernels: how many instructions take time.
    overflow: collectives of branches that were not taken. overflow_seconds: what taking these would add. unknown:
    instructions without a model, which took no time. assumed_trips: loops of unknown length, and how often they were
    taken to run.
    """

    exchanges: list[Played] = field(default_factory=list)
    compute: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    by_part: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    launches: float = 0.0
    kernels: float = 0.0
    overflow: list[Played] = field(default_factory=list)
    overflow_seconds: float = 0.0
    unknown: set[str] = field(default_factory=set)
    assumed_trips: dict[str, float] = field(default_factory=dict)

    @property
    def compute_seconds(self) -> float:
        """What the step would take if communication cost nothing."""
        return sum(self.compute.values())

    @property
    def exposed_seconds(self) -> float:
        """What it waits for collectives."""
        return sum(played.times * played.exposed for played in self.exchanges)

    @property
    def seconds(self) -> float:
        """The whole step."""
        return self.compute_seconds + self.exposed_seconds


def play(
    schedule: Schedule,
    times: Times,
    link: Link,
    at_once: int = 1,
    unknown_trips: float = 1.0,
    weight: Weight = lambda position: 1.0,
    part_of: PartOf = no_parts,
) -> Timeline:
    """The timeline of one run of the program.

    at_once: collectives that may be under way together (XLA's xla_gpu_experimental_parallel_collective_overlap_limit);
    they share the link's bandwidth, and their latencies overlap. unknown_trips: turns of loops whose length the
    compiler does not know. Of a conditional's branches the quickest is taken; what the longest would add is kept apart,
    with one turn of its loops of unknown length.
    """
    player = _Player(_Program.of(schedule, part_of), times, link, at_once, unknown_trips)
    player.run(schedule.entry.name, weight)
    return player.timeline


def one_after_the_other(timelines: Iterable[Timeline]) -> Timeline:
    """The timeline of a step that is compiled as several programs."""
    whole = Timeline()
    for each in timelines:
        whole.exchanges += each.exchanges
        for basis, seconds in each.compute.items():
            whole.compute[basis] += seconds
        for part, seconds in each.by_part.items():
            whole.by_part[part] += seconds
        whole.launches += each.launches
        whole.kernels += each.kernels
        whole.overflow += each.overflow
        whole.overflow_seconds += each.overflow_seconds
        whole.unknown |= each.unknown
        whole.assumed_trips |= each.assumed_trips
    return whole


def times_over(timeline: Timeline, times: float) -> Timeline:
    """The timeline of a program that a step runs so many times."""
    return replace(
        timeline,
        exchanges=[each._replace(times=times * each.times) for each in timeline.exchanges],
        compute=defaultdict(float, {basis: times * each for basis, each in timeline.compute.items()}),
        by_part=defaultdict(float, {part: times * each for part, each in timeline.by_part.items()}),
        launches=times * timeline.launches,
        kernels=times * timeline.kernels,
        overflow=[each._replace(times=times * each.times) for each in timeline.overflow],
        overflow_seconds=times * timeline.overflow_seconds,
    )


def purpose_of(instruction: Instruction) -> str:
    """What a collective is for, from the named scopes around it; the innermost counts, but overflow is overflow."""
    scopes = re.split(r"[/()]", instruction.op_name)
    if OVERFLOW in scopes:
        return OVERFLOW
    return next((scope for scope in reversed(scopes) if scope in PURPOSES), OTHER)


def layer_span(schedule: Schedule, first: int, last: int) -> range:
    """Positions in the entry that belong to layers first to last: each layer ends with its second TP all-reduce.

    Raises ValueError if the entry does not hold these layers one after the other.
    """
    entry = schedule.entry
    ends = [
        found.done
        for found in schedule.collectives
        if found.computation == entry.name and purpose_of(entry.instructions[found.start]) == TP_ALL_REDUCE
    ]
    if len(ends) < 2 * (last + 1):
        raise ValueError(
            f"layers {first} to {last} end with {2 * (last + 1)} collectives named {TP_ALL_REDUCE}, but the program "
            f"has {len(ends)} outside of loops; compile it without a scan over these layers"
        )
    return range(ends[2 * first - 1] + 1 if first else 0, ends[2 * last + 1] + 1)


class _Program(NamedTuple):
    """A schedule, and its collectives by computation and start."""

    schedule: Schedule
    collectives: dict[str, dict[int, Collective]]
    part_of: PartOf

    @staticmethod
    def of(schedule: Schedule, part_of: PartOf) -> "_Program":
        by_start: dict[str, dict[int, Collective]] = defaultdict(dict)
        for found in schedule.collectives:
            by_start[found.computation][found.start] = found
        return _Program(schedule, by_start, part_of)


class _Player:
    """Plays computations. clock: where the compute stream is, in seconds. wire: the link in use."""

    def __init__(
        self, program: _Program, times: Times, link: Link, at_once: int, unknown_trips: float
    ) -> None:
        self.program, self.times, self.link = program, times, link
        self.at_once, self.unknown_trips = at_once, unknown_trips
        self.timeline = Timeline()
        self.clock, self.wire = 0.0, Wire(link, at_once)

    def run(self, name: str, weight: Weight) -> None:
        """One run of a computation, whose instructions count as often as `weight` says."""
        computation: Computation = self.program.schedule.computations[name]
        starts = self.program.collectives.get(name, {})
        shapes = {instruction.name: instruction.shape for instruction in computation.instructions}
        under_way: dict[int, tuple[Collective, int]] = {}
        for position, instruction in enumerate(computation.instructions):
            if position in starts:
                started = starts[position]
                under_way[started.done] = started, self.wire.start(self.clock, wire_bytes(started))
            if position in under_way:
                self._wait(*under_way.pop(position), computation, weight)
            elif position not in starts:
                self._compute(name, instruction, shapes, weight(position))

    def _wait(self, collective: Collective, number: int, computation: Computation, weight: Weight) -> None:
        exposed = max(self.wire.end(number) - self.clock, 0.0)
        self.clock += exposed
        self.timeline.exchanges.append(
            Played(
                collective,
                purpose_of(computation.instructions[collective.start]),
                weight(collective.start),
                wire_bytes(collective),
                self.link.seconds(wire_bytes(collective)),
                exposed,
            )
        )

    def _compute(
        self, computation: str, instruction: Instruction, shapes: dict[str, str], weight: float
    ) -> None:
        if instruction.opcode == "while":
            self._loop(instruction, weight)
        elif instruction.opcode == "conditional":
            self._branch(instruction, weight)
        elif instruction.opcode == "call":
            for called, _ in calls(instruction):
                self.run(called, lambda _: weight)
        else:
            seconds, basis, added = self.times.of(instruction, shapes)
            self.clock += seconds
            if basis == "unknown":
                self.timeline.unknown.add(_title(instruction))
            elif basis != "nothing":
                part = self.program.part_of(computation, instruction)
                self.timeline.compute[basis] += weight * seconds
                self.timeline.by_part[part] += weight * (seconds - added)
                self.timeline.launches += weight * added
                self.timeline.kernels += weight

    def _loop(self, instruction: Instruction, weight: float) -> None:
        """The first turn begins with the link as it is; the second stands for all the others."""
        ((body, trips),) = calls(instruction)
        turns = float(trips) if trips is not None else self.unknown_trips
        if trips is None:
            self.timeline.assumed_trips[_title(instruction)] = turns
        self.run(body, lambda _: weight * min(turns, 1))
        if turns > 1:
            before = self.clock
            self.run(body, lambda _: weight * (turns - 1))
            self.clock += (self.clock - before) * max(turns - 2, 0)

    def _branch(self, instruction: Instruction, weight: float) -> None:
        branches = {name: self._alone(name, weight) for name, _ in calls(instruction)}
        quickest = min(branches, key=lambda name: branches[name].clock)
        longest = max(branches.values(), key=lambda player: player.clock)
        if longest.timeline.exchanges:
            self.timeline.overflow += longest.timeline.exchanges
            self.timeline.overflow_seconds += weight * (longest.clock - branches[quickest].clock)
        self.timeline.unknown |= longest.timeline.unknown
        self.run(quickest, lambda _: weight)

    def _alone(self, name: str, weight: float) -> "_Player":
        """A branch played on its own, with an idle link."""
        player = _Player(self.program, self.times, self.link, self.at_once, unknown_trips=1.0)
        player.run(name, lambda _: weight)
        return player


def _title(instruction: Instruction) -> str:
    """What an instruction without a model is called in a report."""
    return instruction.op_name or instruction.name
