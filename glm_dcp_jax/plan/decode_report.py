"""What each decode path's step waits for, reads and takes on GPUs that are not here: compiled, or by arithmetic."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.plan.bytes_read import Bytes, bytes_read, ratio
from glm_dcp_jax.plan.capacity import Capacity
from glm_dcp_jax.plan.exposure import Played, Timeline
from glm_dcp_jax.plan.floor import Floor
from glm_dcp_jax.plan.parts import INDEX_KEYS, RECORDS
from glm_dcp_jax.plan.planned_step import PlannedStep
from glm_dcp_jax.plan.remedies import Case

PATHS = ("queries", "records", "bulk")
TP_PURPOSES = ("embed", "tp_all_reduce", "head", "mtp_join")
"""Collectives of tensor parallelism; all others exchange records, queries or selections."""
GROUPS = ("weights", "records", "indexer", "all_reduces", "exchanges", "launches", "other")
"""The floor's parts; `launches`: what kernels take longer because each takes a least time. `other` has no floor."""
_INDEXER = ("indexer", INDEX_KEYS)
_DRAFT_COLLECTIVES = 5
"""Of tensor parallelism, in each draft: of its embedding, its input projection, its layer's two halves, its token."""


@dataclass(frozen=True)
class Load:
    """What steps are planned for. least_seconds: that any kernel takes. layers: see PlannedStep."""

    requests: int
    context: int
    link: Link
    least_seconds: float
    layers: str


def paths_of(case: Case) -> tuple[str, ...]:
    """The paths that decode may take: the one that was asked for, all of `auto`, one where nothing is exchanged."""
    parallel = case.config.parallel
    if parallel.decode_context_parallel_size == 1:
        return PATHS[:1]
    return PATHS if parallel.dcp_decode_path == "auto" else (parallel.dcp_decode_path,)


def floor_of(capacity: Capacity, path: str, work: Load) -> Floor:
    """The least bytes of a step on a path."""
    blueprint = capacity.blueprint
    drafts = blueprint.drafts_each
    return Floor(
        capacity.model,
        capacity.leaves,
        blueprint.layout,
        blueprint.record,
        path,
        work.requests,
        1 + drafts,
        work.context,
        drafts,
    )


def by_arithmetic(capacity: Capacity, path: str, work: Load) -> dict[str, Any]:
    """A step's figures without a compiled program: its floor, and collectives as the decode policy counts them."""
    blueprint, model, link = capacity.blueprint, capacity.model, work.link
    drafts, parallel = blueprint.drafts_each, blueprint.config.parallel
    rows, tp = work.requests * (1 + drafts), parallel.tensor_parallel_size
    local = blueprint.layout.pages_for(work.context) * blueprint.layout.block_size
    exchange = blueprint.policy.choose(path, work.requests, 1 + drafts, local)
    floor = floor_of(capacity, path, work)
    least = floor.total()
    reading = sum(least.values()) / capacity.target.memory_bandwidth
    if tp == 1:
        blocking, received, waited = 0, 0.0, 0.0
    else:
        layers = model.num_hidden_layers
        draft_rows = rows + (drafts - 1) * work.requests if drafts else 0
        sums = (2 * layers + 1) * rows + (_DRAFT_COLLECTIVES - 2) * draft_rows
        summed = 2 * (tp - 1) / tp * sums * model.hidden_size * blueprint.formats.compute.itemsize
        gathered = (tp - 1) / tp * rows * model.vocab_size * 4
        blocking = 2 * layers + 2 + _DRAFT_COLLECTIVES * drafts
        received, waited = summed + gathered, blocking * link.latency + (summed + gathered) / link.bandwidth
    exchanges = blueprint.layout.world > 1
    figures = _figures(
        "arithmetic",
        blocking + (exchange.blocking if exchanges else 0),
        exchange.hidden if exchanges else 0,
        received + (exchange.received if exchanges else 0),
        reading + waited + (exchange.waited if exchanges else 0.0),
        work.requests,
        drafts,
    )
    return figures | {"floor_bytes_by_part": {part: round(nbytes) for part, nbytes in sorted(least.items())}}


def compiled(case: Case, capacity: Capacity, path: str, work: Load) -> dict[str, Any]:
    """A step's figures from its compiled programs, next to the floor's."""
    config = case.config
    if capacity.blueprint.layout.world > 1:
        config = replace(config, parallel=replace(config.parallel, dcp_decode_path=path))
    drafts = capacity.blueprint.drafts_each
    step = PlannedStep(
        case.target,
        config,
        case.planned.config,
        case.planned.weights,
        work.requests,
        1 + drafts,
        work.context,
        work.layers,
        capacity.pages if work.layers == "full" and capacity.pages else None,
    )
    main, drafting = step.compile(), step.compile_drafts()
    all_programs = [*main, *(program for program, _ in drafting)]
    programs = step.programs(main, drafting)
    timeline = step.timeline(programs, work.link, work.least_seconds)
    draft_seconds = step.timeline(programs[len(main) :], work.link, work.least_seconds).seconds
    read, least = bytes_read(programs, step.workload), step.floor.total()
    blocking = sum(each.times for each in timeline.exchanges if each.collective.blocks)
    hidden = sum(each.times for each in timeline.exchanges if not each.collective.blocks)
    figures = _figures(
        "compiled, modelled",
        round(blocking),
        round(hidden),
        sum(each.times * each.wire_bytes for each in timeline.exchanges),
        timeline.seconds,
        work.requests,
        drafts,
    )
    return figures | {
        "modelled_draft_ms": round(1e3 * draft_seconds, 4),
        "ms_by_part": _rounded(_groups_of(timeline)),
        "floor_ms_by_part": _rounded(_floor_groups(least, timeline, capacity, work.link)),
        "bytes_read_by_part": {part: round(nbytes) for part, nbytes in sorted(read.items())},
        "floor_bytes_by_part": {part: round(nbytes) for part, nbytes in sorted(least.items())},
        "bytes_read_to_floor": round(ratio(read, least), 3),
        "bytes_read_and_sent_to_floor": round(ratio(read, least, sent=True), 3),
        "kernels": round(timeline.kernels),
        "temporaries": max(program.memory.temp_bytes for program in all_programs),
        "programs": [program.memory._asdict() for program in all_programs],
        "without_model": sorted(timeline.unknown),
    }


def _figures(
    basis: str, blocking: int, hidden: int, received: float, seconds: float, requests: int, drafts: int
) -> dict[str, Any]:
    """drafts: tokens that are guessed; a step gives each request one token, and those of them that are accepted."""
    return {
        "basis": basis,
        "blocking_collectives": blocking,
        "hidden_collectives": hidden,
        "bytes_received_per_gpu": round(received),
        "modelled_step_ms": round(1e3 * seconds, 4),
        "modelled_tokens_per_s": {
            "no_draft_accepted": round(requests / seconds, 1),
            "all_drafts_accepted": round(requests * (1 + drafts) / seconds, 1),
        },
    }


def _groups_of(timeline: Timeline) -> dict[str, float]:
    """Seconds of the step by the floor's parts."""
    total = dict.fromkeys(GROUPS, 0.0)
    for part, seconds in timeline.by_part.items():
        total[_group(part)] += seconds
    for each in timeline.exchanges:
        total[_purpose(each)] += each.times * each.exposed
    total["launches"] = timeline.launches
    return total


def _floor_groups(least: Bytes, timeline: Timeline, capacity: Capacity, link: Link) -> dict[str, float]:
    """Bytes over the bandwidth; of collectives those that the step has, each alone; of exchanges one of each Full
    layer, which nothing can hide, bringing its records once."""
    total = dict.fromkeys(GROUPS, 0.0)
    for part, nbytes in least.items():
        total[_group(part)] += nbytes / capacity.target.memory_bandwidth
    for each in timeline.exchanges:
        if _purpose(each) == "all_reduces":
            total["all_reduces"] += each.times * each.seconds
    world = capacity.blueprint.layout.world
    if world > 1:
        full = capacity.model.num_full_layers
        records = least[RECORDS] / capacity.model.num_hidden_layers
        total["exchanges"] = full * link.seconds((world - 1) / world * records)
    return total


def _purpose(played: Played) -> str:
    return "all_reduces" if played.purpose in TP_PURPOSES else "exchanges"


def _group(part: str) -> str:
    if part in _INDEXER:
        return "indexer"
    if part in (RECORDS, "other", "collectives"):
        return part if part == RECORDS else "other"
    return "weights"


def _rounded(parts: Mapping[str, float]) -> dict[str, float]:
    """Seconds as milliseconds."""
    return {part: round(1e3 * seconds, 4) for part, seconds in parts.items()}


def prefill_temporaries(case: Case, capacity: Capacity, work: Load) -> int:
    """Bytes of temporaries of the largest prefill chunk, compiled."""
    longest = capacity.longest
    step = PlannedStep(
        case.target, case.config, case.planned.config, case.planned.weights, 1, 1, longest, work.layers
    )
    chunk = min(case.config.scheduler.max_num_batched_tokens, longest)
    return max(program.memory.temp_bytes for program in step.compile_chunk(chunk))
