"""The compiled programs that draft: the MTP layer over a step's rows, then one further draft at a time.

After a step, with its rows' hidden states still on the devices:

    out = first(leaves, pools, blocks, hidden, rows)              fills the MTP layer's caches; each line's 1st draft
    out = next(leaves, out.pools, out.draft, page_table, limits)  its 2nd, and so on

A line is a request that drafts. What drafts wrote is overwritten when `first` runs over the tokens that came of them.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Int

from glm_dcp_jax.cache.pools import Pools, pool_specs
from glm_dcp_jax.engine.steps import DECODE_PATHS, PREFILL_PATHS, BlockShape, block_of, leaves_of
from glm_dcp_jax.model.network import Network, NetworkShape
from glm_dcp_jax.parallel.attention import AttentionPath, AttentionSettings
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.transport import compiler_options


class FirstShape(NamedTuple):
    """The MTP layer over all rows of a step's blocks, and the first draft of some lines; their logits if wanted."""

    blocks: tuple[BlockShape, ...]
    lines: int
    logits: bool = False


class NextShape(NamedTuple):
    """One further draft of each line; its logits if wanted. pages: width of the page table."""

    lines: int
    pages: int
    logits: bool = False

    @property
    def block(self) -> BlockShape:
        """The lines as a decode block of one row each."""
        return BlockShape("decode", self.lines, 1, self.pages)


DraftShape = FirstShape | NextShape


class Draft(NamedTuple):
    """What a draft of L lines hands to the next; replicated arrays.

    tokens: [L] int32, greedy. positions: [L] int32, of the rows that drafted them. Both are -1 for an idle line, and no
    sampled token is. hidden: [L, H], normed. selection: [L, K] int32, the positions that further drafts attend to, -1
    behind; None where each selects anew. Its fields may be PartitionSpecs or ShapeDtypeStructs, hence the open types.
    """

    tokens: Any
    positions: Any
    hidden: Any
    selection: Any


class DraftOutput(NamedTuple):
    """pools: the MTP layer's, for whoever runs next. logits: [L, V] float32, None unless wanted."""

    draft: Any
    pools: Any
    logits: Any


class FirstDraft(NamedTuple):
    """The program of a FirstShape. reads: which of the parameters' leaves it takes."""

    program: Any
    reads: tuple[int, ...]

    def __call__(
        self, leaves: tuple[Any, ...], pools: Pools, blocks: tuple[Block, ...], hidden: Any, rows: Any
    ) -> DraftOutput:
        """Start it. leaves: of all parameters, see `leaves_of`. pools: donated.

        blocks: the step's, each row with its next token and its own position, which is -1 where the next token does not
        exist or was rejected. hidden: [T, H], the step's, behind the final norm. rows: [L] int32, each line's last
        valid row among the rows of all blocks; -1 for an idle line.
        """
        return self.program(tuple(leaves[at] for at in self.reads), pools, blocks, hidden, rows)


class NextDraft(NamedTuple):
    """The program of a NextShape. reads: which of the parameters' leaves it takes."""

    program: Any
    reads: tuple[int, ...]

    def __call__(
        self, leaves: tuple[Any, ...], pools: Pools, draft: Draft, page_table: Any, limits: Any
    ) -> DraftOutput:
        """Start it. leaves: of all parameters. pools: donated where drafts select anew, else as they were.

        draft: the one before. page_table: [L, pages] int32. limits: [L] int32, the highest position that a line may
        draft at: beyond it, it becomes idle.
        """
        out = self.program(tuple(leaves[at] for at in self.reads), pools, draft, page_table, limits)
        return out._replace(pools=pools) if out.pools is None else out


@dataclass
class DraftSteps:
    """Programs by shape, compiled when first asked for.

    settings: those of the main model's steps. path: which attention path a block of some shape takes. share: whether
    further drafts reuse the first one's selection (config.json's index_share_for_mtp_iteration).
    """

    mesh: Mesh
    shape: NetworkShape
    settings: AttentionSettings
    path: Callable[[BlockShape], str]
    share: bool
    _programs: dict[DraftShape, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        settings = self.settings.on(self.mesh.devices.flat[0])
        # Outer scales are calibrated for the main model's layers alone.
        self.settings = replace(settings, layout=settings.layout.mtp_layout, latent_scales=None)

    def first(self, wanted: FirstShape, parameters: Any, pools: Pools) -> FirstDraft:
        """What runs the MTP layer over a step's rows."""
        return FirstDraft(self.get(wanted, parameters, pools), self.reads)

    def next(self, wanted: NextShape, parameters: Any, pools: Pools) -> NextDraft:
        """What makes one further draft of each line."""
        return NextDraft(self.get(wanted, parameters, pools), self.reads)

    def get(self, wanted: DraftShape, parameters: Any, pools: Pools) -> jax.stages.Compiled:
        """The compiled program of a shape, which is kept; arguments may be ShapeDtypeStructs with shardings."""
        found = self._programs.get(wanted)
        if found is None:
            found = self._programs[wanted] = self.compile(wanted, parameters, pools)
        return found

    def compile(self, wanted: DraftShape, parameters: Any, pools: Pools) -> jax.stages.Compiled:
        """As `get`, but it is not kept."""
        options = compiler_options(self.settings.transport, list(self.mesh.devices.flat))
        return self.lower(wanted, parameters, pools).compile(options)

    def lower(self, wanted: DraftShape, parameters: Any, pools: Pools) -> jax.stages.Lowered:
        """The lowered program."""
        leaves = leaves_of(parameters)
        batch = self._first_batch(wanted) if isinstance(wanted, FirstShape) else self._next_batch(wanted)
        program = jax.jit(self._function(wanted), donate_argnums=1 if self._writes(wanted) else ())
        return program.lower(tuple(leaves[at] for at in self.reads), pools, *batch)

    @cached_property
    def reads(self) -> tuple[int, ...]:
        """Which of the parameters' leaves drafting takes: the MTP layer's, the embedding, and the output head."""
        return self.shape.places("mtp", "embedding", "head")

    def _writes(self, wanted: DraftShape) -> bool:
        """Further drafts that share a selection only read the pools."""
        return isinstance(wanted, FirstShape) or not self.share

    def _function(self, wanted: DraftShape) -> Any:
        """The program as a function of (its leaves, pools, *batch)."""
        all_specs, of_pools = self.shape.leaf_specs, pool_specs(self.settings.layout)

        def on_device(leaves: tuple[Array, ...], pools: Pools, *batch: Any) -> DraftOutput:
            network = self.shape.network(self.reads, leaves)
            if isinstance(wanted, FirstShape):
                return self._first(wanted, network, pools, *batch)
            return self._next(wanted, network, pools, *batch)

        return jax.shard_map(
            on_device,
            mesh=self.mesh,
            in_specs=(tuple(all_specs[at] for at in self.reads), of_pools, P(), P(), P()),
            out_specs=DraftOutput(P(), of_pools if self._writes(wanted) else None, P()),
            check_vma=False,
        )

    def _first(
        self,
        wanted: FirstShape,
        network: Network,
        pools: Pools,
        blocks: tuple[Block, ...],
        hidden: Array,
        rows: Int[Array, " L"],
    ) -> DraftOutput:
        paths = tuple(self._path_of(block) for block in wanted.blocks)
        out = network.predict(hidden, pools, blocks, paths, self.settings)
        at = jnp.maximum(rows, 0)
        of_all_rows = jnp.concatenate([block.positions.reshape(-1) for block in blocks])
        positions = jnp.where(rows < 0, -1, of_all_rows[at])
        selection = _of_lines(out.selections, rows, self.settings.index_topk) if self.share else None
        return _drafted(network, out.hidden[at], positions, selection, out.pools, wanted.logits)

    def _next(
        self,
        wanted: NextShape,
        network: Network,
        pools: Pools,
        draft: Draft,
        page_table: Int[Array, "L P"],
        limits: Int[Array, " L"],
    ) -> DraftOutput:
        goes_on = (draft.positions >= 0) & (draft.positions < limits)
        positions = jnp.where(goes_on, draft.positions + 1, -1)
        block = Block(draft.tokens[:, None], positions[:, None], page_table)
        chosen = (Selection(draft.selection[:, None], None),) if self.share else None
        paths = (self._path_of(wanted.block),)
        out = network.predict(draft.hidden, pools, (block,), paths, self.settings, chosen)
        written = None if self.share else out.pools
        return _drafted(network, out.hidden, positions, draft.selection, written, wanted.logits)

    def _path_of(self, block: BlockShape) -> AttentionPath:
        paths = DECODE_PATHS if block.kind == "decode" else PREFILL_PATHS
        return paths[self.path(block)](self.settings)

    def _first_batch(self, wanted: FirstShape) -> tuple[Any, ...]:
        rows = sum(block.total_rows for block in wanted.blocks)
        return tuple(block_of(block) for block in wanted.blocks), self._hidden(rows), self._ints(wanted.lines)

    def _next_batch(self, wanted: NextShape) -> tuple[Any, ...]:
        lines = wanted.lines
        selection = self._ints(lines, self.settings.index_topk) if self.share else None
        draft = Draft(self._ints(lines), self._ints(lines), self._hidden(lines), selection)
        return draft, self._ints(lines, wanted.pages), self._ints(lines)

    def _hidden(self, rows: int) -> jax.ShapeDtypeStruct:
        table = self.shape.parameters["embedding"].get_value()
        return self._replicated((rows, table.shape[1]), table.dtype)

    def _ints(self, *shape: int) -> jax.ShapeDtypeStruct:
        return self._replicated(shape, jnp.int32)

    def _replicated(self, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(self.mesh, P()))


def _drafted(
    network: Network,
    hidden: Array,
    positions: Int[Array, " L"],
    selection: Array | None,
    pools: Pools | None,
    wants_logits: bool,
) -> DraftOutput:
    """The greedy drafts of rows whose normed hidden states these are."""
    with jax.named_scope("head"):
        tokens = jnp.where(positions < 0, -1, network.greedy(hidden))
        logits = network.logits(hidden) if wants_logits else None
    return DraftOutput(Draft(tokens, positions, hidden, selection), pools, logits)


def _of_lines(selections: tuple[Selection, ...], rows: Int[Array, " L"], k: int) -> Int[Array, "L k"]:
    """What these rows of all blocks in a line selected, as positions whatever the blocks' form; -1 for row -1."""
    chosen = jnp.full((rows.shape[0], k), -1, jnp.int32)
    start = 0
    for selection in selections:
        found = selection.positions if selection.mask is None else selection.mask
        assert found is not None
        by_row = found.reshape(-1, found.shape[-1])
        inside = (rows >= start) & (rows < start + by_row.shape[0])
        own = by_row[jnp.clip(rows - start, 0, by_row.shape[0] - 1)]
        if selection.mask is not None:
            own = jax.vmap(lambda mask: jnp.nonzero(mask, size=k, fill_value=-1)[0])(own).astype(jnp.int32)
        chosen = jnp.where(inside[:, None], own, chosen)
        start += by_row.shape[0]
    return chosen
