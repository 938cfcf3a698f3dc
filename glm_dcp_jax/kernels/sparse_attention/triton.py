"""Sparse MLA attention as a Pallas-Triton kernel: records are decoded in the program that attends over them.

A program takes some heads of one row and some tiles of its list, and writes a partial output and LSE; one more takes
the row's current records. `combine` merges the partials.
"""

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels import record_tiles, tiles
from glm_dcp_jax.kernels.combine import combine
from glm_dcp_jax.kernels.sparse_attention.tiling import Tiling, tiling


def sparse_attention(
    q: Float[Array, "T H CR"],
    pool: Shaped[Array, "planes slots width"],
    plane: Int[Array, ""],
    slots: Int[Array, "T K"],
    record: RecordFormat,
    scale: float,
    sharers: int,
    shared_memory: int,
    interpret: bool,
    seen_by: Int[Array, "T K"] | None = None,
    outer_scale: Float[Array, ""] | None = None,
    current: Shaped[Array, "T S width"] | None = None,
    current_valid: Bool[Array, "T S"] | Int[Array, "T S"] | None = None,
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """See the op."""
    rows, heads, _ = q.shape
    if 0 in (rows, heads):
        return jnp.zeros((rows, heads, record.latent_width)), jnp.zeros((rows, heads))
    cut = tiling(rows, heads, slots.shape[1], q.dtype, shared_memory, sharers > 1)
    optional: dict[str, Array] = {} if seen_by is None else {"seen_by": seen_by}
    if outer_scale is not None:
        optional["outer_scale"] = outer_scale.astype(jnp.float32).reshape(1)
    if current is not None and current_valid is not None:
        optional |= {"current": record_tiles.as_stored(current, record), "current_valid": current_valid}
    partials = cut.splits + ("current" in optional)

    def kernel(*refs: jax.Ref) -> None:
        q, pool, plane, slots, *more, out, lse = refs
        given = dict(zip(optional, more, strict=True))
        row, partial = pl.program_id(2), pl.program_id(1)
        head = pl.program_id(0) * cut.heads + jnp.arange(cut.heads)
        program = _Program(
            row, partial, head, q, out, lse, given.get("outer_scale"), record, cut, scale, sharers
        )
        listed = functools.partial(_listed, pool, plane, slots, given.get("seen_by"), row, partial, cut)
        pl.when(partial < cut.splits)(lambda: program.attend(listed()))
        if "current" in given:
            own = _current(given["current"], given["current_valid"], row, cut)
            pl.when(partial == cut.splits)(lambda: program.attend(own))

    out, lse = pl.pallas_call(
        kernel,
        grid=(cut.head_blocks(heads), partials, rows),
        out_shape=(
            jax.ShapeDtypeStruct((rows, partials, heads, record.latent_width), jnp.float32),
            jax.ShapeDtypeStruct((rows, partials, heads), jnp.float32),
        ),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        name="sparse_attention",
    )(q, record_tiles.as_stored(pool, record), plane.reshape(1), slots, *optional.values())
    return combine(out, lse, interpret)


class _List(NamedTuple):
    """What a program attends over. slots_at: slots at indices [*n] of the row's list, -1 for nothing. seen_at: bits of
    those who see them, where several share the list.

    The program's tiles are first, first + stride, ...: `steps` of them, of `records` records each.
    """

    stored: jax.Ref
    plane: Int[Array, ""]
    slots_at: Callable[[Array], Array]
    seen_at: Callable[[Array], Array]
    first: Int[Array, ""] | int
    stride: int
    steps: int
    records: int

    def indices(self, number: Int[Array, "*n"]) -> Int[Array, "*n records"]:
        """Those of the program's tiles of these numbers."""
        tile = self.first + self.stride * number
        return tile[..., None] * self.records + jnp.arange(self.records)

    def length(self) -> Int[Array, ""]:
        """Tiles up to the last one that has a record."""
        number = jnp.arange(tiles.next_power(self.steps))
        held = (jnp.max(self.slots_at(self.indices(number)), axis=1) >= 0) & (number < self.steps)
        return jnp.max(jnp.where(held, number + 1, 0))


def _listed(
    pool: jax.Ref,
    plane: jax.Ref,
    slots: jax.Ref,
    seen_by: jax.Ref | None,
    row: Array,
    split: Array,
    cut: Tiling,
) -> _List:
    """A split's part of the row's slots."""
    count = slots.shape[1]

    def slots_at(index: Array) -> Array:
        return tiles.load(slots, _like(row, index), index, mask=index < count, other=-1)

    def seen_at(index: Array) -> Array:
        assert seen_by is not None, "only sharers are asked for"
        return tiles.load(seen_by, _like(row, index), index, mask=index < count, other=0)

    per_split = -(-count // (cut.splits * cut.records))
    return _List(pool, tiles.only(plane), slots_at, seen_at, split, cut.splits, per_split, cut.records)


def _current(current: jax.Ref, valid: jax.Ref, row: Array, cut: Tiling) -> _List:
    """The row's current records, as if `current` were a pool whose planes are the rows."""
    count = current.shape[1]

    def seen_at(index: Array) -> Array:
        return tiles.load(valid, _like(row, index), index, mask=index < count, other=0)

    def slots_at(index: Array) -> Array:
        return jnp.where(seen_at(index) != 0, index, -1)

    records = min(max(tiles.next_power(count), tiles.MIN_PRODUCT), cut.records)
    return _List(current, row, slots_at, seen_at, 0, 1, -(-count // records), records)


class _State(NamedTuple):
    """An online softmax to base 2 over the records so far. top: the largest score. total: sum of exponentials.

    out: sum of latents weighted by their exponentials, [M, C] if wide, else [C, M].
    """

    top: Float[Array, " M"]
    total: Float[Array, " M"]
    out: Float[Array, "..."]


class _Program(NamedTuple):
    """Attention of the M heads `head` of one row, as one of its partials.

    out: [T, partials, H, C]. lse: [T, partials, H]. outer_scale: [1].
    """

    row: Int[Array, ""]
    partial: Int[Array, ""]
    head: Int[Array, " M"]
    q: jax.Ref
    out: jax.Ref
    lse: jax.Ref
    outer_scale: jax.Ref | None
    record: RecordFormat
    cut: Tiling
    scale: float
    sharers: int

    def attend(self, todo: _List) -> None:
        """Attend over the list and write the result to this program's place."""
        record = self.record
        columns = record_tiles.latent_columns(record)
        q_latent = self._queries(0, record.latent_width, columns)
        q_rope = self._queries(record.latent_width, record.rope_width, record_tiles.rope_columns(record))
        outer_scale = None if self.outer_scale is None else tiles.only(self.outer_scale)

        def step(number: Array, state: _State) -> _State:
            index = todo.indices(number)
            slots = todo.slots_at(index)
            tile = record_tiles.RecordTile(todo.stored, todo.plane, slots, slots >= 0, record)
            latent = record_tiles.load_latent(tile, self.q.dtype, outer_scale)
            rope = record_tiles.load_rope(tile, self.q.dtype)
            scores = tiles.dot(latent, q_latent, transpose_b=True) + tiles.dot(rope, q_rope, transpose_b=True)
            seen = tile.valid[:, None]
            if self.sharers > 1:
                seen &= (todo.seen_at(index)[:, None] >> self._sharer()[None, :]) & 1 != 0
            scores = jnp.where(seen, scores * (self.scale * math.log2(math.e)), -jnp.inf)
            return self._add(state, scores, latent)

        heads = self.cut.heads
        nothing = jnp.zeros((heads, columns) if self.cut.wide else (columns, heads))
        start = _State(jnp.full((heads,), -jnp.inf), jnp.zeros((heads,)), nothing)
        self._write(jax.lax.fori_loop(0, todo.length(), step, start))

    def _add(self, state: _State, scores: Float[Array, "N M"], latent: Float[Array, "N C"]) -> _State:
        """One more tile, whose scores are exponents of 2."""
        axis = 1 if self.cut.wide else 0
        scores = scores.T if self.cut.wide else scores
        top = jnp.maximum(state.top, jnp.max(scores, axis=axis))
        base = jnp.where(top == -jnp.inf, 0.0, top)
        weight = jnp.exp2(scores - self._per_head(base))
        shrink = jnp.exp2(state.top - base)
        total = state.total * shrink + jnp.sum(weight, axis=axis)
        weight = weight.astype(latent.dtype)
        added = tiles.dot(weight, latent) if self.cut.wide else tiles.dot(latent.T, weight)
        return _State(top, total, state.out * self._per_head(shrink) + added)

    def _write(self, state: _State) -> None:
        """Normalised output and natural LSE. A merge does not look at the output of heads that saw nothing."""
        inside = self.head < self.q.shape[1]
        lse = (state.top + jnp.log2(state.total)) * math.log(2)
        row, partial = _like(self.row, self.head), _like(self.partial, self.head)
        tiles.store(self.lse, row, partial, self.head, value=lse, mask=inside)

        reciprocal = 1.0 / jnp.where(state.total == 0, 1.0, state.total)
        column = jnp.arange(record_tiles.latent_columns(self.record))
        column = column[None, :] if self.cut.wide else column[:, None]
        wanted = inside if self.out.shape[1] == 1 else inside & (state.total != 0)
        mask = self._per_head(wanted) & (column < self.record.latent_width)
        place = _like(self.row, column), _like(self.partial, column), self._per_head(self.head), column
        tiles.store(self.out, *place, value=state.out * self._per_head(reciprocal), mask=mask)

    def _queries(self, start: int, count: int, columns: int) -> Float[Array, "M columns"]:
        """Columns start to start + count of the row's queries, then zeros."""
        head, column = self.head[:, None], jnp.arange(columns)[None, :]
        mask = (head < self.q.shape[1]) & (column < count)
        return tiles.load(self.q, _like(self.row, head), head, start + column, mask=mask)

    def _sharer(self) -> Int[Array, " M"]:
        """Whose heads they are; those past the last are of one who sees nothing."""
        each = self.q.shape[1] // self.sharers
        return jnp.minimum(self.head // each, self.sharers)

    def _per_head(self, values: Shaped[Array, " M"]) -> Shaped[Array, "..."]:
        """Values of heads, to be broadcast over the output's tile or the weights'."""
        return values[:, None] if self.cut.wide else values[None, :]


def _like(number: Int[Array, ""], index: Array) -> Int[Array, "..."]:
    """A number as an index beside `index`."""
    return jnp.full((1,) * index.ndim, number)
