"""Paths `records` and `bulk` for decode: selected records travel, query heads stay.

Every rank hands the records it owns to all ranks, and each attends over all selected records with its own heads: no
partial outputs to merge. `records` exchanges one layer at a time, when the layer needs it. `bulk` exchanges the Full
layer's at once, and those of each Shared layer beside the compute of a window before it is needed.

What the fast exchange has no room for, which is known alike to all ranks, follows in rounds inside a conditional, and
is merged by its LSE.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from glm_dcp_jax.kernels.records import pack_records
from glm_dcp_jax.kernels.sparse_attention import sparse_attention
from glm_dcp_jax.parallel.attention import (
    AttentionLayer,
    AttentionSettings,
    Moved,
    Queries,
    Stationary,
    Window,
)
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.capacity import Capacity
from glm_dcp_jax.parallel.exchange import exchange
from glm_dcp_jax.parallel.merge import merge_two
from glm_dcp_jax.parallel.mesh import DCP
from glm_dcp_jax.parallel.queries import absorb, expand_values
from glm_dcp_jax.parallel.union import Union, union_of


class RecordsPlan(NamedTuple):
    """union: whose records go where. slots: [N, SK] int32, where the fast exchange puts them, -1 for those of the rest.

    overflow: [] bool, whether there is a rest. capacity: static.
    """

    union: Union
    slots: Int[Array, "N SK"]
    overflow: Array
    capacity: Capacity


class _OverRecords:
    """What both paths share: the plan, and attention over what has arrived."""

    def __init__(self, settings: AttentionSettings) -> None:
        self.settings = settings

    def wants_mask(self, block: Block) -> bool:
        """Decode selects positions."""
        return False

    def plan(self, selection: Selection, block: Block) -> RecordsPlan:
        """Number the union's records by owner and place them."""
        settings, chosen = self.settings, selection.positions
        assert chosen is not None, "decode selects positions"
        capacity = self._capacity(block, chosen.shape[2])
        rank = jax.lax.axis_index(DCP)
        union = union_of(chosen, block, settings.layout, rank, capacity.most)
        slots = self._placed(union, 0, capacity.fast)
        return RecordsPlan(union, slots, jnp.max(union.counts) > capacity.fast, capacity)

    def moved(self, plan: RecordsPlan) -> Moved:
        """What the union is made of, and whether it overflows."""
        return Moved(plan.union.selected, jnp.sum(plan.union.counts), plan.overflow.astype(jnp.int32))

    def _exchanged(self, packed: Shaped[Array, "n width"], member: int) -> Shaped[Array, "W*n width"]:
        """All ranks' records for a member of the group, the Full layer being the first."""
        with jax.named_scope("shared_exchange" if member else "full_exchange"):
            return exchange(packed, self.settings.transport)

    def _over(
        self,
        arrived: Shaped[Array, "n width"],
        plan: RecordsPlan,
        ckv: Shaped[Array, "layers slots width"],
        layer: AttentionLayer,
        queries: Queries,
        current: Shaped[Array, "N S width"],
    ) -> Float[Array, "N S h v"]:
        """Attend over the fast exchange's records and the current rows; merge in the rest's, where there is one.

        All rows of a request share its list: their heads are attended with together, and read each record once.
        """
        requests, rows, heads = queries.nope.shape[:3]
        q = absorb(queries, layer)
        q = q.reshape(requests, rows * heads, -1)
        out, lse = self._attend(q, arrived, plan.slots, layer, plan.union, rows, current)
        if plan.capacity.rounds:
            with jax.named_scope("overflow"):
                out, lse = jax.lax.cond(
                    plan.overflow,
                    lambda: self._with_rest(out, lse, q, plan, ckv, layer, rows),
                    lambda: (out, lse),
                )
        out = out.reshape(requests * rows, heads, -1)
        return expand_values(out, layer.value_expansion, queries.nope.dtype).reshape(
            requests, rows, heads, -1
        )

    def _with_rest(
        self,
        out: Array,
        lse: Array,
        q: Array,
        plan: RecordsPlan,
        ckv: Array,
        layer: AttentionLayer,
        rows: int,
    ) -> tuple[Float[Array, "N Sh C"], Float[Array, "N Sh"]]:
        """Exchange what the fast exchange left, round by round, and merge it in."""
        capacity, union = plan.capacity, plan.union
        size = capacity.each_round
        padding = capacity.fast + capacity.rounds * size - capacity.most
        mine = jnp.pad(union.mine, (0, padding), constant_values=-1)
        rest = jnp.max(union.counts) - capacity.fast

        def one_round(number: Array, partial: tuple[Array, Array]) -> tuple[Array, Array]:
            first = capacity.fast + number * size
            packed = self._packed(ckv, layer.plane, jax.lax.dynamic_slice(mine, (first,), (size,)))
            slots = self._placed(union, first, size)
            arrived = exchange(packed, self.settings.transport)
            return merge_two(partial, self._attend(q, arrived, slots, layer, union, rows))

        return jax.lax.fori_loop(0, jax.lax.div(rest + size - 1, size), one_round, (out, lse))

    def _attend(
        self,
        q: Array,
        arrived: Array,
        slots: Array,
        layer: AttentionLayer,
        union: Union,
        rows: int,
        current: Array | None = None,
    ) -> tuple[Float[Array, "N Sh C"], Float[Array, "N Sh"]]:
        settings = self.settings
        return sparse_attention(
            q,
            arrived[None],
            0,
            slots,
            settings.record,
            settings.scale,
            settings.outer_scale(layer.number),
            current,
            None if current is None else union.current,
            settings.kernels,
            settings.shared_memory,
            union.seen_by,
            rows,
        )

    def _packed(self, ckv: Array, plane: Array | int, slots: Array) -> Shaped[Array, "n width"]:
        """One layer's records at these slots."""
        return pack_records(ckv, jnp.asarray(plane, jnp.int32)[None], slots, self.settings.kernels)[0]

    def _placed(self, union: Union, first: Array | int, count: int) -> Int[Array, "N SK"]:
        """Where an exchange of each rank's records first to first + count puts them; -1 for all others."""
        inside = (union.ordinal >= first) & (union.ordinal < first + count)
        return jnp.where(inside, union.owner * count + union.ordinal - first, -1)

    def _capacity(self, block: Block, topk: int) -> Capacity:
        requests, rows = block.positions.shape
        local_tokens = block.page_table.shape[1] * self.settings.layout.block_size
        return Capacity.for_block(self.settings, requests, rows, topk, local_tokens)


class RecordsDecode(_OverRecords, Stationary):
    """Decode rows (1 to 8 per request) over exchanged records, one layer at a time."""

    def attend(
        self,
        plan: RecordsPlan,
        flight: Shaped[Array, "layers slots width"],
        layer: AttentionLayer,
        queries: Queries,
        current: Shaped[Array, "N S width"],
    ) -> Float[Array, "N S h v"]:
        """Exchange this layer's records, then attend over them and the current rows."""
        with jax.named_scope("pack"):
            packed = self._packed(flight, layer.plane, plan.union.mine[: plan.capacity.fast])
        arrived = self._exchanged(packed, layer.member)
        return self._over(arrived, plan, flight, layer, queries, current)


class BulkFlight(NamedTuple):
    """ckv: the pool. packed: own records of each of the group's layers. arrived: those of members so far."""

    ckv: Array
    packed: tuple[Shaped[Array, "n width"], ...]
    arrived: dict[int, Shaped[Array, "W*n width"]]


class BulkDecode(_OverRecords):
    """As `records`, but what Shared layers need travels ahead, one layer's records in each window."""

    def start(
        self, plan: RecordsPlan, ckv: Shaped[Array, "layers slots width"], planes: Int[Array, " G"]
    ) -> BulkFlight:
        """Pack the records of all the group's layers, and exchange the Full layer's."""
        mine = plan.union.mine[: plan.capacity.fast]
        with jax.named_scope("pack"):  # one by one: out of a stack of them each would be copied
            packed = tuple(self._packed(ckv, planes[member], mine) for member in range(planes.shape[0]))
        return BulkFlight(ckv, packed, {0: self._exchanged(packed[0], 0)})

    def attend(
        self,
        plan: RecordsPlan,
        flight: BulkFlight,
        layer: AttentionLayer,
        queries: Queries,
        current: Shaped[Array, "N S width"],
    ) -> Float[Array, "N S h v"]:
        """Attend over what has arrived for this layer."""
        return self._over(flight.arrived[layer.member], plan, flight.ckv, layer, queries, current)

    def window(
        self, flight: BulkFlight, layer: AttentionLayer, kind: Window, value: Array
    ) -> tuple[Array, BulkFlight]:
        """The next Shared layer's records have arrived when the window's last value is there.

        The barrier is what makes XLA hide them: an all-reduce ends the window, only one collective runs at a time, and
        so this one begins when the all-reduce before the window is over.
        """
        coming = layer.member + 1
        if kind != "ffn" or coming >= len(flight.packed):
            return value, flight
        arriving = self._exchanged(flight.packed[coming], coming)
        value, landed = jax.lax.optimization_barrier((value, arriving))
        return value, BulkFlight(flight.ckv, flight.packed, flight.arrived | {coming: landed})
