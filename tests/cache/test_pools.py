"""The cache's device arrays: shapes, sharding, donation, and that steps write where placement says and nowhere else."""

import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm_dcp_jax.cache.capacity import page_bytes
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import Pools, make_pools, pool_shapes
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import ModelConfig, ParallelConfig
from glm_dcp_jax.engine.batch import BatchMaker, Line, shape_of
from glm_dcp_jax.engine.runner import Runner
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.sequence import Sequence
from glm_dcp_jax.engine.slot_columns import SlotColumns
from glm_dcp_jax.engine.work import Work
from glm_dcp_jax.parallel.mesh import make_mesh

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tiny import CONFIG, random_prompts, tiny_llm, write_tiny

MODEL = ModelConfig.from_hf(CONFIG)
PAGES = 7
LAYOUTS = (Layout(4, world=2, interleave=2), Layout(4, 2, 2, index_shards=2), Layout(4, 4, 2, index_shards=2))


def pools_on(tp: int, layout: Layout, dtype: str) -> Pools:
    mesh = make_mesh(ParallelConfig(tp, layout.world))
    return make_pools(pool_shapes(mesh, 2, 1, layout, RecordFormat.named(dtype, MODEL), PAGES))


def held_bytes(pools: Pools) -> set[int]:
    """What the devices hold of both pools."""
    held: dict[jax.Device, int] = {}
    for pool in pools:
        for shard in pool.addressable_shards:
            held[shard.device] = held.get(shard.device, 0) + shard.data.nbytes
    return set(held.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("tp", "dcp"), [(1, 1), (4, 2), (4, 4), (3, 3)])
class TestMaking:
    def test_shapes_are_layers_slots_and_widths_and_all_is_zero(self, devices, tp, dcp, dtype):
        devices(tp)
        pools = pools_on(tp, Layout(4, dcp), dtype)
        slots = PAGES * 4 * dcp
        assert pools.ckv.shape == (2, slots, MODEL.kv_lora_rank + MODEL.qk_rope_head_dim)
        assert pools.index_keys.shape == (1, slots, MODEL.index_head_dim)
        for pool in pools:
            assert pool.dtype == jnp.dtype(dtype) and not np.asarray(pool).any()

    def test_records_are_split_over_the_dcp_axis_and_index_keys_are_everywhere(self, devices, tp, dcp, dtype):
        devices(tp)
        pools = pools_on(tp, Layout(4, dcp), dtype)
        local = PAGES * 4
        for shard in pools.ckv.addressable_shards:
            rank = jax.devices().index(shard.device) % dcp  # neighbours form a DCP group
            assert shard.index[1].indices(dcp * local)[:2] == (rank * local, (rank + 1) * local)
        assert pools.index_keys.is_fully_replicated

    def test_each_device_holds_the_bytes_that_capacity_counts(self, devices, tp, dcp, dtype):
        devices(tp)
        layout = Layout(4, dcp)
        each = page_bytes(MODEL, layout, RecordFormat.named(dtype, MODEL))
        assert held_bytes(pools_on(tp, layout, dtype)) == {PAGES * each}


@pytest.mark.parametrize("dtype", ["float32", "fp8_ds_mla"])
@pytest.mark.parametrize(("tp", "dcp", "shards"), [(2, 2, 2), (8, 4, 2), (6, 6, 3), (8, 8, 8)])
def test_index_keys_in_parts_are_a_part_on_each_device(devices, tp, dcp, shards, dtype):
    devices(tp)
    layout = Layout(4, dcp, 1, shards)
    pools, record = pools_on(tp, layout, dtype), RecordFormat.named(dtype, MODEL)
    own = record.index.pool_shape(1, PAGES * 4 * dcp // shards, 4)
    assert {shard.data.shape for shard in pools.index_keys.addressable_shards} == {own}
    assert held_bytes(pools) == {PAGES * page_bytes(MODEL, layout, record)}


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_shapes_are_what_made_pools_are(devices, layout):
    devices(4)
    mesh = make_mesh(ParallelConfig(4, layout.world))
    shapes = pool_shapes(mesh, 2, 1, layout, RecordFormat.named("bfloat16", MODEL), PAGES)
    for wanted, made in zip(shapes, make_pools(shapes), strict=True):
        assert (wanted.shape, wanted.dtype, wanted.sharding) == (made.shape, made.dtype, made.sharding)


@pytest.fixture(scope="module", params=LAYOUTS[::2], ids=str)
def runner(request, devices, tmp_path_factory) -> Runner:
    devices(4)
    llm = tiny_llm(
        write_tiny(tmp_path_factory.mktemp("model")),
        tensor_parallel_size=4,
        decode_context_parallel_size=request.param.world,
        cp_kv_cache_interleave_size=2,
        dcp_indexer_shards=request.param.index_shards,
    )
    assert llm.engine.runner.layout == request.param
    return llm.engine.runner


def decode(runner: Runner, tokens: list[int], pages: tuple[int, ...]) -> None:
    """A decode step of one sequence, whose last token is not in the cache yet."""
    greedy = SamplingParams(temperature=0)
    sequence = Sequence(0, list(tokens), len(tokens), len(tokens) + 5, 0, greedy, slot=0)
    sequence.table = SimpleNamespace(pages=list(pages))
    work = Work(decodes=[sequence], reaches=[len(tokens)])
    columns = SlotColumns(runner.idle_slot, len(pages))
    runner.launch(BatchMaker(columns, vocab_size=512).make(work, shape_of(work, runner.buckets)))


def written(pool: jax.Array) -> set[int]:
    """Slots of a pool in which any layer holds anything."""
    return set(np.flatnonzero(np.asarray(pool).any(axis=(0, 2))).tolist())


class TestSteps:
    TOKENS = random_prompts(19)[0]
    TABLE = (5, 2, 9)  # pages of 8 or 16 tokens

    def expected(self, runner: Runner, length: int) -> tuple[set[int], set[int]]:
        """Slots of the first `length` tokens in both pools, counted over the whole arrays."""
        layout, index_layout = runner.layout, runner.layout.index_layout
        local, index_local = (runner.num_pages * part.block_size for part in (layout, index_layout))
        parts = layout.world if layout.index_shards > 1 else 1
        ckv, index = set(), set()
        for position in range(length):
            page = self.TABLE[position // layout.virtual_block]
            ckv.add(layout.owner(position) * local + layout.slot(position, page))
            for rank in range(index_layout.owner(position), parts, layout.index_shards):
                index.add(rank * index_local + index_layout.slot(position, page))
        return ckv, index

    def test_a_prefill_chunk_and_a_decode_token_land_where_placement_says(self, runner):
        """Padded rows (13 of 16, 3 of 4 requests) write nothing, not even into the null page."""
        runner.reset_pools()
        runner.prefill([Line(self.TOKENS[:13], 0, self.TABLE)])
        assert (written(runner.pools[0].ckv), written(runner.pools[0].index_keys)) == self.expected(
            runner, 13
        )
        decode(runner, self.TOKENS[:14], self.TABLE)
        assert (written(runner.pools[0].ckv), written(runner.pools[0].index_keys)) == self.expected(
            runner, 14
        )
        runner.prefill([Line(self.TOKENS[14:], 14, self.TABLE)])
        assert (written(runner.pools[0].ckv), written(runner.pools[0].index_keys)) == self.expected(
            runner, 19
        )

    def test_replicas_hold_the_same_records_bit_for_bit(self, runner):
        runner.reset_pools()
        runner.prefill([Line(self.TOKENS, 0, self.TABLE)])
        for pool in runner.pools[0]:
            parts: dict[str, bytes] = {}
            for shard in pool.addressable_shards:
                content = np.asarray(shard.data).tobytes()
                assert parts.setdefault(str(shard.index), content) == content

    def test_ranks_of_the_same_part_hold_the_same_index_keys(self, runner):
        runner.reset_pools()
        runner.prefill([Line(self.TOKENS, 0, self.TABLE)])
        keys, layout = np.asarray(runner.pools[0].index_keys), runner.layout
        copies = layout.world // layout.index_shards if layout.index_shards > 1 else 1
        first, *others = np.split(keys, copies, axis=1)
        assert first.any() and all(np.array_equal(other, first) for other in others)

    def test_every_step_takes_the_pools_and_gives_new_ones_laid_out_alike(self, runner):
        runner.reset_pools()
        for step in (
            lambda: runner.prefill([Line(self.TOKENS, 0, self.TABLE)]),
            lambda: decode(runner, [*self.TOKENS, 7], self.TABLE),
        ):
            (before,) = runner.pools
            step()
            assert before.ckv.is_deleted() and before.index_keys.is_deleted()
            for old, new in zip(before, runner.pools[0], strict=True):
                assert (new.shape, new.dtype) == (old.shape, old.dtype) and not new.is_deleted()
                assert new.sharding.is_equivalent_to(old.sharding, ndim=3)
