"""Prefill paths: every rank gathers the context (`context`), or keeps its part and gathers heads (`queries`).

Both see a context buffer per request: the committed history, then the chunk's own records at their positions. Short
contexts are attended densely under the selection's mask; long ones by gathering each row's selected records, because
dense work grows with the context and selected work does not.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.dispatch import dispatch
from glm_dcp_jax.kernels.each_request import each_request
from glm_dcp_jax.kernels.masked_attention import absorbed_attention, expanded_attention
from glm_dcp_jax.kernels.records import gather_pages
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES, map_row_blocks
from glm_dcp_jax.kernels.sparse_attention import MOST_ROWS, sparse_attention
from glm_dcp_jax.parallel.attention import AttentionLayer, AttentionSettings, Queries, Stationary, Window
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.merge import gather_heads
from glm_dcp_jax.parallel.mesh import DCP
from glm_dcp_jax.parallel.queries import absorb, expand_values, merged_values

DENSE_CONTEXT = 4
"""Contexts up to this many times index_topk are attended densely: below, gathering costs more (measured on CPU)."""


class _Prefill(Stationary):
    """What both prefill paths share; a plan is the pair (selection, block)."""

    def __init__(self, settings: AttentionSettings) -> None:
        self.settings = settings

    def wants_mask(self, block: Block) -> bool:
        """Dense attention takes a mask, sparse attention positions."""
        context = block.page_table.shape[1] * self.settings.layout.virtual_block
        return context <= DENSE_CONTEXT * self.settings.index_topk

    def plan(self, selection: Selection, block: Block) -> tuple[Selection, Block]:
        """Slots are the context buffer's own order, so there is nothing to look up."""
        return selection, block


class ContextFlight(NamedTuple):
    """ckv: the pool. planes: [G], the group's. block, selection: the plan's. history: [N, L, width], the next layer's
    committed records in position order, gathered from all ranks.
    """

    ckv: Array
    planes: Int[Array, " G"]
    block: Block
    selection: Selection
    history: Array


class ContextPrefill(_Prefill):
    """Path `context`: CKV of the visible history is gathered from all ranks, each rank attends with its own heads.

    Each layer's history is gathered beside the computation before it: the Full layer's beside index scores, a Shared
    layer's beside the feed-forward of the layer before.
    """

    def start(
        self,
        plan: tuple[Selection, Block],
        ckv: Shaped[Array, "layers slots width"],
        planes: Int[Array, " G"],
    ) -> ContextFlight:
        """The Full layer's history has arrived when the selection is there."""
        selection, block = plan
        gathered = self._gathered(ckv, planes[0], block, 0)
        selection, history = jax.lax.optimization_barrier((selection, gathered))
        return ContextFlight(ckv, planes, block, selection, history)

    def window(
        self, flight: ContextFlight, layer: AttentionLayer, kind: Window, value: Array
    ) -> tuple[Array, ContextFlight]:
        """The next layer's history has arrived when this layer's feed-forward is done."""
        coming = layer.member + 1
        if kind != "ffn" or coming >= flight.planes.shape[0]:
            return value, flight
        gathered = self._gathered(flight.ckv, flight.planes[coming], flight.block, coming)
        value, history = jax.lax.optimization_barrier((value, gathered))
        return value, flight._replace(history=history)

    def attend(
        self,
        plan: tuple[Selection, Block],
        flight: ContextFlight,
        layer: AttentionLayer,
        queries: Queries,
        current: Float[Array, "N S width"],
    ) -> Float[Array, "N S h v"]:
        """Expanded heads over a dense context, absorbed ones over gathered records of a long one."""
        settings, dtype = self.settings, queries.nope.dtype
        selection, block = flight.selection, plan[1]
        history = _committed(flight.history, jnp.arange(flight.history.shape[1]), block)
        context = _place(history, current, block.positions, block.valid)
        if selection.mask is not None:
            context = settings.record.decode(context, dtype, settings.outer_scale(layer.number))

            def dense(nope: Array, rope: Array, records: Array, mask: Array) -> Array:
                expansions = (layer.key_expansion, layer.value_expansion)
                return expanded_attention(nope, rope, records, *expansions, mask, settings.scale)

            scores = 4 * selection.mask.shape[1] * selection.mask.shape[2]
            return each_request(dense, scores, queries.nope, queries.rope, context, selection.mask)
        assert selection.positions is not None
        out, _ = _attend_selected(settings, absorb(queries, layer), context, selection.positions, layer)
        return jax.vmap(lambda part: expand_values(part, layer.value_expansion, dtype))(out)

    def _gathered(
        self, ckv: Array, plane: Int[Array, ""], block: Block, member: int
    ) -> Shaped[Array, "N L width"]:
        """One layer's history."""
        own = gather_pages(ckv, plane, block.page_table, self.settings.layout.block_size)
        with jax.named_scope("shared_exchange" if member else "full_exchange"):
            return self._in_position_order(own)

    def _in_position_order(self, own: Float[Array, "N PB width"]) -> Float[Array, "N L width"]:
        """Gather all ranks' pages and interleave them: position = stripe * W * I + rank * I + i."""
        world, interleave = self.settings.layout.world, self.settings.layout.interleave
        if world == 1:
            return own
        requests, local, width = own.shape
        ranks = jax.lax.all_gather(own, DCP)
        ranks = ranks.reshape(world, requests, local // interleave, interleave, width)
        return ranks.transpose(1, 2, 0, 3, 4).reshape(requests, local * world, width)


class QueriesPrefill(_Prefill):
    """Path `queries` for prefill: each rank attends over its own part of the context with all ranks' heads."""

    def attend(
        self,
        plan: tuple[Selection, Block],
        flight: Float[Array, "layers slots width"],
        layer: AttentionLayer,
        queries: Queries,
        current: Float[Array, "N S width"],
    ) -> Float[Array, "N S h v"]:
        """Local attention with gathered heads, merged by LSE."""
        settings, dtype = self.settings, queries.nope.dtype
        layout, rank = settings.layout, jax.lax.axis_index(DCP)
        selection, block = plan
        owned = self._owned_context(flight, layer, block, current, rank)
        requests, rows = queries.nope.shape[:2]
        q = absorb(queries, layer)
        q = gather_heads(q.reshape(requests * rows, *q.shape[2:])).reshape(requests, rows, -1, q.shape[-1])
        if selection.mask is not None:
            owned = settings.record.decode(owned, dtype, settings.outer_scale(layer.number))
            positions = layout.position(rank, jnp.arange(owned.shape[1]))
            mask = jnp.take(selection.mask, positions, axis=2, mode="clip")

            def dense(heads: Array, records: Array, seen: Array) -> tuple[Array, Array]:
                return absorbed_attention(heads, records, seen, settings.latent_width, settings.scale)

            scores = 4 * q.shape[2] * mask.shape[1] * mask.shape[2]
            out, lse = each_request(dense, scores, q, owned, mask)
        else:
            assert selection.positions is not None
            mine = layout.owner(selection.positions) == rank
            slots = jnp.where(mine, layout.local(selection.positions), -1)
            out, lse = _attend_selected(settings, q, owned, slots, layer)
        flat = out.reshape(requests * rows, *out.shape[2:]), lse.reshape(requests * rows, -1)
        values = merged_values(*flat, layer, settings, dtype)
        return values.reshape(requests, rows, *values.shape[1:])

    def _owned_context(
        self,
        flight: Array,
        layer: AttentionLayer,
        block: Block,
        current: Float[Array, "N S width"],
        rank: Int[Array, ""],
    ) -> Float[Array, "N PB width"]:
        """This rank's records in local order: committed pages with the chunk's own rows laid in."""
        layout = self.settings.layout
        pages = gather_pages(flight, layer.plane, block.page_table, layout.block_size)
        pages = _committed(pages, layout.position(rank, jnp.arange(pages.shape[1])), block)
        mine = block.valid & (layout.owner(block.positions) == rank)
        return _place(pages, current, layout.local(block.positions), mine)


def _committed(
    context: Float[Array, "N L width"], positions: Int[Array, " L"], block: Block
) -> Float[Array, "N L width"]:
    """Zero what no earlier step of the request wrote: stale pages may hold anything, and 0 * NaN is NaN."""
    return jnp.where((positions < block.start[:, None])[:, :, None], context, 0)


def _place(
    context: Float[Array, "N L width"],
    current: Float[Array, "N S width"],
    at: Int[Array, "N S"],
    wanted: Bool[Array, "N S"],
) -> Float[Array, "N L width"]:
    """Lay the wanted current rows into each request's context; the others fall past the end and are dropped."""
    targets = jnp.where(wanted, at, context.shape[1])
    return jax.vmap(lambda own, to, rows: own.at[to].set(rows, mode="drop"))(context, targets, current)


def _attend_selected(
    settings: AttentionSettings,
    q: Float[Array, "N S h CR"],
    context: Shaped[Array, "N L width"],
    slots: Int[Array, "N S K"],
    layer: AttentionLayer,
) -> tuple[Float[Array, "N S h C"], Float[Array, "N S h"]]:
    """Each row over the entries of its request's context, encoded records, at its slots (-1: none)."""
    requests, length, width = context.shape
    record, outer_scale = settings.record, settings.outer_scale(layer.number)

    def gathered(q: Array, context: Array, slots: Array) -> tuple[Array, Array]:
        """Decoded once, then in row blocks: the records of all rows together would be many times the context."""
        context = record.decode(context, q.dtype, outer_scale)
        width = context.shape[2]
        decoded = RecordFormat.sized(str(q.dtype), settings.latent_width, width - settings.latent_width, 1)

        def one_request(request_q: Array, records: Array, chosen: Array) -> tuple[Array, Array]:
            def rows(block_q: Array, block_slots: Array) -> tuple[Array, Array]:
                pool = records[None]
                return sparse_attention(
                    block_q, pool, 0, block_slots, decoded, settings.scale, backend="reference"
                )

            bytes_per_row = chosen.shape[1] * width * q.dtype.itemsize
            return map_row_blocks(rows, bytes_per_row, request_q, chosen, workspace=settings.gather_bytes)

        all_bytes = slots.shape[1] * slots.shape[2] * width * q.dtype.itemsize
        return each_request(one_request, min(all_bytes, settings.gather_bytes), q, context, slots)

    def in_place(q: Array, context: Array, slots: Array, interpret: bool) -> tuple[Array, Array]:
        """All requests' rows over their contexts laid in a line: the kernel gathers nothing. In blocks, which bound the
        outputs that are in flight, and the grid."""
        first = jnp.arange(requests)[:, None, None] * length
        line = jnp.where(slots < 0, -1, slots + first).reshape(-1, slots.shape[2])
        pool = context.reshape(1, requests * length, width)

        def rows(block_q: Array, block_slots: Array) -> tuple[Array, Array]:
            return sparse_attention(
                block_q,
                pool,
                0,
                block_slots,
                record,
                settings.scale,
                outer_scale,
                backend="interpret" if interpret else "triton",
                shared_memory=settings.shared_memory,
            )

        bytes_per_row = max(8 * q.shape[2] * settings.latent_width, WORKSPACE_BYTES // MOST_ROWS)
        out, lse = map_row_blocks(rows, bytes_per_row, q.reshape(-1, *q.shape[2:]), line)
        return out.reshape(*q.shape[:3], -1), lse.reshape(q.shape[:3])

    return dispatch(settings.kernels, gathered, in_place, q, context, slots)
