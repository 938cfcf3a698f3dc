"""The compiled step: one jitted function over (parameters, pools, batch), one shard_map inside."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from glm_dcp_jax.cache.pools import Pools, pool_specs
from glm_dcp_jax.model.network import NetworkShape, StepOutput
from glm_dcp_jax.parallel.attention import AttentionPath, AttentionSettings
from glm_dcp_jax.parallel.batch import Block
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
PREFILL_PATHS: dict[str, PathMaker] = {
    "auto": ContextPrefill,
    "context": ContextPrefill,
    "queries": QueriesPrefill,
}


class StepShape(NamedTuple):
    """What a step is compiled for. rows: requests x rows each. pages: width of page tables. logits: rows asked for."""

    kind: Kind
    requests: int
    rows: int
    pages: int
    logits: int
    capture: bool = False


def leaves_of(parameters: Any) -> tuple[Any, ...]:
    """A parameter tree's arrays in a fixed order."""
    return tuple(jax.tree.leaves(parameters))


@dataclass
class CompiledSteps:
    """Steps by shape, compiled when first asked for. decode_path: the path that a decode step of some shape takes."""

    mesh: Mesh
    shape: NetworkShape
    settings: AttentionSettings
    prefill_path: str
    decode_path: Callable[[StepShape], str]
    _steps: dict[StepShape, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.settings = self.settings.on(self.mesh.devices.flat[0])

    def get(self, wanted: StepShape, parameters: Any, pools: Pools) -> Any:
        """The executable for a shape: call it with (leaves, pools, block, logit_rows); pools are donated.

        leaves: the parameters' arrays alone, as `leaves_of` gives them: walking nnx's tree at every step takes longer
        than starting the step.
        """
        found = self._steps.get(wanted)
        if found is None:
            found = self.compile(wanted, parameters, pools)
            self._steps[wanted] = found
        return found

    def compile(self, wanted: StepShape, parameters: Any, pools: Pools) -> jax.stages.Compiled:
        """The executable for arguments that may be ShapeDtypeStructs with shardings; it is not kept."""
        return self.lower(wanted, parameters, pools).compile(self.compiler_options)

    @property
    def compiler_options(self) -> dict[str, Any]:
        """What XLA is told when it compiles a step."""
        return compiler_options(self.settings.transport, list(self.mesh.devices.flat))

    def lower(self, wanted: StepShape, parameters: Any, pools: Pools) -> Any:
        """The lowered step; arguments may be arrays or ShapeDtypeStructs with shardings."""
        requests, rows, pages = wanted.requests, wanted.rows, wanted.pages
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        block = Block(ints(requests, rows), ints(requests, rows), ints(requests, pages))
        step = jax.jit(self._step(wanted), donate_argnums=1)
        return step.lower(leaves_of(parameters), pools, block, ints(wanted.logits))

    def _step(self, wanted: StepShape) -> Any:
        path = self._path(wanted)
        definition, settings = self.shape.definition, self.settings
        of_pools = pool_specs(settings.layout)
        tree = jax.tree.structure(self.shape.parameters)
        specs = tuple(jax.tree.leaves(self.shape.specs, is_leaf=lambda leaf: isinstance(leaf, P)))

        def on_device(
            leaves: tuple[Array, ...], pools: Pools, block: Block, logit_rows: Int[Array, " M"]
        ) -> StepOutput:
            network = nnx.merge(definition, jax.tree.unflatten(tree, leaves))
            return network.step(pools, (block,), logit_rows, (path,), settings, wanted.capture)

        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(specs, of_pools, P(), P()),
            out_specs=StepOutput(P(), of_pools, P(), P(), P(), P()),
            check_vma=False,
        )

    def _path(self, wanted: StepShape) -> AttentionPath:
        if wanted.kind == "decode":
            return DECODE_PATHS[self.decode_path(wanted)](self.settings)
        return PREFILL_PATHS[self.prefill_path](self.settings)
