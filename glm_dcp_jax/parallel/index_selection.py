"""A Full layer's selection on a mesh: which rank scores what, and how all ranks come to the same positions.

They are those that one device with all index keys would select. Where every rank has these (index_shards S = 1), each
selects for itself; the many rows of a prefill chunk are split over all ranks, and only what was selected travels
(*query split*). Where keys are in S parts, S ranks find the best of their parts, and merge them by score (*owner
merge*): the k best of all keys are among the parts' k best. In prefill each group of S ranks, which together have all
keys, takes some of the rows, and each rank of it merges some of those.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped, UInt32

from glm_dcp_jax.kernels.index_scores.reference import Paging
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES, map_row_blocks
from glm_dcp_jax.kernels.selection import select_paged, select_scored
from glm_dcp_jax.kernels.topk.reference import sortable
from glm_dcp_jax.parallel.attention import AttentionSettings
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.mesh import DCP, TENSOR_AXES
from glm_dcp_jax.parallel.sharding import padded

FEW_ROWS = 8
"""Up to this many rows of a request (a token and its drafts) are not split, which would take one more exchange."""

_CANDIDATE_BYTES = 8
"""Of a candidate: its score and its position."""


def select(
    q: Float[Array, "N S I D"],
    head_weights: Float[Array, "N S I"],
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""] | int,
    block: Block,
    settings: AttentionSettings,
    as_mask: bool,
    workspace: int = WORKSPACE_BYTES,
) -> Selection:
    """Each row's index_topk best of the positions that it sees, the same on every rank; runs inside `shard_map`.

    pool: this rank's index keys. as_mask: which form the selection has. workspace: bytes that the scores, and the
    candidates, of the rows that are selected together may take; results do not depend on it.
    """
    selector = _Selector(pool, layer, settings, as_mask, workspace)
    alone = q.shape[1] <= FEW_ROWS or jax.lax.axis_size(TENSOR_AXES) == 1
    choose = selector.for_all_rows if alone else selector.for_split_rows
    chosen = choose(q, head_weights, block.page_table, block.visible)
    return Selection(None, chosen) if as_mask else Selection(chosen, None)


def selection_hash(selection: Shaped[Array, "*rest"]) -> UInt32[Array, ""]:
    """A number that equal selections share: a sum over entries modulo 2**32.

    It differs where one entry does, and where several do but for a chance of 2**-32; the order of entries counts.
    selection: positions, a mask, or the hashes of several selections, which hash to one of them all.
    """
    entries = selection.reshape(-1).astype(jnp.uint32)
    places = jnp.arange(entries.size, dtype=jnp.uint32)
    return jnp.sum(_mixed(entries ^ _mixed(places)), dtype=jnp.uint32)


def candidates(
    scores: Float[Array, "*rows n"], positions: Int[Array, "*rows n"]
) -> UInt32[Array, "2 *rows n"]:
    """Scores and positions as pairs of numbers that sort in the order of selection: best score, lowest position.

    -0.0 counts as +0.0, NaN as -inf. A position of -1 is no candidate, and sorts behind all.
    """
    order = ~sortable(jnp.where(scores == 0, 0.0, scores))
    nothing = jnp.uint32(0xFFFFFFFF)
    return jnp.stack([jnp.where(positions < 0, nothing, order), positions.astype(jnp.uint32)])


def merge(found: UInt32[Array, "2 *rows n"], k: int) -> Int[Array, "*rows k"]:
    """The positions of each row's k best candidates in the order of selection, -1 behind.

    XLA sorts up to 4,096 candidates in one GPU kernel; 16,384 of them (2,048 of 8 parts) take six, each of which moves
    all once. Prefill of 2,048 rows leaves each of 8 ranks 32 MiB to sort.
    """
    _, positions = jax.lax.sort((found[0], found[1]), num_keys=2, is_stable=False)
    best = positions[..., :k].astype(jnp.int32)
    behind = [(0, 0)] * (best.ndim - 1) + [(0, k - best.shape[-1])]
    return jnp.pad(best, behind, constant_values=-1)


@dataclass(frozen=True)
class _Selector:
    """Selects from one Full layer's index keys, in one form; [N, S, k] positions or a mask [N, S, L]."""

    pool: Shaped[Array, "full *pool"]
    layer: Int[Array, ""] | int
    settings: AttentionSettings
    as_mask: bool
    workspace: int

    def for_all_rows(self, q: Array, head_weights: Array, page_table: Array, visible: Array) -> Array:
        """Every rank selects for all rows."""

        def some_requests(*requests: Array) -> Array:
            return self._select(self._gather_parts, *requests)

        merged_bytes = q.shape[1] * self._merged_bytes(page_table)
        requests = q, head_weights, page_table, visible
        return map_row_blocks(some_requests, merged_bytes, *requests, workspace=self.workspace)

    def for_split_rows(self, q: Array, head_weights: Array, page_table: Array, visible: Array) -> Array:
        """Every rank selects for some rows; then all ranks gather what the others did."""
        count = q.shape[1]

        def some_rows(*rows: Array) -> Array:
            block_q, block_w, seen = (_by_request(part) for part in rows)
            return self._select(self._deal_rows, block_q, block_w, page_table, seen).swapaxes(0, 1)

        merged_bytes = q.shape[0] * self._merged_bytes(page_table)
        rows = [self._rows_of_group(part) for part in (q, head_weights, visible)]
        chosen = map_row_blocks(some_rows, merged_bytes, *rows, workspace=self.workspace)
        with jax.named_scope("index_merge"):
            of_all = jax.lax.all_gather(chosen, TENSOR_AXES, axis=1)
            return of_all.reshape(-1, *of_all.shape[2:])[:count].swapaxes(0, 1)

    def _rows_of_group(self, rows: Shaped[Array, "N S *rest"]) -> Shaped[Array, "turns N shards *rest"]:
        """The rows whose keys this rank and its group score: of every `ranks` rows in turn, one a rank.

        Dealt out like this, ranks have rows that see as much as the others'. What is missing at the end is 0, rows
        that see nothing.
        """
        shards, ranks = self.settings.layout.index_shards, jax.lax.axis_size(TENSOR_AXES)
        requests, count = rows.shape[:2]
        missing = [(0, 0), (0, padded(count, ranks) - count)] + [(0, 0)] * (rows.ndim - 2)
        turns = jnp.pad(rows, missing).reshape(requests, -1, ranks // shards, shards, *rows.shape[2:])
        group = jax.lax.axis_index(TENSOR_AXES) // shards
        return jax.lax.dynamic_index_in_dim(turns, group, axis=2, keepdims=False).swapaxes(0, 1)

    def _select(
        self,
        exchange: Callable[[Array], Array],
        q: Array,
        head_weights: Array,
        page_table: Array,
        visible: Array,
    ) -> Array:
        """The selection of these rows, or where the exchange deals them out, of this rank's rows among them.

        exchange: from candidates of these rows in this rank's part to those of rows in all parts.
        """
        settings, layout, topk = self.settings, self.settings.layout.index_layout, self.settings.index_topk
        paging = Paging(settings.record.index, layout.block_size, settings.layout.block_size)
        keys = self.pool, self.layer, page_table
        options: dict[str, Any] = {"workspace": self.workspace, "backend": settings.kernels}
        if layout.world == 1:
            return select_paged(q, head_weights, *keys, visible, topk, *paging, self.as_mask, **options)
        part = jax.lax.rem(jax.lax.axis_index(DCP), layout.world)
        seen = layout.local_length(visible, part)
        scores, local = select_scored(q, head_weights, *keys, seen, topk, *paging, **options)
        most = self._candidates(page_table)
        with jax.named_scope("index_merge"):
            own = candidates(scores[..., :most], layout.position(part, local[..., :most]))
            positions = merge(exchange(own), topk)
            context = page_table.shape[1] * layout.virtual_block
            return _as_mask(positions, context) if self.as_mask else positions

    def _gather_parts(self, own: UInt32[Array, "2 N S n"]) -> UInt32[Array, "2 N S parts*n"]:
        """Candidates of all rows from all parts."""
        return jax.lax.all_gather(own, DCP, axis=3, tiled=True, axis_index_groups=self._groups)

    def _deal_rows(self, own: UInt32[Array, "2 N turns*shards n"]) -> UInt32[Array, "2 N turns parts*n"]:
        """This rank's part of candidates for the group's rows becomes all parts of those for its own rows."""
        shards = self.settings.layout.index_shards
        by_rank = own.reshape(*own.shape[:2], -1, shards, own.shape[3])
        parts = jax.lax.all_to_all(by_rank, DCP, 3, 4, tiled=True, axis_index_groups=self._groups)
        return parts[:, :, :, 0]

    @property
    def _groups(self) -> list[list[int]]:
        """The DCP ranks that together have all index keys."""
        layout = self.settings.layout
        ranks = list(range(layout.world))
        return [ranks[at : at + layout.index_shards] for at in range(0, layout.world, layout.index_shards)]

    def _candidates(self, page_table: Array) -> int:
        """A row's candidates in one part: no more than are selected, nor than there are keys."""
        keys = page_table.shape[1] * self.settings.layout.index_layout.block_size
        return min(self.settings.index_topk, keys)

    def _merged_bytes(self, page_table: Array) -> int:
        """What a row's candidates take; none where all keys are on one rank."""
        shards = self.settings.layout.index_shards
        return shards * self._candidates(page_table) * _CANDIDATE_BYTES if shards > 1 else 0


def _by_request(rows: Shaped[Array, "turns N shards *rest"]) -> Shaped[Array, "N turns*shards *rest"]:
    return rows.swapaxes(0, 1).reshape(rows.shape[1], -1, *rows.shape[3:])


def _as_mask(positions: Int[Array, "N S k"], context: int) -> Bool[Array, "N S L"]:
    """Positions as a mask over the context."""
    flat = positions.reshape(-1, positions.shape[2])
    past_the_end = jnp.where(flat < 0, context, flat)
    row = jnp.arange(flat.shape[0])[:, None]
    mask = jnp.zeros((flat.shape[0], context), bool).at[row, past_the_end].set(True, mode="drop")
    return mask.reshape(*positions.shape[:2], context)


def _mixed(number: UInt32[Array, "*rest"]) -> UInt32[Array, "*rest"]:
    """A permutation of the 32-bit numbers without visible order: murmur3's finaliser."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        number = (number ^ (number >> shift)) * jnp.uint32(factor)
    return number ^ (number >> 16)
