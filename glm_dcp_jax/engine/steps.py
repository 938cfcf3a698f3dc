"""The compiled step: a program for each segment of the network, each a jitted function with one shard_map inside."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from glm_dcp_jax.cache.pools import Pools, pool_specs
from glm_dcp_jax.model.network import Flow, NetworkShape, SegmentOutput, is_variable
from glm_dcp_jax.parallel.attention import AttentionPath, AttentionSettings, Moved
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.mesh import TENSOR_AXES
from glm_dcp_jax.parallel.prefill import ContextPrefill, QueriesPrefill
from glm_dcp_jax.parallel.queries import QueriesDecode
from glm_dcp_jax.parallel.records import BulkDecode, RecordsDecode
from glm_dcp_jax.parallel.transport import compiler_options

Kind = Literal["decode", "prefill"]
PathMaker = Callable[[AttentionSettings], AttentionPath]
DECODE_PATHS: dict[str, PathMaker] = {
    "queries": QueriesDecode,
    "records": RecordsDecode,
    "bulk": BulkDecode,
}
PREFILL_PATHS: dict[str, PathMaker] = {"context": ContextPrefill, "queries": QueriesPrefill}


_FLOW_SPECS = Flow(P(), Moved(P(), P(), P()), P(TENSOR_AXES))


class BlockShape(NamedTuple):
    """A block of requests x rows. pages: width of its page table."""

    kind: Kind
    requests: int
    rows: int
    pages: int

    @property
    def total_rows(self) -> int:
        """Rows of all requests."""
        return self.requests * self.rows


class StepShape(NamedTuple):
    """What a step is compiled for: its blocks, whose rows lie in a line, and how many rows' logits are asked for."""

    blocks: tuple[BlockShape, ...]
    logits: int
    capture: bool = False

    @property
    def total_rows(self) -> int:
        """Rows of all blocks."""
        return sum(block.total_rows for block in self.blocks)


class StepOutput(NamedTuple):
    """logits: [M, V] float32 of the asked rows. pools: of each segment. finite: [T], rows without NaN or infinity.

    hidden: [T, H], behind the final norm. moved: a Moved, over all groups. selection_hash: [tp] uint32, what each
    device selected in decode. When captured, else None: embedded [T, H], and a GroupTrace per stage.
    """

    logits: Any
    hidden: Any
    pools: tuple[Pools, ...]
    finite: Any
    moved: Any
    selection_hash: Any
    embedded: Any
    traces: Any


def leaves_of(parameters: Any) -> tuple[Any, ...]:
    """A parameter tree's arrays in a fixed order."""
    return tuple(jax.tree.leaves(parameters))


class Step(NamedTuple):
    """A step's programs, one for each segment of the network, and which parameters each reads."""

    programs: tuple[Any, ...]
    readers: tuple[tuple[int, ...], ...]

    def __call__(
        self, leaves: tuple[Any, ...], pools: tuple[Pools, ...], blocks: tuple[Block, ...], logit_rows: Any
    ) -> StepOutput:
        """Start all programs, one behind the other. pools are donated. logit_rows: into the rows of all blocks.

        leaves: the parameters' arrays alone, as `leaves_of` gives them: walking nnx's tree at every step takes longer
        than starting the step.
        """
        flow: Any = None
        outs = []
        for program, reads, own in zip(self.programs, self.readers, pools, strict=True):
            out = program(tuple(leaves[at] for at in reads), own, flow, blocks, logit_rows)
            flow = out.flow
            outs.append(out)
        captured = outs[0].traces is not None
        return StepOutput(
            outs[-1].logits,
            outs[-1].hidden,
            tuple(out.pools for out in outs),
            outs[-1].finite,
            flow.moved,
            flow.selection_hash,
            outs[0].embedded,
            tuple(trace for out in outs for trace in out.traces) if captured else None,
        )


@dataclass
class CompiledSteps:
    """Steps by shape, compiled when first asked for. path: which attention path a block of some shape takes."""

    mesh: Mesh
    shape: NetworkShape
    settings: AttentionSettings
    path: Callable[[BlockShape], str]
    _steps: dict[StepShape, Step] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = self.settings.on(self.mesh.devices.flat[0])

    def get(self, wanted: StepShape, parameters: Any, pools: tuple[Pools, ...]) -> Step:
        """The step of a shape."""
        found = self._steps.get(wanted)
        if found is None:
            found = self.compile(wanted, parameters, pools)
            self._steps[wanted] = found
        return found

    def compile(self, wanted: StepShape, parameters: Any, pools: tuple[Pools, ...]) -> Step:
        """The step for arguments that may be ShapeDtypeStructs with shardings; it is not kept."""
        lowered = self.lower(wanted, parameters, pools)
        return Step(tuple(part.compile(self.compiler_options) for part in lowered), self.readers)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What XLA is told when it compiles a step."""
        return compiler_options(self.settings.transport, list(self.mesh.devices.flat))

    @cached_property
    def readers(self) -> tuple[tuple[int, ...], ...]:
        """For each segment, which of the parameters' leaves it reads."""
        flat, _ = jax.tree_util.tree_flatten_with_path(self.shape.parameters, is_leaf=is_variable)
        of_leaf = [self.shape.segment_of(path) for path, _ in flat]
        return tuple(
            tuple(at for at, segment in enumerate(of_leaf) if segment == number)
            for number in range(len(self.shape.segments))
        )

    def lower(
        self, wanted: StepShape, parameters: Any, pools: tuple[Pools, ...]
    ) -> tuple[jax.stages.Lowered, ...]:
        """The step's lowered programs; arguments may be arrays or ShapeDtypeStructs with shardings."""
        blocks = tuple(block_of(block) for block in wanted.blocks)
        leaves, flow, lowered = leaves_of(parameters), None, []
        for number, (reads, own) in enumerate(zip(self.readers, pools, strict=True)):
            program = jax.jit(self._segment(wanted, number), donate_argnums=1)
            arguments = tuple(leaves[at] for at in reads), own, flow, blocks, _ints(wanted.logits)
            lowered.append(program.lower(*arguments))
            flow = jax.tree.map(self._as_argument, lowered[-1].out_info.flow, _FLOW_SPECS)
        return tuple(lowered)

    def _as_argument(self, leaf: Any, spec: P) -> jax.ShapeDtypeStruct:
        """What one program gives, as the next one takes it."""
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(self.mesh, spec))

    def _segment(self, wanted: StepShape, number: int) -> Any:
        """One segment's function of (its leaves, its pools, flow, blocks, logit_rows)."""
        settings, reads = self.settings, self.readers[number]
        paths = tuple(self.path_of(block) for block in wanted.blocks)
        all_specs = self.shape.leaf_specs
        of_pools = pool_specs(settings.layout)

        def on_device(
            leaves: tuple[Array, ...],
            pools: Pools,
            flow: Flow | None,
            blocks: tuple[Block, ...],
            logit_rows: Int[Array, " M"],
        ) -> SegmentOutput:
            network = self.shape.network(reads, leaves)
            return network.segment(number, flow, pools, blocks, logit_rows, paths, settings, wanted.capture)

        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(
                tuple(all_specs[at] for at in reads),
                of_pools,
                _FLOW_SPECS if number else P(),
                P(),
                P(),
            ),
            out_specs=SegmentOutput(_FLOW_SPECS, of_pools, P(), P(), P(), P(), P()),
            check_vma=False,
        )

    def path_of(self, block: BlockShape) -> AttentionPath:
        """How a block of this shape attends."""
        paths = DECODE_PATHS if block.kind == "decode" else PREFILL_PATHS
        return paths[self.path(block)](self.settings)


def block_of(shape: BlockShape) -> Block:
    """A block as ShapeDtypeStructs."""
    requests, rows, pages = shape.requests, shape.rows, shape.pages
    return Block(_ints(requests, rows), _ints(requests, rows), _ints(requests, pages))


def _ints(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
