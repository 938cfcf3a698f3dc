"""Exact top-k as Pallas-Triton kernels: a threshold search by radix digits, a compaction, and a sort of k columns.

Scores become uint32 numbers in their order. Eight passes find that of the k-th best column, its threshold, four bits at
a time from the top. In a pass each program counts the next digits of its chunk's columns, of those whose digits so far
are the threshold's; the programs of the next pass add up their row's chunks and read the threshold's digit off. So a
pass is one launch of one kernel, without atomics. A last kernel gathers what is above the threshold, and the lowest
positions of what equals it.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float, Int

from glm_dcp_jax.kernels import tiles
from glm_dcp_jax.kernels.topk import reference

SORTED_COLUMNS = 4096
"""Rows of at most so many columns are sorted whole: up to here XLA's sort is one kernel, in shared memory."""

DIGIT = 4
"""Bits that a pass finds."""
BINS = 1 << DIGIT
PASSES = 32 // DIGIT

TILE = 1024
"""Columns that a program looks at at once."""
_PROGRAMS = 512
"""Programs that keep a GPU busy."""
_MOST_TILES = 255
"""Most tiles of a program, whose threads count each digit in a byte."""
_WORST = 0xFFFFFFFF
"""Sorts behind every column, as numbers are sorted inverted."""


class Chunks(NamedTuple):
    """How a row is split: `each_row` programs look at `tiles` tiles each."""

    each_row: int
    tiles: int

    @staticmethod
    def of(rows: int, columns: int) -> "Chunks":
        """As many as keep a GPU busy with all rows, at most one a tile."""
        row_tiles = -(-columns // TILE)
        each = min(-(-row_tiles // max(1, _PROGRAMS // rows)), _MOST_TILES)
        return Chunks(-(-row_tiles // each), each)


class Search(NamedTuple):
    """What a pass leaves: arrays of T rows, or references to them.

    threshold: uint32 [T], the digits found before it. room: int32 [T], how many of the columns with these digits are
    to be chosen. above: int32 [T, chunks], how many of a chunk's columns lie above them. counts: int32 [T, chunks,
    BINS], how many have these digits, by their next one.
    """

    threshold: Any
    room: Any
    above: Any
    counts: Any


def select_positions(
    scores: Float[Array, "T L"], visible: Int[Array, " T"], k: int, *, interpret: bool
) -> Int[Array, "T k"]:
    """See the op."""
    rows, columns = scores.shape
    if columns <= SORTED_COLUMNS or 0 in (rows, k):
        return reference.select_positions(scores, visible, k)
    seen = jnp.clip(visible, 0, columns).astype(jnp.int32)
    chunks = Chunks.of(rows, columns)

    def launch(kernel: Any, outputs: Any, *inputs: Array) -> Any:
        return pl.pallas_call(
            partial(kernel, chunks=chunks),
            grid=(rows, chunks.each_row),
            out_shape=outputs,
            interpret=interpret,
            compiler_params=plt.CompilerParams(num_warps=4, num_stages=2),
            name=f"topk{kernel.__name__}",
        )(*inputs)

    # As if a digit before the first were 0 in all columns.
    search = Search(
        threshold=jnp.zeros(rows, jnp.uint32),
        room=jnp.minimum(seen, k),
        above=jnp.zeros((rows, chunks.each_row), jnp.int32),
        counts=jnp.zeros((rows, chunks.each_row, BINS), jnp.int32).at[:, 0, 0].set(seen),
    )
    like = tuple(jax.ShapeDtypeStruct(part.shape, part.dtype) for part in search)
    for shift in reversed(range(0, 32, DIGIT)):
        search = Search(*launch(_count, like, scores, seen, jnp.full(1, shift, jnp.uint32), *search))
    chosen = [jax.ShapeDtypeStruct((rows, min(k, columns)), dtype) for dtype in (jnp.uint32, jnp.int32)]
    inverted, positions = launch(_gather, chosen, scores, seen, *search)
    _, positions = jax.lax.sort((inverted, positions), num_keys=2, is_stable=False)
    return jnp.pad(positions, ((0, 0), (0, k - positions.shape[1])), constant_values=-1)


def _count(scores: jax.Ref, seen: jax.Ref, shifts: jax.Ref, *rest: jax.Ref, chunks: Chunks) -> None:
    """One pass. rest: the parts of the Search before it, then those of the Search it makes."""
    row, chunk = _program()
    before, after = Search(*rest[:4]), Search(*rest[4:])
    shift = tiles.load(shifts, jnp.zeros(1, jnp.int32))
    digit, room, above, _ = _read(before, chunks)
    # Two shifts, because the digit before the first has none: 32 bits are not a shift.
    threshold = tiles.load(before.threshold, row) | (digit << shift << DIGIT)
    each, first = jnp.arange(above.size), chunk == 0
    tiles.store(after.threshold, row, value=threshold, mask=first)
    tiles.store(after.room, row, value=room, mask=first)
    tiles.store(after.above, row, each, value=above, mask=first & (each < chunks.each_row))

    def count(position: Array, number: Array, shown: Array, bins: tuple[Array, ...]) -> tuple[Array, ...]:
        # Of numbers with other digits so far, this is BINS or more.
        digit = (number - threshold) >> shift
        one = jnp.where(shown, jnp.uint32(1) << (8 * (digit & 3)), 0)
        return tuple(four + jnp.where((digit >> 2) == index, one, 0) for index, four in enumerate(bins))

    a, b, c, d = _each_tile(scores, seen, chunks, count, (jnp.zeros(TILE, jnp.uint32),) * 4)
    fours = jnp.stack([jnp.stack([a, c], -1), jnp.stack([b, d], -1)], -1)
    counts = (fours[..., None] >> (8 * jnp.arange(4, dtype=jnp.uint32))) & 255
    counts = jnp.sum(counts.astype(jnp.int32), axis=0).reshape(BINS)
    tiles.store(after.counts, row, chunk, jnp.arange(BINS), value=counts)


def _gather(scores: jax.Ref, seen: jax.Ref, *rest: jax.Ref, chunks: Chunks) -> None:
    """Each row's chosen columns, in the order of their positions, those above the threshold first; then -1.

    rest: the parts of the last Search; then the chosen columns' numbers, inverted, and their positions.
    """
    row, chunk = _program()
    search, (inverted, positions) = Search(*rest[:4]), rest[4:]
    digit, ties, chunk_above, chunk_equal = _read(search, chunks)
    threshold = tiles.load(search.threshold, row) | digit
    all_above = jnp.sum(chunk_above)
    earlier = jnp.arange(chunk_above.size) < chunk

    def gather(
        position: Array, number: Array, shown: Array, passed: tuple[Array, Array]
    ) -> tuple[Array, Array]:
        is_above, is_equal = shown & (number > threshold), shown & (number == threshold)
        # Both are counted at once, in the halves of an integer.
        ones = is_above.astype(jnp.int32) | (is_equal.astype(jnp.int32) << 16)
        before = jnp.cumsum(ones) - ones
        tie = passed[1] + (before >> 16)
        chosen = is_above | (is_equal & (tie < ties))
        place = jnp.where(is_above, passed[0] + (before & 0xFFFF), all_above + tie)
        tiles.store(inverted, row, place, value=~number, mask=chosen)
        tiles.store(positions, row, place, value=position, mask=chosen)
        total = jnp.sum(ones)
        return passed[0] + (total & 0xFFFF), passed[1] + (total >> 16)

    passed = tuple(jnp.sum(jnp.where(earlier, part, 0)) for part in (chunk_above, chunk_equal))
    _each_tile(scores, seen, chunks, gather, passed)

    def leave_empty(index: Array, nothing: None) -> None:
        place = index * TILE + jnp.arange(TILE)
        unused = (chunk == 0) & (place >= all_above + ties) & (place < positions.shape[1])
        tiles.store(inverted, row, place, value=jnp.full(TILE, _WORST, jnp.uint32), mask=unused)
        tiles.store(positions, row, place, value=jnp.full(TILE, -1, jnp.int32), mask=unused)

    jax.lax.fori_loop(0, -(-positions.shape[1] // TILE), leave_empty, None)


def _program() -> tuple[Int[Array, "1"], Int[Array, "1"]]:
    """This program's row, and its chunk of the row."""
    row, chunk = (jnp.broadcast_to(pl.program_id(axis), 1) for axis in (0, 1))
    return row, chunk


def _read(search: Search, chunks: Chunks) -> tuple[Array, Array, Array, Array]:
    """The program's row after a pass.

    Returns the threshold's next digit, uint32 [1]; how many of the columns with it are to be chosen, [1]; and for each
    chunk, how many columns lie above it, and how many have it.
    """
    row, _ = _program()
    chunk, bins = jnp.arange(tiles.next_power(chunks.each_row)), jnp.arange(BINS)
    real = chunk < chunks.each_row
    counts = tiles.load(search.counts, row[:, None], chunk[:, None], bins[None, :], mask=real[:, None])
    of_row = jnp.sum(counts, axis=0)
    at_least = jnp.sum(of_row) - jnp.cumsum(of_row) + of_row
    room = tiles.load(search.room, row)
    digit = jnp.sum((at_least >= room).astype(jnp.int32)) - 1
    higher = bins > digit
    above = tiles.load(search.above, row, chunk, mask=real)
    return (
        jnp.broadcast_to(digit, 1).astype(jnp.uint32),
        room - jnp.sum(jnp.where(higher, of_row, 0)),
        above + jnp.sum(jnp.where(higher[None, :], counts, 0), axis=1),
        jnp.sum(jnp.where((bins == digit)[None, :], counts, 0), axis=1),
    )


def _each_tile(scores: jax.Ref, seen: jax.Ref, chunks: Chunks, visit: Any, carry: Any) -> Any:
    """carry = visit(positions, numbers, which are visible, carry) for the visible tiles of the program's chunk."""
    row, chunk = _program()
    limit = tiles.load(seen, row)
    start = jnp.sum(chunk) * chunks.tiles * TILE

    def tile(index: Array, carry: Any) -> Any:
        position = start + index * TILE + jnp.arange(TILE)
        # Not masked by what is visible: a mask of no known alignment makes loads of one element.
        values = tiles.load(scores, row, position, mask=position < scores.shape[1])
        return visit(position, reference.sortable(values), position < limit, carry)

    needed = jax.lax.div(jnp.sum(limit) - start + TILE - 1, TILE)
    return jax.lax.fori_loop(0, jnp.clip(needed, 0, chunks.tiles), tile, carry)
