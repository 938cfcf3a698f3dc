"""Caches packed on one engine's devices and unpacked on another's hold the same bytes for every position."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import Pools, make_pools, pool_shapes
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ParallelConfig
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.transfer.packing import PARTS, Caches
from glm_dcp_jax.transfer.pieces import Geometry, Piece, bucket, buckets, cut, most_rows, piece_tokens

LAYERS, FULL, LENGTH = 3, 2, 53
RECORDS = {
    name: RecordFormat.sized(name, 32, 8, 16)
    for name in ("float32", "bfloat16", "fp8_ds_mla", "nvfp4_ds_mla")
}


def caches(record: RecordFormat, tp: int, layout: Layout, segments: int = 1, mtp: bool = True) -> Caches:
    mesh, pages = make_mesh(ParallelConfig(tp, layout.world)), layout.pages_for(LENGTH) * 2 + 3
    layers = np.array_split(np.arange(LAYERS), segments)
    full = np.array_split(np.arange(FULL), segments)
    shapes = tuple(
        pool_shapes(mesh, len(some), len(those), layout, record, pages)
        for some, those in zip(layers, full, strict=True)
    )
    extra = pool_shapes(mesh, 1, 1, layout.mtp_layout, record, pages) if mtp else None
    return Caches(mesh, layout, record, shapes, extra)


def empty(of: Caches) -> tuple[tuple[Pools, ...], Pools | None]:
    return tuple(make_pools(shapes) for shapes in of.segments), None if of.mtp is None else make_pools(of.mtp)


def page_table(layout: Layout, seed: int) -> list[int]:
    """Some pages in some order; never the null page."""
    needed = layout.pages_for(LENGTH)
    return (np.random.default_rng(seed).permutation(2 * needed + 2)[:needed] + 1).tolist()


def content(record: RecordFormat, part_bytes: int) -> np.ndarray:
    """A row for every position; bytes that are numbers in every format, so that NaN is none of them."""
    return np.random.default_rng(7).integers(0, 0x7E, size=(LENGTH, part_bytes), dtype=np.uint8)


def put(of: Caches, arrays, part: str, pages: list[int], rows: np.ndarray):
    """Rows of all positions, in one piece from one to one: what `unpack` itself is asked to do."""
    source = Geometry(1, Layout(of.layout.block_size, 1, of.layout.interleave))
    piece = Piece.of(source, Geometry(of.mesh.size, of.layout), 0, LENGTH)
    by_owner = np.argsort(of.placement(part).owner(np.arange(LENGTH)), kind="stable")
    slots, wanted = piece.to_unpack(part, pages, [rows[by_owner]], rows.shape[1])
    program = of.unpack(part, slots.shape[1])
    sharding = of.rows_sharding(part)
    new = program(
        of.pools_of(part, *arrays), jax.device_put(slots, sharding), jax.device_put(wanted, sharding)
    )
    return of.with_pools(part, *arrays, new)


def shown(of: Caches, arrays, part: str, pages: list[int]) -> np.ndarray:
    """The rows of all positions [R, LENGTH, bytes], as each copy of them has it, read by numpy from the pools alone."""
    placement, size = of.placement(part), of.layout.block_size
    found = []
    for replica in range(of.mesh.shape["replica"]):
        columns = []
        for pool, is_key in of._kinds(part, of.pools_of(part, *arrays)):
            by_rank = [np.asarray(shard.data) for shard in _in_order(of, pool, replica)]
            columns.append(_rows_of(of, by_rank, is_key, placement, pages, size))
        found.append(np.concatenate(columns, axis=1))
    return np.stack(found)


def _in_order(of: Caches, pool: jax.Array, replica: int) -> list:
    """A replica's shards by rank."""
    devices = list(of.mesh.devices[replica])
    return sorted(
        (shard for shard in pool.addressable_shards if shard.device in devices),
        key=lambda shard: devices.index(shard.device),
    )


def _rows_of(of: Caches, by_rank, is_key: bool, placement: Layout, pages, size: int) -> np.ndarray:
    index, rows = of.record.index, []
    for position in range(LENGTH):
        rank = position // placement.interleave % placement.world
        page = pages[position // placement.virtual_block]
        slot = int(placement.slot(position, page))
        copies = []
        for holder in range(rank, len(by_rank), placement.world):
            pool = by_rank[holder]
            if is_key and index.quantised:
                block, at = divmod(slot, size)
                scale = size * index.width + 4 * at
                raw = np.concatenate(
                    [
                        pool[:, block, at * index.width : (at + 1) * index.width],
                        pool[:, block, scale : scale + 4],
                    ],
                    axis=1,
                )
            else:
                raw = pool[:, slot].view(np.uint8)
            copies.append(raw.reshape(-1))
        assert all((copy == copies[0]).all() for copy in copies), "two ranks hold other keys for a position"
        rows.append(copies[0])
    return np.stack(rows)


def move(producer: Caches, consumer: Caches, there, here, start: int, pages, tokens: int):
    """Pieces one after the other, as an engine moves them."""
    mine, yours = (
        Geometry(producer.mesh.size, producer.layout),
        Geometry(consumer.mesh.size, consumer.layout),
    )
    for first, end in cut(start, LENGTH, tokens):
        piece = Piece.of(mine, yours, first, end)
        for part in PARTS:
            slots = piece.slots_to_pack(part, pages[0])
            assert slots.shape[1] in buckets(most_rows(producer.placement(part), tokens))
            pack = producer.pack(part, slots.shape[1])
            packed = pack(producer.pools_of(part, *there), jax.device_put(slots, producer.slots_sharding))
            counts = piece.rows(part)
            by_rank = np.asarray(packed).reshape(producer.mesh.size, slots.shape[1], -1)
            given = [rows[:count] for rows, count in zip(by_rank, counts, strict=True)]
            slots, rows = piece.to_unpack(part, pages[1], given, consumer.row_bytes(part))
            assert slots.shape[1] in buckets(most_rows(consumer.placement(part), tokens))
            unpack = consumer.unpack(part, slots.shape[1])
            sharding = consumer.rows_sharding(part)
            new = unpack(
                consumer.pools_of(part, *here),
                jax.device_put(slots, sharding),
                jax.device_put(rows, sharding),
            )
            here = consumer.with_pools(part, *here, new)
    return here


LAYOUTS = {
    "tp4/dcp4 -> tp4/dcp1": ((4, Layout(4, 4, 4)), (4, Layout(4))),
    "tp2/dcp1 -> tp4/dcp4": ((2, Layout(4)), (4, Layout(4, 4, 4))),
    "tp4 -> tp6": ((4, Layout(4, 4, 2)), (6, Layout(8, 6, 1))),
    "tp4/dcp2 -> tp8/dcp8": ((4, Layout(4, 2, 1)), (8, Layout(4, 8, 4))),
    "sharded keys": ((8, Layout(4, 4, 2, index_shards=2)), (4, Layout(4, 4, 1, index_shards=4))),
    "replicated to sharded keys": ((4, Layout(8, 4, 8)), (8, Layout(2, 4, 1, index_shards=2))),
}


CASES = [(pair, start, name) for pair in LAYOUTS for start, name in ((0, "bfloat16"), (21, "nvfp4_ds_mla"))]
CASES += [(pair, 21, name) for pair in list(LAYOUTS)[:2] for name in ("float32", "fp8_ds_mla")]


@pytest.mark.parametrize(("pair", "start", "name"), CASES, ids=str)
def test_every_position_arrives_and_nothing_else_is_touched(devices, pair, start, name):
    pair = LAYOUTS[pair]
    devices(max(pair[0][0], pair[1][0]))
    record = RECORDS[name]
    producer, consumer = (caches(record, tp, layout) for tp, layout in pair)
    pages = page_table(producer.layout, 1), page_table(consumer.layout, 2)
    there, here = empty(producer), empty(consumer)
    wanted = {part: content(record, producer.row_bytes(part)) for part in PARTS}
    for part in PARTS:
        there = put(producer, there, part, pages[0], wanted[part])
        assert (shown(producer, there, part, pages[0]) == wanted[part]).all()
    here = move(producer, consumer, there, here, start, pages, tokens=16)
    for part in PARTS:
        assert (shown(consumer, here, part, pages[1])[:, start:] == wanted[part][start:]).all()
        assert not shown(consumer, here, part, pages[1])[:, :start].any()
        total = sum(np.count_nonzero(np.asarray(pool)) for pool in consumer.pools_of(part, *here))
        copies = 1 if part == "records" else consumer.layout.world // consumer.layout.index_shards
        if part == "keys" and consumer.layout.index_shards == 1:
            copies = 1  # the global array has them once
        mtp_free = np.count_nonzero(wanted[part][start:])
        assert total == copies * _nonzero(record, part, wanted[part][start:], mtp_free)


def _nonzero(record: RecordFormat, part: str, rows: np.ndarray, raw: int) -> int:
    """Elements of rows that are not zero, in the pools' dtype."""
    kind = record.dtype if part == "records" else record.index.dtype
    if jnp.dtype(kind) == jnp.uint8:
        return raw
    return np.count_nonzero(rows.view(jnp.dtype(kind)))


def test_segments_and_an_mtp_layer_that_only_the_producer_has_change_nothing(devices):
    devices(4)
    record = RECORDS["bfloat16"]
    producer = caches(record, 4, Layout(4, 4), segments=2)
    consumer = caches(record, 2, Layout(8, 2), segments=1, mtp=False)
    pages = page_table(producer.layout, 1), page_table(consumer.layout, 2)
    there, here = empty(producer), empty(consumer)
    wanted = {part: content(record, producer.row_bytes(part)) for part in PARTS}
    for part in PARTS:
        there = put(producer, there, part, pages[0], wanted[part])
    here = move(producer, consumer, there, here, 0, pages, tokens=32)
    for part in PARTS:
        ours = wanted[part][:, : consumer.row_bytes(part)]
        assert (shown(consumer, here, part, pages[1]) == ours).all()
    assert producer.row_bytes("records") > consumer.row_bytes("records")


class TestPieces:
    def test_their_borders_do_not_depend_on_the_prefix(self):
        assert cut(0, 40, 16) == [(0, 16), (16, 32), (32, 40)]
        assert cut(21, 40, 16) == [(21, 32), (32, 40)]
        assert cut(40, 40, 16) == []

    def test_sizes_are_powers_of_two_within_the_bytes(self):
        assert piece_tokens(1000, 100, 10_000) == 8
        assert piece_tokens(10, 100, 10_000) == 1
        assert piece_tokens(10**9, 100, 1000) == 512

    def test_buckets_are_few(self):
        assert [bucket(rows) for rows in (0, 1, 16, 17, 65, 257, 512)] == [16, 16, 16, 64, 256, 512, 512]
        assert buckets(300) == [16, 64, 256, 512]
        assert buckets(1) == [16]
