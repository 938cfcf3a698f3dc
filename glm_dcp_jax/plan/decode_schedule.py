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
from glm_dcp_jax.engine.steps import BlockShape, StepShape
from glm_dcp_jax.kernels.sparse_attention import MOST_ROWS
from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.plan import glm52
from glm_dcp_jax.plan.compile import Compiled, compile_lowered
from glm_dcp_jax.plan.exposure import (
    PURPOSES,
    Played,
    Timeline,
    Weight,
    layer_span,
    one_after_the_other,
    play,
)
from glm_dcp_jax.plan.gpus import Target, devices
from glm_dcp_jax.plan.kernel_costs import Workload
from glm_dcp_jax.plan.schedule import Schedule
from glm_dcp_jax.plan.times import Times, expected_experts

PATHS = ("queries", "records", "bulk")
LAYERS = ("short", "full")
MOST_DRAFTS = 7

NOTE = (
    "All times are modelled: XLA's estimates, our kernels' declared costs, bytes over bandwidth, and the stated link. "
    "Nothing was measured."
)
_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"
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
        one_of("--layers", self.layers, LAYERS)
        at_least("--mtp", self.drafts, 0, MOST_DRAFTS)
        at_least("--concurrency", self.requests, 1, MOST_ROWS // self.rows)
        at_least("--context", self.context, self.rows, self.model.max_position_embeddings)
        if self.layers == "short" and self.segments not in (None, 1):
            raise ConfigError(f"--segments {self.segments} needs all layers; add --layers full")
        if self.tp > self.target.count:
            raise ConfigError(f"--tp {self.tp} needs {self.tp} GPUs, but the target is {self.target}")
        if self.dcp == 1:
            raise ConfigError("--dcp 1 leaves nothing to exchange; use 2 or more")
        self._check_cache()

    @property
    def rows(self) -> int:
        """Rows of a request: its last token, and its drafts."""
        return 1 + self.drafts

    @cached_property
    def model(self) -> ModelConfig:
        """GLM-5.2, all of it or shortened."""
        return glm52.glm52() if self.layers == "full" else glm52.short_glm52()

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
            step_segments=1 if self.layers == "short" else self.segments,
        )
        cache = CacheConfig(cp_kv_cache_interleave_size=self.interleave, kv_cache_dtype=self.kv_cache_dtype)
        return EngineConfig("GLM-5.2", parallel, cache, dtype=self.model.dtype)

    @cached_property
    def gpus(self) -> list[Any]:
        """The devices that are compiled for."""
        return list(devices(self.target))[: self.tp]

    @cached_property
    def blueprint(self) -> Blueprint:
        """The engine as shapes."""
        return Blueprint(self.config, self.model, make_mesh(self.config.parallel, self.gpus))

    @cached_property
    def workload(self) -> Workload:
        """What our kernels' costs depend on beside their shapes."""
        return Workload(
            self.blueprint.record,
            self.context,
            listed=1 / self.dcp if self.path == "queries" else 1.0,
            shared_memory=self.blueprint.steps.settings.shared_memory,
        )

    def compile(self) -> tuple[Compiled, ...]:
        """The step's programs through all of XLA's GPU compiler: about a minute of one core for 14 layers."""
        steps, pages = self.blueprint.steps, self.blueprint.layout.pages_for(self.context)
        block = BlockShape("decode", self.requests, self.rows, pages)
        shape = StepShape((block,), block.total_rows)
        pools = self.blueprint.pools(self.requests * pages + 1)
        lowered = steps.lower(shape, self.blueprint.parameters(), pools)
        return tuple(compile_lowered(program, self.gpus, steps.compiler_options) for program in lowered)

    def timeline(self, schedules: Sequence[Schedule], link: Link, least_seconds: float = 0.0) -> Timeline:
        """The modelled step of these programs. least_seconds: what any kernel takes at least."""
        rows, model = self.requests * self.rows, self.model
        experts = expected_experts(rows, model.n_routed_experts, model.num_experts_per_tok)
        return one_after_the_other(
            play(
                schedule,
                Times.on(self.target, self.workload, least_seconds),
                link,
                at_once=self.blueprint.steps.compiler_options.get(_AT_ONCE, 1),
                unknown_trips=experts,
                weight=self._weight(schedule),
            )
            for schedule in schedules
        )

    def _check_cache(self) -> None:
        """Raise ConfigError, besides those of the engine's own flags, for requests whose cache the GPUs cannot hold."""
        cache = self.config.cache
        layout = Layout(cache.block_size, self.dcp, self.interleave, self.indexer_shards)
        record = Formats.of(self.config, self.model, on_cpu=False).record
        pages = self.requests * layout.pages_for(self.context) + 1
        needed, there = pages * page_bytes(glm52.glm52(), layout, record), self.target.memory_bytes
        if needed > there:
            raise ConfigError(
                f"--concurrency {self.requests} of --context {self.context} needs a cache of {needed / GIB:,.1f} GiB "
                f"on each GPU, which has {there / GIB:,.1f} GiB; lower one of them, or raise --dcp"
            )

    def _weight(self, schedule: Schedule) -> Weight:
        if self.layers == "full":
            return lambda position: 1.0
        middle = layer_span(schedule, *glm52.MIDDLE)
        return lambda position: float(glm52.MIDDLE_COUNTS) if position in middle else 1.0


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
