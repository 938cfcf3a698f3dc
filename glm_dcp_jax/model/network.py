"""The whole network: embedding, runs of share groups, final norm, output head."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import Pools
from glm_dcp_jax.config import ModelConfig, Run
from glm_dcp_jax.kernels.records import unpack_records
from glm_dcp_jax.model.elementary import rms_norm, rope_angles
from glm_dcp_jax.model.group import GroupTrace, ShareGroup, StepContext
from glm_dcp_jax.model.parameters import Maker
from glm_dcp_jax.parallel.attention import AttentionPath, AttentionSettings, Moved
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.mesh import DCP, TENSOR_AXES
from glm_dcp_jax.parallel.sharding import spec_of


class StepOutput(NamedTuple):
    """logits: [M, V] float32 of the asked rows. finite: [T], rows without NaN or infinity.

    moved: a Moved, over all groups. When captured, else None: embedded [T, H], a GroupTrace per stage.

    In the same shape it describes a step's results by PartitionSpecs, hence the open types.
    """

    logits: Any
    pools: Pools
    finite: Any
    moved: Any
    embedded: Any
    traces: Any


class Network(nnx.Module):
    """All weights. Each stage is one ShareGroup; weights of several equal groups are stacked on a leading axis."""

    def __init__(self, config: ModelConfig, dtype: Any, tp: int, group_values: bool = False) -> None:
        self.config = config
        make = Maker(dtype, tp)
        table = (config.vocab_size, config.hidden_size)
        self.embedding = make.weight("model.embed_tokens.weight", table, ("vocab", None))
        self.stages = nnx.List(
            ShareGroup(config, run.sparse, Maker(dtype, tp, _stacked(run)), group_values)
            for run in config.stages
        )
        self.norm = make.weight("model.norm.weight", (config.hidden_size,))
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.head = make.weight(head, table, ("vocab", None))

    def step(
        self,
        pools: Pools,
        blocks: tuple[Block, ...],
        logit_rows: Int[Array, " M"],
        paths: tuple[AttentionPath, ...],
        settings: AttentionSettings,
        capture: bool,
    ) -> StepOutput:
        """One step over all blocks' rows laid in a line, which logit_rows index; runs inside shard_map."""
        tokens, positions, slots, index_slots = _rows(blocks, settings)
        config = self.config
        context = StepContext(
            settings,
            blocks,
            paths,
            rope_angles(positions, config.qk_rope_head_dim, config.rope_theta),
            index_slots,
        )
        with jax.named_scope("embed"):
            x = embedded = self.embed(tokens)
        index_keys, records, traces, moved = pools.index_keys, [], [], Moved.nothing()
        for run, group in zip(config.stages, self.stages, strict=True):
            x, index_keys, run_records, trace, of_run = _run(
                run, group, x, index_keys, pools.ckv, context, capture
            )
            moved = moved.plus(of_run)
            records.append(run_records)
            traces.append(trace)
        # The write must wait for the last layer's read of the pool, else XLA copies the pool. Only a dependency that it
        # cannot fold away orders them; this one also keeps records of a row that went non-finite out of the cache.
        finite = jnp.isfinite(x).all(axis=1)
        every_layer = jnp.arange(config.num_hidden_layers)
        kept = jnp.where(finite, slots, -1)
        with jax.named_scope("commit"):
            ckv = unpack_records(pools.ckv, every_layer, kept, jnp.concatenate(records), settings.kernels)
        with jax.named_scope("head"):
            logits = self.logits(x[logit_rows])
        return StepOutput(
            logits,
            Pools(ckv, index_keys),
            finite,
            moved,
            embedded if capture else None,
            tuple(traces) if capture else None,
        )

    def embed(self, tokens: Int[Array, " T"]) -> Float[Array, "T H"]:
        """Look up this rank's part of the vocabulary and sum over all ranks."""
        table = self.embedding[...]
        local = tokens - _rank() * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        found = jnp.where(here[:, None], table[jnp.where(here, local, 0)], 0)
        return jax.lax.psum(found, TENSOR_AXES)

    def logits(self, x: Float[Array, "M H"]) -> Float[Array, "M V"]:
        """Final norm and output head, float32, gathered from all ranks."""
        normed = rms_norm(x, self.norm[...], self.config.rms_norm_eps)
        part = jnp.einsum("mh,vh->mv", normed, self.head[...], preferred_element_type=jnp.float32)
        whole = jax.lax.all_gather(part, TENSOR_AXES, axis=1, tiled=True)
        return whole[:, : self.config.vocab_size]


def _stacked(run: Run) -> int | None:
    """How many groups' weights are stacked on a leading axis; None where there is no such axis."""
    return run.num_groups if run.num_groups > 1 else None


def _rank() -> Int[Array, ""]:
    """This device's index among all tensor-parallel ranks."""
    return jax.lax.axis_index(TENSOR_AXES)


def _rows(blocks: tuple[Block, ...], settings: AttentionSettings) -> tuple[Array, Array, Array, Array]:
    """tokens, positions, own CKV slots and own index-key slots of all blocks' rows in a line."""
    layout, index_layout = settings.layout, settings.layout.index_layout
    rank = jax.lax.axis_index(DCP)
    part = jax.lax.rem(rank, index_layout.world)
    slots = [_own_slots(block, layout, rank) for block in blocks]
    index_slots = [_own_slots(block, index_layout, part) for block in blocks]
    tokens = [block.tokens.reshape(-1) for block in blocks]
    positions = [block.positions.reshape(-1) for block in blocks]
    return (
        jnp.concatenate(tokens),
        jnp.concatenate(positions),
        jnp.concatenate(slots),
        jnp.concatenate(index_slots),
    )


def _own_slots(block: Block, layout: Layout, owner: Int[Array, ""]) -> Int[Array, " T"]:
    """Where each row of the block goes in this owner's pool; -1: it is another's, or padding."""
    page_index = jnp.maximum(layout.page_index(block.positions), 0)
    pages = jnp.take_along_axis(block.page_table, page_index, axis=1)
    mine = block.valid & (layout.owner(block.positions) == owner)
    return jnp.where(mine, layout.slot(block.positions, pages), -1).reshape(-1)


def _run(
    run: Run,
    group: ShareGroup,
    x: Float[Array, "T H"],
    index_keys: Float[Array, "full slots D"],
    ckv: Float[Array, "layers slots width"],
    context: StepContext,
    capture: bool,
) -> tuple[Array, Array, Array, GroupTrace | None, Moved]:
    """A run's groups, scanned when there are several.

    Returns x, index keys, records [layers, T, width], the trace, and what moved. The trace has one leading axis over
    groups. The index pool is carried; the CKV pool is only read.
    """
    if run.num_groups == 1:
        x, index_keys, records, trace, moved = group(
            x, index_keys, ckv, run.first_layer, run.first_full, context
        )
        return (
            x,
            index_keys,
            records,
            jax.tree.map(lambda leaf: leaf[None], trace) if capture else None,
            moved,
        )
    # Experts stay out of the scan's slices, which are copies: the expert loop reads the stack in place.
    definition, *(experts, weights) = nnx.split(group, _is_routed_expert, ...)

    def one_group(carry: tuple[Array, Array], inputs: tuple[Any, Array]) -> tuple[Any, Any]:
        x, index_keys = carry
        own_weights, ordinal = inputs
        x, index_keys, records, trace, moved = nnx.merge(definition, experts, own_weights)(
            x,
            index_keys,
            ckv,
            run.first_layer + ordinal * run.group_size,
            run.first_full + ordinal,
            context,
            ordinal,
        )
        return (x, index_keys), (records, trace if capture else None, moved)

    (x, index_keys), (records, trace, moved) = jax.lax.scan(
        one_group, (x, index_keys), (weights, jnp.arange(run.num_groups))
    )
    total = Moved(*(jnp.sum(of_groups) for of_groups in moved))
    return x, index_keys, records.reshape(-1, *records.shape[2:]), trace, total


def _is_routed_expert(path: tuple, variable: Any) -> bool:
    """Whether a parameter of a group is stacked over experts."""
    return (
        path[-2] == "feed_forward"
        and path[-1] in ("gate_up", "down")
        and ".experts." in variable.get_metadata("source").names[0]
    )


class NetworkShape(NamedTuple):
    """The network before any array exists.

    definition: the nnx graph. parameters: nnx.State of ShapeDtypeStructs. specs: a PartitionSpec for each parameter.
    """

    definition: Any
    parameters: Any
    specs: Any

    def on(self, mesh: Mesh) -> Any:
        """The parameters' shapes with their shardings on a mesh: what ahead-of-time compilation needs."""

        def place(variable: nnx.Variable, spec: P) -> nnx.Variable:
            leaf = variable.get_value()
            sharding = NamedSharding(mesh, spec)
            return variable.replace(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding))

        return jax.tree.map(place, self.parameters, self.specs, is_leaf=is_variable)


def is_variable(leaf: Any) -> bool:
    """Whether a tree's node is one parameter with its metadata."""
    return isinstance(leaf, nnx.Variable)


def abstract_network(config: ModelConfig, dtype: Any, tp: int, group_values: bool = False) -> NetworkShape:
    """Shapes first: what parameters there are, and how each lies on the mesh."""
    definition, parameters = nnx.split(nnx.eval_shape(lambda: Network(config, dtype, tp, group_values)))
    specs = jax.tree.map(
        lambda variable: spec_of(variable.get_metadata("axes")), parameters, is_leaf=is_variable
    )
    return NetworkShape(definition, parameters, specs)
