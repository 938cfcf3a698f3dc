"""Index scores as a Pallas-Triton kernel that reads keys straight from their pages.

A program scores a few rows of one request on a run of key tiles. A tile's keys are one side of a product, the rows'
heads, one after the other, its other side; heads are then weighted and summed. Tiles that no row of a program sees are
not read.
"""

from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Bool, Float, Int, Shaped

from glm_dcp_jax.kernels import encode_tiles, tiles
from glm_dcp_jax.kernels.index_scores import reference
from glm_dcp_jax.kernels.index_scores.reference import Paging
from glm_dcp_jax.kernels.topk.reference import sortable

_PROGRAMS = 256
"""Programs that keep a GPU busy; with more, each takes more key tiles."""
_MOST_TILES = 16
_WARPS = 8


class Tiling(NamedTuple):
    """What a program takes.

    rows: query rows. heads, columns: what their heads and the width of a key are padded to. keys: positions of a tile.
    tiles: key tiles, one after the other.
    """

    rows: int
    heads: int
    columns: int
    keys: int
    tiles: int

    @staticmethod
    def of(requests: int, rows: int, heads: int, width: int, context: int, itemsize: int) -> "Tiling":
        """itemsize: bytes of a query's element. float32 products run in threads' registers, which hold less."""
        most_lines, most_products = (32, 2048) if itemsize > 2 else (128, 16384)
        heads = max(tiles.next_power(heads), tiles.MIN_PRODUCT)
        together = min(tiles.next_power(rows), max(most_lines // heads, 1))
        keys = max(min(128, most_products // (together * heads)), tiles.MIN_PRODUCT)
        all_tiles = requests * -(-rows // together) * -(-context // keys)
        return Tiling(
            rows=together,
            heads=heads,
            columns=max(tiles.next_power(width), tiles.MIN_PRODUCT),
            keys=keys,
            tiles=min(max(all_tiles // _PROGRAMS, 1), _MOST_TILES),
        )

    def grid(self, requests: int, rows: int, context: int) -> tuple[int, int, int]:
        """Requests, groups of rows, runs of key tiles."""
        return requests, -(-rows // self.rows), -(-context // (self.keys * self.tiles))


def paged_index_scores(
    q: Float[Array, "N S I D"],
    head_weights: Float[Array, "N S I"],
    pool: Shaped[Array, "full *pool"],
    layer: Int[Array, ""],
    page_table: Int[Array, "N P"],
    visible: Int[Array, "N S"],
    paging: Paging,
    group: int,
    *,
    interpret: bool,
) -> tuple[Array, ...]:
    """See the op; scores, and maxima if group is not 0.

    Raises ValueError for byte-wise pools of 2 GiB or more, as `encode_tiles.as_units` does.
    """
    requests, rows, heads, width = q.shape
    context = page_table.shape[1] * paging.page_tokens
    if 0 in (q.size, context):
        # Sums over no heads, if there is anything to sum.
        return reference.with_maxima(jnp.zeros((requests, rows, context)), visible, group)
    tiling = Tiling.of(requests, rows, heads, width, context, q.dtype.itemsize)
    if paging.keys.quantised:
        pool = encode_tiles.as_units(pool, encode_tiles.unit_bytes(width))
    outputs = [jax.ShapeDtypeStruct((requests, rows, context), jnp.float32)]
    if group:
        outputs.append(jax.ShapeDtypeStruct((requests, rows, context // group), jnp.uint32))
    found: tuple[Array, ...] = pl.pallas_call(
        partial(_score, tiling=tiling, paging=paging, group=group),
        grid=tiling.grid(requests, rows, context),
        out_shape=tuple(outputs),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=_WARPS, num_stages=2 if q.dtype.itemsize > 2 else 4),
        name="index_scores",
    )(q, head_weights, pool, layer.reshape(1), page_table, visible)
    return found


def _score(
    q: jax.Ref,
    head_weights: jax.Ref,
    pool: jax.Ref,
    layer: jax.Ref,
    page_table: jax.Ref,
    visible: jax.Ref,
    scores: jax.Ref,
    *maxima: jax.Ref,
    tiling: Tiling,
    paging: Paging,
    group: int,
) -> None:
    """maxima: there if group is not 0."""
    request, rows = (jnp.broadcast_to(pl.program_id(axis), 1) for axis in (0, 1))
    context = scores.shape[2]
    row = rows * tiling.rows + jnp.arange(tiling.rows)
    limits = tiles.load(visible, request, row, mask=row < scores.shape[1])
    limit = jnp.minimum(jnp.max(limits), context)
    queries, weights = _load_queries(q, head_weights, request, rows, tiling)
    plane = tiles.load(layer, jnp.zeros(1, jnp.int32))
    start = pl.program_id(2) * tiling.tiles * tiling.keys

    def put(position: Array, values: Array) -> None:
        real = (row < scores.shape[1])[None, :] & (position < context)[:, None]
        tiles.store(scores, request[:, None], row[None, :], position[:, None], value=values, mask=real)

    def put_maxima(tile: Array, numbers: Array) -> None:
        of_tile = tiling.keys // group
        index = jax.lax.div(start, group) + tile * of_tile + jnp.arange(of_tile)
        real = (row < scores.shape[1])[None, :] & (index < context // group)[:, None]
        largest = jnp.max(numbers.reshape(of_tile, group, tiling.rows), axis=1)
        tiles.store(maxima[0], request[:, None], row[None, :], index[:, None], value=largest, mask=real)

    def score_tile(tile: Array, nothing: None) -> None:
        position = start + tile * tiling.keys + jnp.arange(tiling.keys)
        shown = position < limit
        page = tiles.load(page_table, request, jax.lax.div(position, paging.page_tokens), mask=shown)
        offset = jax.lax.rem(position, paging.page_tokens)
        load_keys = _load_quantised if paging.keys.quantised else _load_floats
        keys, scale = load_keys(pool, plane, jnp.maximum(page, 0), offset, shown, tiling.columns, paging)
        products = tiles.dot(keys.astype(queries.dtype), queries, transpose_b=True)
        weighted = jnp.maximum(products, 0.0) * weights[None, :]
        total = jnp.sum(weighted.reshape(tiling.keys, tiling.rows, tiling.heads), axis=2) * scale[:, None]
        total = jnp.where(total == 0, 0.0, total)
        seen = position[:, None] < limits[None, :]
        put(position, jnp.where(seen, total, -jnp.inf))
        if group:
            put_maxima(tile, jnp.where(seen, sortable(total), jnp.uint32(0)))

    def hide_tile(tile: Array, nothing: None) -> None:
        position = start + tile * tiling.keys + jnp.arange(tiling.keys)
        put(position, jnp.full((tiling.keys, tiling.rows), -jnp.inf))
        if group:
            put_maxima(tile, jnp.zeros((tiling.keys, tiling.rows), jnp.uint32))

    seen, last = (
        jnp.clip(jax.lax.div(end - start + tiling.keys - 1, tiling.keys), 0, tiling.tiles)
        for end in (limit, context)
    )
    jax.lax.fori_loop(0, seen, score_tile, None)
    jax.lax.fori_loop(seen, last, hide_tile, None)


def _load_queries(
    q: jax.Ref, head_weights: jax.Ref, request: Array, group: Array, tiling: Tiling
) -> tuple[Float[Array, "lines columns"], Float[Array, " lines"]]:
    """The heads of a program's rows, one after the other, and their weights."""
    _, rows, heads, width = q.shape
    line, column = jnp.arange(tiling.rows * tiling.heads), jnp.arange(tiling.columns)
    row = group * tiling.rows + jax.lax.div(line, tiling.heads)
    head = jax.lax.rem(line, tiling.heads)
    real = (row < rows) & (head < heads)
    mask = real[:, None] & (column < width)[None, :]
    queries = tiles.load(q, request[:, None], row[:, None], head[:, None], column[None, :], mask=mask)
    return queries, tiles.load(head_weights, request, row, head, mask=real)


def _load_floats(
    pool: jax.Ref, plane: Array, page: Array, offset: Array, shown: Array, columns: int, paging: Paging
) -> tuple[Float[Array, "keys columns"], Float[Array, " keys"]]:
    """Keys at these offsets of these pages, zeros where they are not shown, and scales of 1."""
    column = jnp.arange(columns)
    mask = shown[:, None] & (column < paging.keys.width)[None, :]
    slot = page * paging.page_tokens + offset
    keys = tiles.load(pool, plane[:, None], slot[:, None], column[None, :], mask=mask)
    return keys, jnp.ones(shown.shape, jnp.float32)


def _load_quantised(
    pool: jax.Ref,
    plane: Array,
    page: Array,
    offset: Array,
    shown: Bool[Array, " keys"],
    columns: int,
    paging: Paging,
) -> tuple[Float[Array, "keys columns"], Float[Array, " keys"]]:
    """As `_load_floats`, from units of 4 or 1 bytes: the codes' values, and their scales.

    Scores are scaled instead of keys: scales are powers of two, so that changes no bit.
    """
    unit, width, block_size = pool.dtype.itemsize, paging.keys.width, paging.block_size
    block = page * (paging.page_tokens // block_size) + jax.lax.div(offset, block_size)
    slot = jax.lax.rem(offset, block_size)
    column = jnp.arange(columns // unit)
    mask = shown[:, None] & (column < width // unit)[None, :]
    place = slot[:, None] * (width // unit) + column[None, :]
    units = tiles.load(pool, plane[:, None], block[:, None], place, mask=mask)
    codes = tiles.weave([(units >> 8 * part).astype(jnp.uint8) for part in range(unit)])
    bits = jnp.zeros(shown.shape, jnp.uint32)
    for part in range(4 // unit):
        place = (block_size * width + 4 * slot) // unit + part
        bits |= tiles.load(pool, plane, block, place, mask=shown).astype(jnp.uint32) << (8 * unit * part)
    keys = jax.lax.bitcast_convert_type(codes, jnp.float8_e4m3fn)
    return keys, jax.lax.bitcast_convert_type(bits, jnp.float32)
