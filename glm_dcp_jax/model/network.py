"""The whole network: embedding, runs of share groups, final norm, output head."""

import itertools
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from glm_dcp_jax.cache.pools import Pools
from glm_dcp_jax.config import ModelConfig, Run
from glm_dcp_jax.config.schedule import segments_of
from glm_dcp_jax.model.elementary import rms_norm, rope_angles
from glm_dcp_jax.model.group import GroupOutput, ShareGroup, StepContext
from glm_dcp_jax.model.mtp import MultiTokenPrediction, Prediction
from glm_dcp_jax.model.parameters import Maker
from glm_dcp_jax.model.rows import Rows
from glm_dcp_jax.model.stored_weights import ALL_PLAIN, WeightFormats
from glm_dcp_jax.parallel.attention import AttentionPath, AttentionSettings, Moved
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.index_selection import selection_hash
from glm_dcp_jax.parallel.mesh import TENSOR_AXES, rank
from glm_dcp_jax.parallel.sharding import spec_of
from glm_dcp_jax.parallel.vocabulary import highest


class Flow(NamedTuple):
    """What one segment of a step hands to the next.

    x: [T, H]. moved: a Moved, over all groups so far. selection_hash: [1] uint32 on each device, of what it selected in
    decode so far. In the same shape it describes itself by PartitionSpecs, hence the open types.
    """

    x: Any
    moved: Any
    selection_hash: Any


class SegmentOutput(NamedTuple):
    """flow, pools: for the next segment, and the next step. After the last segment logits: [M, V] float32 of the asked
    rows, hidden: [T, H], normed, and finite: [T], rows without NaN or infinity.

    When captured: embedded [T, H] before the first segment, and a GroupTrace per stage. What is not there is None.
    """

    flow: Flow
    pools: Pools
    logits: Any = None
    hidden: Any = None
    finite: Any = None
    embedded: Any = None
    traces: Any = None


class Network(nnx.Module):
    """All weights. Each stage is one ShareGroup; weights of several equal groups are stacked on a leading axis.

    make: of parameters outside of layers. segments: the stages of each part of the network that is compiled as a
    program of its own. group_values: see LatentAttention. mtp: whether there is an MTP layer, which no segment runs.
    """

    def __init__(
        self,
        config: ModelConfig,
        make: Maker,
        segments: tuple[tuple[Run, ...], ...],
        group_values: bool = False,
        mtp: bool = False,
    ) -> None:
        self.config, self.segments = config, segments
        table = (config.vocab_size, config.hidden_size)
        self.embedding = make.weight("model.embed_tokens.weight", table, ("vocab", None))
        self.stages = nnx.List(
            ShareGroup(config, run.sparse, _makers(make, run), group_values)
            for segment in segments
            for run in segment
        )
        self.norm = make.weight("model.norm.weight", (config.hidden_size,))
        head = "model.embed_tokens.weight" if config.tie_word_embeddings else "lm_head.weight"
        self.head = make.weight(head, table, ("vocab", None))
        last = replace(make, layers=(config.num_hidden_layers,))
        self.mtp = MultiTokenPrediction(config, last, group_values) if mtp else None

    def segment(
        self,
        number: int,
        flow: Flow | None,
        pools: Pools,
        blocks: tuple[Block, ...],
        logit_rows: Int[Array, " M"],
        paths: tuple[AttentionPath, ...],
        settings: AttentionSettings,
        capture: bool,
    ) -> SegmentOutput:
        """One segment of a step over all blocks' rows laid in a line, which logit_rows index; runs inside shard_map.

        flow: None for the first segment, which embeds the rows. pools: of the segment's layers alone.
        """
        rows = Rows.of(blocks, settings)
        embedded = None
        if flow is None:
            with jax.named_scope("embed"):
                embedded = self.embed(rows.tokens)
            flow = Flow(embedded, Moved.nothing(), jnp.zeros(1, jnp.uint32))
        config, runs = self.config, self.segments[number]
        context = StepContext(
            settings,
            blocks,
            paths,
            rope_angles(rows.positions, config.qk_rope_head_dim, config.rope_theta),
            rows.index_slots,
            runs[0].first_layer,
            runs[0].first_full,
        )
        x, moved, index_keys = flow.x, flow.moved, pools.index_keys
        records, traces, hashes = [], [], [flow.selection_hash]
        first_stage = sum(len(before) for before in self.segments[:number])
        for stage, run in enumerate(runs, first_stage):
            out = _run(run, self.stages[stage], x, index_keys, pools.ckv, context, capture)
            x, index_keys, moved = out.x, out.index_pool, moved.plus(out.moved)
            records.append(out.records)
            traces.append(out.trace)
            hashes.append(out.selection_hash)
        ckv, finite = rows.commit(pools.ckv, jnp.concatenate(records), x, settings)
        combined = selection_hash(jnp.concatenate(hashes))[None]
        done = SegmentOutput(Flow(x, moved, combined), Pools(ckv, index_keys))
        if capture:
            done = done._replace(embedded=embedded, traces=tuple(traces))
        if number + 1 < len(self.segments):
            return done
        with jax.named_scope("head"):
            normed = rms_norm(x, self.norm[...], config.rms_norm_eps)
            return done._replace(logits=self.logits(normed[logit_rows]), hidden=normed, finite=finite)

    def predict(
        self,
        hidden: Float[Array, "T H"],
        pools: Pools,
        blocks: tuple[Block, ...],
        paths: tuple[AttentionPath, ...],
        settings: AttentionSettings,
        chosen: tuple[Selection, ...] | None = None,
    ) -> Prediction:
        """The MTP layer over all blocks' rows, whose tokens are the next ones; see MultiTokenPrediction."""
        assert self.mtp is not None, "the network was made without an MTP layer"
        rows = Rows.of(blocks, settings)
        with jax.named_scope("embed"):
            embedded = self.embed(rows.tokens)
        return self.mtp(embedded, hidden, rows, pools, blocks, paths, settings, chosen)

    def embed(self, tokens: Int[Array, " T"]) -> Float[Array, "T H"]:
        """Look up this rank's part of the vocabulary and sum over all ranks."""
        table = self.embedding[...]
        local = tokens - rank() * table.shape[0]
        here = (local >= 0) & (local < table.shape[0])
        found = jnp.where(here[:, None], table[jnp.where(here, local, 0)], 0)
        return jax.lax.psum(found, TENSOR_AXES)

    def logits(self, normed: Float[Array, "M H"]) -> Float[Array, "M V"]:
        """Output head, float32, gathered from all ranks. normed: what the final norm gave."""
        whole = jax.lax.all_gather(self._own_logits(normed), TENSOR_AXES, axis=1, tiled=True)
        return whole[:, : self.config.vocab_size]

    def greedy(self, normed: Float[Array, "M H"]) -> Int[Array, " M"]:
        """The token of each row's highest logit, without gathering logits."""
        return highest(self._own_logits(normed), self.config.vocab_size)

    def _own_logits(self, normed: Float[Array, "M H"]) -> Float[Array, "M v"]:
        """float32 logits of this rank's part of the vocabulary, padding included."""
        return jnp.einsum("mh,vh->mv", normed, self.head[...], preferred_element_type=jnp.float32)


def _makers(make: Maker, run: Run) -> list[Maker]:
    """One for each layer of a run's groups; weights of several groups are stacked on a leading axis."""
    return [
        replace(
            make,
            layers=tuple(run.layer(group, member) for group in range(run.num_groups)),
            stacked=run.num_groups > 1,
        )
        for member in range(run.group_size)
    ]


def _run(
    run: Run,
    group: ShareGroup,
    x: Float[Array, "T H"],
    index_keys: Float[Array, "full slots D"],
    ckv: Float[Array, "layers slots width"],
    context: StepContext,
    capture: bool,
) -> GroupOutput:
    """A run's groups, scanned when there are several.

    As of one group, but records [layers, T, width], the trace (None if not captured) with a leading axis over groups,
    and hashes [groups]. The index pool is carried; the CKV pool is only read.
    """
    if run.num_groups == 1:
        out = group(x, index_keys, ckv, run.first_layer, run.first_full, context)
        trace = jax.tree.map(lambda leaf: leaf[None], out.trace) if capture else None
        return out._replace(trace=trace, selection_hash=out.selection_hash[None])
    # Matrices stay out of the scan's slices, which are copies: their kernels read the stack in place.
    definition, *(matrices, rest) = nnx.split(group, _is_read_in_place, ...)

    def one_group(carry: tuple[Array, Array], inputs: tuple[Any, Array]) -> tuple[Any, GroupOutput]:
        own_rest, ordinal = inputs
        layer, full = run.first_layer + ordinal * run.group_size, run.first_full + ordinal
        one = nnx.merge(definition, matrices, own_rest)
        out = one(*carry, ckv, layer, full, context, ordinal)
        kept = out._replace(x=None, index_pool=None, trace=out.trace if capture else None)
        return (out.x, out.index_pool), kept

    (x, index_keys), of_groups = jax.lax.scan(one_group, (x, index_keys), (rest, jnp.arange(run.num_groups)))
    return of_groups._replace(
        x=x,
        index_pool=index_keys,
        records=of_groups.records.reshape(-1, *of_groups.records.shape[2:]),
        moved=Moved(*(jnp.sum(counts) for counts in of_groups.moved)),
    )


def _is_read_in_place(path: tuple, variable: Any) -> bool:
    """Whether an op takes a parameter with all its groups."""
    return variable.get_metadata("in_place")


class NetworkShape(NamedTuple):
    """The network before any array exists.

    definition: the nnx graph. parameters: nnx.State of ShapeDtypeStructs. specs: a PartitionSpec for each parameter.
    segments: the stages of each part that is compiled as a program of its own. mtp_layer: the MTP layer's number; None
    where there is none.
    """

    definition: Any
    parameters: Any
    specs: Any
    segments: tuple[tuple[Run, ...], ...]
    mtp_layer: int | None = None

    @property
    def stages(self) -> tuple[Run, ...]:
        """Those of all segments, as the parameters are numbered."""
        return tuple(run for segment in self.segments for run in segment)

    def segment_of(self, path: tuple) -> int:
        """The segment that reads the parameter at this path of the tree; -1 for the MTP layer's, which none reads."""
        keys = keys_of(path)
        if keys[0] == "mtp":
            return -1
        if keys[0] == "stages":
            ends = itertools.accumulate(len(segment) for segment in self.segments)
            return next(number for number, end in enumerate(ends) if keys[1] < end)
        return 0 if keys[0] == "embedding" else len(self.segments) - 1

    def layers_of(self, path: tuple) -> tuple[int | None, ...]:
        """The layer of each group that the parameter at this path is stacked of; (None,) outside of layers."""
        keys = keys_of(path)
        if keys[0] == "mtp":
            return (self.mtp_layer,)
        if keys[0] != "stages":
            return (None,)
        run = self.stages[keys[1]]
        return tuple(run.layer(group, keys[3]) for group in range(run.num_groups))

    @property
    def leaf_specs(self) -> tuple[P, ...]:
        """The PartitionSpec of each of the parameters' leaves."""
        return tuple(jax.tree.leaves(self.specs, is_leaf=lambda leaf: isinstance(leaf, P)))

    def places(self, *parts: str) -> tuple[int, ...]:
        """Where among all leaves those of some parts of the network are, such as "head"."""
        flat, _ = jax.tree_util.tree_flatten_with_path(self.parameters, is_leaf=is_variable)
        return tuple(at for at, (path, _) in enumerate(flat) if keys_of(path)[0] in parts)

    def network(self, places: Iterable[int], leaves: Iterable[Array]) -> Network:
        """The network with no other leaves than these, each at its place among all."""
        present = dict(zip(places, leaves, strict=True))
        everything = [present.get(at) for at in range(len(self.leaf_specs))]
        tree = jax.tree.structure(self.parameters)
        return nnx.merge(self.definition, jax.tree.unflatten(tree, everything))

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


def keys_of(path: tuple) -> list:
    """The names and numbers on the way to a parameter, as ["stages", 1, "layers", 0, "input_norm"]."""
    return [entry.key for entry in path if isinstance(entry, jax.tree_util.DictKey)]


def abstract_network(
    config: ModelConfig,
    dtype: Any,
    tp: int,
    num_segments: int = 1,
    group_values: bool = False,
    mtp: bool = False,
    formats: WeightFormats = ALL_PLAIN,
    expert_parallel: bool = False,
) -> NetworkShape:
    """Shapes first: what parameters there are, and how each lies on the mesh.

    formats: how the checkpoint stores weights; config.runs must be of layers that are stored alike. expert_parallel:
    each rank has some of the experts whole. Raises ConfigError for more segments than share groups.
    """
    segments = segments_of(config.runs, num_segments)
    make = Maker(dtype, tp, formats, expert_parallel=expert_parallel)
    network = nnx.eval_shape(lambda: Network(config, make, segments, group_values, mtp))
    definition, parameters = nnx.split(network)
    specs = jax.tree.map(
        lambda variable: spec_of(variable.get_metadata("axes")), parameters, is_leaf=is_variable
    )
    return NetworkShape(definition, parameters, specs, segments, config.num_hidden_layers if mtp else None)
