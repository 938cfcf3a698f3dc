"""Path `queries` for decode: records stay where they are, query heads travel.

All DCP ranks' absorbed query heads are gathered, each rank attends over the selected records it owns, and the partial
outputs are merged by their LSE.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from glm_dcp_jax.kernels.sparse_attention import sparse_attention
from glm_dcp_jax.parallel.attention import AttentionLayer, AttentionSettings, Queries, Stationary
from glm_dcp_jax.parallel.batch import Block, Selection
from glm_dcp_jax.parallel.merge import gather_heads, merge_partials
from glm_dcp_jax.parallel.mesh import DCP


class OwnedSelection(NamedTuple):
    """slots: [T, K] int32, this rank's pool slots of committed selected records, with -1 behind (W > 1) or among them.

    current: [T, S] bool, which of the request's current rows are selected and owned here.
    """

    slots: Int[Array, "T K"]
    current: Bool[Array, "T S"]


class QueriesDecode(Stationary):
    """Decode rows (few per request) over positions."""

    def __init__(self, settings: AttentionSettings) -> None:
        self.settings = settings

    def wants_mask(self, block: Block) -> bool:
        """Decode selects positions."""
        return False

    def plan(self, selection: Selection, block: Block) -> OwnedSelection:
        """Keep what this rank owns: committed records by slot, the step's own rows by column."""
        layout, rank = self.settings.layout, jax.lax.axis_index(DCP)
        chosen = selection.positions
        assert chosen is not None, "decode selects positions"
        requests, rows, _ = chosen.shape
        committed = (chosen >= 0) & (chosen < block.start[:, None, None])
        mine = committed & (layout.owner(chosen) == rank)
        page_index = jnp.maximum(layout.page_index(chosen), 0).reshape(requests, -1)
        pages = jnp.take_along_axis(block.page_table, page_index, axis=1).reshape(chosen.shape)
        slots = jnp.where(mine, layout.slot(chosen, pages), -1)
        here = block.valid & (layout.owner(block.positions) == rank)
        taken = (chosen[:, :, :, None] == block.positions[:, None, None, :]).any(axis=2)
        current = taken & here[:, None, :]
        slots = slots.reshape(requests * rows, -1)
        if layout.world > 1:
            slots = _packed(slots)
        return OwnedSelection(slots, current.reshape(requests * rows, rows))

    def attend(
        self,
        plan: OwnedSelection,
        flight: Float[Array, "layers slots width"],
        layer: AttentionLayer,
        queries: Queries,
        current: Float[Array, "N S width"],
    ) -> Float[Array, "N S h v"]:
        """Gather heads, attend over owned records and own current rows, merge, expand to values."""
        settings, dtype = self.settings, queries.nope.dtype
        requests, rows = queries.nope.shape[:2]
        own = jnp.repeat(current, rows, axis=0) if rows > 1 else current
        q = absorb(queries, layer)
        q = q.reshape(requests * rows, *q.shape[2:])
        alone = settings.layout.world == 1
        if not alone:
            q = gather_heads(q)
        out, lse = sparse_attention(
            q,
            flight,
            layer.plane,
            plan.slots,
            settings.record,
            settings.scale,
            settings.outer_scale(layer.number),
            own,
            plan.current,
            settings.kernels,
            settings.shared_memory,
        )
        values = merged_values(out, lse, layer, settings, dtype)
        return values.reshape(requests, rows, *values.shape[1:])


def _packed(slots: Int[Array, "T K"]) -> Int[Array, "T K"]:
    """Each row's slots in their order, -1 behind: a kernel stops at the last one, and a rank owns one in W."""
    valid = slots >= 0
    place = jnp.where(valid, jnp.cumsum(valid, axis=1) - 1, slots.shape[1])
    row = jnp.arange(slots.shape[0])[:, None]
    return jnp.full_like(slots, -1).at[row, place].set(slots, mode="drop")


def absorb(queries: Queries, layer: AttentionLayer) -> Float[Array, "N S h CR"]:
    """q_nope folded with the key expansion into latent space, the roped part behind; accumulated in float32."""
    requests, rows, heads, width = queries.nope.shape
    by_head = queries.nope.reshape(requests * rows, heads, width).swapaxes(0, 1)
    # As an einsum over "nshd" XLA:CPU would turn the product around, into a form that it lacks for bfloat16.
    latent = jnp.einsum("hmd,hdc->hmc", by_head, layer.key_expansion, preferred_element_type=jnp.float32)
    latent = latent.swapaxes(0, 1).reshape(requests, rows, heads, -1)
    return jnp.concatenate([latent.astype(queries.rope.dtype), queries.rope], axis=-1)


def merged_values(
    out: Float[Array, "T WH C"],
    lse: Float[Array, "T WH"],
    layer: AttentionLayer,
    settings: AttentionSettings,
    dtype: jnp.dtype,
) -> Float[Array, "T h v"]:
    """This rank's heads' values from partial outputs over the DCP group's heads.

    Expanded first, they are v instead of C numbers a head on their way, but every rank reads all heads' expansion.
    """
    if settings.layout.world == 1:
        return expand_values(out, layer.value_expansion, dtype)
    if layer.group_values is not None and out.shape[0] >= (settings.project_rows or 1):
        partial_values = expand_values(out, layer.group_values, dtype)
        return merge_partials(partial_values, lse, settings.comm_backend, dtype)
    return expand_values(merge_partials(out, lse, settings.comm_backend, dtype), layer.value_expansion, dtype)


def expand_values(
    out: Float[Array, "T h C"], value_expansion: Float[Array, "h v C"], dtype: jnp.dtype
) -> Float[Array, "T h v"]:
    """Latent outputs to per-head values, accumulated in float32."""
    return jnp.einsum("thc,hvc->thv", out.astype(dtype), value_expansion, preferred_element_type=jnp.float32)
