"""One decode step of an engine on GPUs that are not here: its programs, and how long they take by a model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from glm_dcp_jax.config import ConfigError, EngineConfig, ModelConfig
from glm_dcp_jax.config.engine import one_of
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.draft_steps import DraftShape, FirstShape, NextShape
from glm_dcp_jax.engine.steps import BlockShape, StepShape
from glm_dcp_jax.model.stored_weights import WeightFormats
from glm_dcp_jax.parallel.capacity import NEW_PER_ROW
from glm_dcp_jax.parallel.link import Link
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.plan.bytes_read import Program
from glm_dcp_jax.plan.compile import Compiled, compile_lowered
from glm_dcp_jax.plan.exposure import Timeline, Weight, layer_span, one_after_the_other, play, times_over
from glm_dcp_jax.plan.floor import Floor
from glm_dcp_jax.plan.gpus import Target, devices
from glm_dcp_jax.plan.kernel_costs import Workload
from glm_dcp_jax.plan.schedule import Schedule
from glm_dcp_jax.plan.shortened import Repeat, Shortened, shortened
from glm_dcp_jax.plan.times import Times, expected_experts
from glm_dcp_jax.plan.weights import leaves

LAYERS = ("short", "full")
_AT_ONCE = "xla_gpu_experimental_parallel_collective_overlap_limit"


@dataclass(frozen=True)
class PlannedStep:
    """A decode step of `requests` requests of `rows` rows, each with `context` tokens, all of which it sees.

    config: the engine's flags, with the decode path that is meant. model, weights: all of the model. layers: `short`
    compiles two groups of each run of equal share groups, one of which then stands for those left out; `full` compiles
    all. cache_pages: of the pools; None: as many as the requests need. Raises ConfigError for what cannot be.

        programs = step.programs(step.compile(), step.compile_drafts())
        read, least = bytes_read(programs, step.workload), step.floor.total()
    """

    target: Target
    config: EngineConfig
    model: ModelConfig
    weights: WeightFormats
    requests: int
    rows: int
    context: int
    layers: str = "short"
    cache_pages: int | None = None

    def __post_init__(self) -> None:
        check_layers(self.layers, self.config.parallel.step_segments)

    @cached_property
    def gpus(self) -> list[Any]:
        """The devices that are compiled for."""
        return list(devices(self.target))[: self.config.parallel.tensor_parallel_size]

    @cached_property
    def part(self) -> Shortened:
        """What of the model is compiled."""
        if self.layers == "full":
            layers = self.model.num_hidden_layers
            return Shortened(self.model, self.weights, (), tuple(range(layers + 1)))
        return shortened(self.model, self.weights)

    @property
    def repeats(self) -> tuple[Repeat, ...]:
        """Layers of the compiled program that count more than once."""
        return self.part.repeats

    @cached_property
    def blueprint(self) -> Blueprint:
        """The engine as shapes."""
        parallel = self.config.parallel
        if self.layers == "short":
            parallel = replace(parallel, step_segments=1)
        config = replace(self.config, parallel=parallel)
        return Blueprint(config, self.part.model, make_mesh(parallel, self.gpus), weights=self.part.weights)

    @property
    def experts(self) -> float:
        """Different experts of a layer that the step's rows choose, if each chooses at random."""
        model = self.model
        if not model.n_routed_experts:
            return 0.0
        return expected_experts(self.requests * self.rows, model.n_routed_experts, model.num_experts_per_tok)

    @cached_property
    def workload(self) -> Workload:
        """What our kernels' costs depend on beside their shapes."""
        parallel, path = self.config.parallel, self.config.parallel.dcp_decode_path
        return Workload(
            self.blueprint.record,
            self.context,
            listed=1 / parallel.decode_context_parallel_size if path == "queries" else 1.0,
            union=(1 + NEW_PER_ROW * (self.rows - 1)) / self.rows,
            shared_memory=self.blueprint.steps.settings.shared_memory,
            experts=self.model.n_routed_experts,
            each=self.model.num_experts_per_tok,
            expert_ranks=parallel.tensor_parallel_size if parallel.enable_expert_parallel else 1,
        )

    @property
    def pages(self) -> int:
        """The page table's width."""
        return self.blueprint.layout.pages_for(self.context)

    @property
    def _pool_pages(self) -> int:
        return self.requests * self.pages + 1 if self.cache_pages is None else self.cache_pages

    @cached_property
    def floor(self) -> Floor:
        """The least bytes that the step reads, of all layers."""
        blueprint = replace(self.blueprint, model=self.model, weights=self.weights)
        return Floor(
            self.model,
            leaves(blueprint.shape, dict(blueprint.mesh.shape)),
            blueprint.layout,
            blueprint.record,
            self.config.parallel.dcp_decode_path if blueprint.layout.world > 1 else "queries",
            self.requests,
            self.rows,
            self.context,
            blueprint.drafts_each,
        )

    def programs(
        self, main: Sequence[Compiled], drafting: Sequence[tuple[Compiled, int]] = ()
    ) -> tuple[Program, ...]:
        """What was compiled, with the weights that each program takes and how often its instructions run."""
        arrays = leaves(self.blueprint.shape, dict(self.blueprint.mesh.shape))
        found = [
            Program(program.schedule, [arrays[at] for at in reads], self.weight(program.schedule))
            for program, reads in zip(main, self.blueprint.steps.readers, strict=True)
        ]
        for program, times in drafting:
            own = [arrays[at] for at in self.blueprint.drafts.reads]
            found.append(Program(program.schedule, own, times=float(times)))
        return tuple(found)

    def compile(self) -> tuple[Compiled, ...]:
        """The step's programs through all of XLA's GPU compiler: about a minute of one core for 14 layers."""
        steps = self.blueprint.steps
        block = BlockShape("decode", self.requests, self.rows, self.pages)
        shape = StepShape((block,), block.total_rows)
        pools = self.blueprint.pools(self._pool_pages)
        lowered = steps.lower(shape, self.blueprint.parameters(), pools)
        return tuple(compile_lowered(program, self.gpus, steps.compiler_options) for program in lowered)

    def compile_chunk(self, tokens: int) -> tuple[Compiled, ...]:
        """The programs of a prefill chunk of so many tokens that ends a prompt as long as the context."""
        steps = self.blueprint.steps
        block = BlockShape("prefill", 1, min(tokens, self.context), self.pages)
        pools = self.blueprint.pools(self._pool_pages)
        lowered = steps.lower(StepShape((block,), 1), self.blueprint.parameters(), pools)
        return tuple(compile_lowered(program, self.gpus, steps.compiler_options) for program in lowered)

    def compile_drafts(self) -> tuple[tuple[Compiled, int], ...]:
        """The programs that draft behind the step, each with how often it runs; none without a speculative config."""
        count = self.blueprint.drafts_each
        if not count:
            return ()
        block = BlockShape("decode", self.requests, self.rows, self.pages)
        shapes: list[tuple[DraftShape, int]] = [(FirstShape((block,), self.requests), 1)]
        if count > 1:
            shapes.append((NextShape(self.requests, self.pages), count - 1))
        drafts, parameters = self.blueprint.drafts, self.blueprint.parameters()
        pools = self.blueprint.mtp_pools(self._pool_pages)
        options = self.blueprint.steps.compiler_options
        return tuple(
            (compile_lowered(drafts.lower(shape, parameters, pools), self.gpus, options), times)
            for shape, times in shapes
        )

    def timeline(self, programs: Sequence[Program], link: Link, least_seconds: float = 0.0) -> Timeline:
        """The modelled step of these programs. least_seconds: what any kernel takes at least."""
        return one_after_the_other(self._timeline_of(each, link, least_seconds) for each in programs)

    def _timeline_of(self, program: Program, link: Link, least_seconds: float) -> Timeline:
        once = play(
            program.schedule,
            Times.on(self.target, self.workload, least_seconds),
            link,
            at_once=self.blueprint.steps.compiler_options.get(_AT_ONCE, 1),
            unknown_trips=self.experts,
            weight=program.weight,
            part_of=program.part_of,
        )
        return times_over(once, program.times)

    def weight(self, schedule: Schedule) -> Weight:
        """How often a step of all layers runs what a program of the step has."""
        spans = [
            (layer_span(schedule, repeat.first, repeat.last), float(repeat.times)) for repeat in self.repeats
        ]
        return lambda position: next((times for span, times in spans if position in span), 1.0)


def check_layers(layers: str, segments: int | None) -> None:
    """Raise ConfigError for what of a network cannot be compiled. segments: programs that were asked for."""
    one_of("--layers", layers, LAYERS)
    if layers == "short" and segments not in (None, 1):
        raise ConfigError(f"step_segments {segments} needs all layers; add --layers full")
