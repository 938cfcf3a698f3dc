"""What a decode step of GLM-5.2 waits for on GPUs that are not here: compile it, and read its schedule.

`scripts/dcp_schedule.py` prints this as JSON. docs/ahead-of-time.md says what the figures are: times are modelled.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from glm_dcp_jax.cache.capacity import GIB, page_bytes
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import CacheConfig, ConfigError, EngineConfig, ModelConfig, ParallelConfig
from glm_dcp_jax.config.engine import at_least, one_of
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.formats import Formats
from glm_dcp_jax.kernels.sparse_attention import MOST_ROWS
from glm_dcp_jax.model.stored_weights import ALL_PLAIN
from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.plan import glm52
from glm_dcp_jax.plan.bytes_read import Program
from glm_dcp_jax.plan.compile import Compiled
from glm_dcp_jax.plan.exposure import PURPOSES, Played, Timeline
from glm_dcp_jax.plan.gpus import Target
from glm_dcp_jax.plan.planned_step import PlannedStep, check_layers
from glm_dcp_jax.plan.schedule import Schedule

PATHS = ("queries", "records", "bulk")
MOST_DRAFTS = 7

NOTE = (
    "All times are modelled: XLA's estimates, our kernels' declared costs, bytes over bandwidth, and the stated link. "
    "Nothing was measured."
)
_SCHEDULER_SHARE = 0.8
"""XLA's latency-hiding scheduler works within this share of the device's memory, less arguments and results."""


@dataclass(frozen=True)
class DecodeStep:
    """A decode step of GLM-5.2: `requests` of 1 + drafts rows, each with `context` tokens, all of which it sees.

    layers: `short` compiles 14 layers, one group of which then stands for 17; `full` compiles all 78. segments:
    programs that all 78 are compiled as, None: as many as the engine would. Other fields are the engine's flags.
    Raises ConfigError for what cannot be.
    """

    target: Target
    path: str
    dcp: int
    tp: int
    requests: int = 1
    drafts: int = 0
    context: int = 131_072
    kv_cache_dtype: str = "nvfp4_ds_mla"
    interleave: int = 1
    transport: str = "auto"
    comm_backend: str = "ag_rs"
    indexer_shards: int = 1
    layers: str = "short"
    segments: int | None = None

    def __post_init__(self) -> None:
        one_of("--path", self.path, PATHS)
        at_least("--mtp", self.drafts, 0, MOST_DRAFTS)
        at_least("--concurrency", self.requests, 1, MOST_ROWS // self.rows)
        at_least("--context", self.context, self.rows, self.model.max_position_embeddings)
        if self.tp > self.target.count:
            raise ConfigError(f"--tp {self.tp} needs {self.tp} GPUs, but the target is {self.target}")
        if self.dcp == 1:
            raise ConfigError("--dcp 1 leaves nothing to exchange; use 2 or more")
        self._check_cache()
        check_layers(self.layers, self.segments)

    @property
    def rows(self) -> int:
        """Rows of a request: its last token, and its drafts."""
        return 1 + self.drafts

    @cached_property
    def model(self) -> ModelConfig:
        """GLM-5.2."""
        return glm52.glm52()

    @cached_property
    def config(self) -> EngineConfig:
        """The engine's flags that matter here."""
        parallel = ParallelConfig(
            self.tp,
            self.dcp,
            self.comm_backend,
            dcp_decode_path=self.path,
            dcp_transport=self.transport,
            dcp_indexer_shards=self.indexer_shards,
            step_segments=self.segments,
        )
        cache = CacheConfig(cp_kv_cache_interleave_size=self.interleave, kv_cache_dtype=self.kv_cache_dtype)
        return EngineConfig("GLM-5.2", parallel, cache, dtype=self.model.dtype)

    @cached_property
    def planned(self) -> PlannedStep:
        """The step as any engine's."""
        return PlannedStep(
            self.target,
            self.config,
            self.model,
            ALL_PLAIN,
            self.requests,
            self.rows,
            self.context,
            self.layers,
        )

    @property
    def blueprint(self) -> Blueprint:
        """The engine as shapes."""
        return self.planned.blueprint

    def compile(self) -> tuple[Compiled, ...]:
        """The step's programs through all of XLA's GPU compiler: about a minute of one core for 14 layers."""
        return self.planned.compile()

    def timeline(self, schedules: Sequence[Schedule], link: Link, least_seconds: float = 0.0) -> Timeline:
        """The modelled step of these programs. least_seconds: what any kernel takes at least."""
        programs = [Program(schedule, weight=self.planned.weight(schedule)) for schedule in schedules]
        return self.planned.timeline(programs, link, least_seconds)

    def _check_cache(self) -> None:
        """Raise ConfigError, besides those of the engine's own flags, for requests whose cache the GPUs cannot hold."""
        cache = self.config.cache
        layout = Layout(cache.block_size, self.dcp, self.interleave, self.indexer_shards)
        record = Formats.of(self.config, self.model, on_cpu=False).record
        pages = self.requests * layout.pages_for(self.context) + 1
        needed, there = pages * page_bytes(self.model, layout, record), self.target.memory_bytes
        if needed > there:
            raise ConfigError(
                f"--concurrency {self.requests} of --context {self.context} needs a cache of {needed / GIB:,.1f} GiB "
                f"on each GPU, which has {there / GIB:,.1f} GiB; lower one of them, or raise --dcp"
            )


def report(step: DecodeStep, programs: Iterable[Compiled], timeline: Timeline) -> dict[str, Any]:
    """One path's figures, per decode step of all 78 layers; memory is that of each compiled program."""
    return {
        "step_us": _us(timeline.seconds),
        "compute_us": _us(timeline.compute_seconds),
        "exposed_us": _us(timeline.exposed_seconds),
        "compute_us_by_basis": {basis: _us(seconds) for basis, seconds in timeline.compute.items()},
        "kernels": round(timeline.kernels),
        "collectives": _sums(timeline.exchanges),
        "by_purpose": {
            purpose: _sums(played)
            for purpose in PURPOSES
            if (played := [each for each in timeline.exchanges if each.purpose == purpose])
        },
        "if_all_overflow": _sums(timeline.overflow) | {"added_us": _us(timeline.overflow_seconds)},
        "without_model": sorted(timeline.unknown),
        "assumed_trips": timeline.assumed_trips,
        "memory": [_memory(step.target, program) for program in programs],
    }


def _sums(exchanges: Iterable[Played]) -> dict[str, Any]:
    """Figures of some collectives, per step and device.

    blocking: nothing computes beside them. hidden: the others, of which partly_exposed are waited for all the same.
    """
    played = list(exchanges)
    blocking = [each for each in played if each.collective.blocks]
    beside = [each for each in played if not each.collective.blocks]
    return {
        "count": round(sum(each.times for each in played)),
        "blocking": round(sum(each.times for each in blocking)),
        "hidden": round(sum(each.times for each in beside)),
        "partly_exposed": round(sum(each.times for each in beside if each.exposed > 0)),
        "wire_bytes": round(sum(each.times * each.wire_bytes for each in played)),
        "transfer_us": _us(sum(each.times * each.seconds for each in played)),
        "exposed_us": _us(sum(each.times * each.exposed for each in played)),
    }


def _memory(target: Target, program: Compiled) -> dict[str, int]:
    memory = program.memory
    kept = memory.argument_bytes + memory.output_bytes - memory.alias_bytes
    return memory._asdict() | {
        "peak_bytes": memory.peak_bytes,
        "scheduler_bytes": round(_SCHEDULER_SHARE * target.memory_bytes) - kept,
    }


def _us(seconds: float) -> float:
    return round(seconds * 1e6, 2)
