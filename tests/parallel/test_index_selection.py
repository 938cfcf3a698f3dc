"""Selections from index keys on every rank, or in parts, against `select_paged` over all keys on one device: exactly.

Queries and keys are small whole numbers: scores have nothing to round, and many are equal.
"""

from functools import cache
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import IndexKeyFormat, RecordFormat
from glm_dcp_jax.kernels.index_keys import write_index_keys
from glm_dcp_jax.kernels.selection import select_paged
from glm_dcp_jax.parallel.attention import AttentionSettings
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.index_selection import FEW_ROWS, candidates, merge, select, selection_hash
from glm_dcp_jax.parallel.mesh import TENSOR_AXES

HEADS, WIDTH, K, CONTEXT, BLOCK_SIZE = 3, 8, 10, 192, 4
LENGTHS = (0, 1, K - 1, K, K + 1, 25, 150, CONTEXT)
DECODE, PREFILL = (5, 2), (2, 13)
"""Requests and rows of the blocks; 13 rows are a multiple of no number of ranks."""
SEEDS = 6


class Case(NamedTuple):
    """workspace: of the candidates or scores that are dealt with at once."""

    world: int
    shards: int
    replicas: int
    interleave: int
    record: str
    workspace: int

    @property
    def layout(self) -> Layout:
        return Layout(BLOCK_SIZE, self.world, self.interleave, self.shards)

    @property
    def settings(self) -> AttentionSettings:
        record = RecordFormat.sized(self.record, 8, 8, WIDTH)
        return AttentionSettings(self.layout, record, "ag_rs", 1.0, 8, K, kernels="reference")


SHARDINGS = [(world, shards) for world in (2, 4, 8) for shards in (1, 2, 4, 8) if shards <= world]
WHOLE, IN_BLOCKS = 2**28, 4000
CASES = [
    *(Case(world, shards, 8 // world, 1, "float32", WHOLE) for world, shards in SHARDINGS),
    *(Case(world, shards, 1, 2 if shards < 4 else 4, "fp8_ds_mla", IN_BLOCKS) for world, shards in SHARDINGS),
]


class Problem(NamedTuple):
    """keys: [N, CONTEXT, WIDTH] of the most requests of a block. Per block: q, head_weights and visible."""

    keys: np.ndarray
    decode: tuple[np.ndarray, ...]
    prefill: tuple[np.ndarray, ...]


def problem(seed: int) -> Problem:
    rng = np.random.default_rng(seed)
    whole = lambda *shape: rng.integers(-1, 2, shape).astype(np.float32)  # noqa: E731

    def rows(requests: int, count: int) -> tuple[np.ndarray, ...]:
        visible = rng.choice(LENGTHS, (requests, count)).astype(np.int32)
        visible[-1, count // 2 :] = 0  # padding
        return whole(requests, count, HEADS, WIDTH), whole(requests, count, HEADS), visible

    return Problem(whole(DECODE[0], CONTEXT, WIDTH), rows(*DECODE), rows(*PREFILL))


def filled(
    keys: jax.Array, table: jax.Array, layout: Layout, part: jax.Array, index: IndexKeyFormat
) -> jax.Array:
    """A pool with the part's keys in its second layer; the rest would be noticed."""
    shape = index.pool_shape(2, (table.size + 1) * layout.index_layout.block_size, BLOCK_SIZE)
    pool = jnp.full(shape, 255 if index.quantised else jnp.nan, index.dtype)
    place, positions = layout.index_layout, jnp.arange(CONTEXT)
    slots = place.slot(positions, table[:, layout.page_index(positions)])
    mine = jnp.where(place.owner(positions) == part, slots, -1)
    return write_index_keys(
        pool, 1, mine.reshape(-1), keys.reshape(-1, WIDTH), index, BLOCK_SIZE, "reference"
    )


@cache
def on_mesh(case: Case):
    """Jitted: of a problem and a page table, what every rank selects: decode, prefill, prefill as a mask."""
    settings, layout = case.settings, case.layout
    devices = np.array(jax.devices()[: case.world * case.replicas]).reshape(case.replicas, case.world)

    def on_device(given: Problem, table: jax.Array) -> tuple[jax.Array, ...]:
        part = jax.lax.axis_index("dcp") % case.shards
        pool = filled(given.keys, table, layout, part, settings.record.index)
        chosen = []
        for rows, as_mask in ((given.decode, False), (given.prefill, False), (given.prefill, True)):
            q, head_weights, visible = rows
            block = Block(visible, visible - 1, table[: len(q)])
            selection = select(q, head_weights, pool, 1, block, settings, as_mask, case.workspace)
            assert (selection.mask is not None, selection.positions is not None) == (as_mask, not as_mask)
            chosen.append((selection.mask if as_mask else selection.positions)[None])
        return tuple(chosen)

    mesh = Mesh(devices, TENSOR_AXES)
    return jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=(P(), P()), out_specs=P(TENSOR_AXES), check_vma=False)
    )


@cache
def on_one_device(record: str):
    """The same selections by `select_paged`, from keys that lie in the order of their positions."""
    index = RecordFormat.sized(record, 8, 8, WIDTH).index
    layout = Layout(BLOCK_SIZE)

    def run(given: Problem) -> tuple[jax.Array, ...]:
        pages = CONTEXT // BLOCK_SIZE
        table = jnp.arange(DECODE[0] * pages).reshape(-1, pages)
        pool = filled(given.keys, table, layout, 0, index)
        args = K, index, BLOCK_SIZE, BLOCK_SIZE
        return tuple(
            select_paged(q, weights, pool, 1, table[: len(q)], visible, *args, as_mask, backend="reference")
            for (q, weights, visible), as_mask in (
                (given.decode, False),
                (given.prefill, False),
                (given.prefill, True),
            )
        )

    return jax.jit(run)


def shuffled_pages(layout: Layout, seed: int) -> np.ndarray:
    """A page table for every request, without the null page."""
    pages = CONTEXT // layout.virtual_block
    order = np.random.default_rng(seed).permutation(DECODE[0] * pages) + 1
    return order.reshape(DECODE[0], pages).astype(np.int32)


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case)))
def test_every_rank_selects_what_one_device_with_all_keys_does(case: Case, devices) -> None:
    devices(case.world * case.replicas)
    assert DECODE[1] <= FEW_ROWS < PREFILL[1]
    for seed in range(SEEDS):
        given = problem(seed)
        expected = on_one_device(case.record)(given)
        found = on_mesh(case)(given, shuffled_pages(case.layout, seed))
        for ranks, right in zip(found, expected, strict=True):
            assert ranks.dtype == right.dtype
            np.testing.assert_array_equal(ranks, np.broadcast_to(right, ranks.shape))


@pytest.mark.parametrize("case", [CASES[0], CASES[1]], ids=["replicated", "in parts"])
def test_stages_have_names_in_traces(case: Case, devices) -> None:
    devices(case.world * case.replicas)
    lowered = on_mesh(case).lower(problem(0), shuffled_pages(case.layout, 0))
    text = lowered.as_text(debug_info=True)
    stages = ("index_scores", "top_k", "index_merge")
    assert [stage for stage in stages if f'"{stage}/' not in text] == []


def in_order(scores: np.ndarray, positions: np.ndarray) -> list[int]:
    """The positions that are none of -1, as they are selected: the definition."""
    ranked = np.where(np.isnan(scores), -np.inf, scores)
    pairs = [(-score, position) for score, position in zip(ranked, positions, strict=True) if position >= 0]
    return [int(position) for _, position in sorted(pairs)]


@cache
def merged_to(k: int):
    """Jitted: of scores and positions, the k best."""
    return jax.jit(lambda scores, positions: merge(candidates(scores, positions), k))


@pytest.mark.parametrize(("columns", "k"), [(40, 7), (40, 40), (12, 20)])
def test_merging_puts_the_best_scores_first_then_the_lowest_positions(columns: int, k: int) -> None:
    """Also among scores of -inf, of NaN, and of both zeros; what is no candidate comes behind all of these."""
    rng = np.random.default_rng(columns + k)
    scores = rng.choice(np.float32([-np.inf, np.nan, -1.5, -0.0, 0.0, 2, 3e38, np.inf]), (50, columns))
    positions = np.array([rng.permutation(1000)[:columns] for _ in scores], np.int32)
    positions[rng.random(positions.shape) < 0.3] = -1
    positions[0] = -1
    merged = merged_to(k)(scores, positions)
    assert merged.shape == (50, k) and merged.dtype == jnp.int32
    for row, found in enumerate(np.asarray(merged)):
        right = in_order(scores[row], positions[row])[:k]
        assert found.tolist() == right + [-1] * (k - len(right))


def test_what_is_best_in_each_part_is_not_what_is_best() -> None:
    """On the data above a union of the parts' best, however it is cut to k, is another selection than the merge."""
    layout = Layout(BLOCK_SIZE, 4, 1, index_shards=4).index_layout
    q, head_weights, visible = problem(0).decode
    keys, differs = problem(0).keys, np.zeros(3, int)
    rows = [at for at in np.ndindex(visible.shape) if visible[at] > 2 * K]
    for request, row in rows:
        dots = np.maximum(q[request, row] @ keys[request].T, 0)
        scores, positions = head_weights[request, row] @ dots, np.arange(visible[request, row])
        parts = [positions[layout.owner(positions) == part] for part in range(layout.world)]
        best = [in_order(scores[part], part)[:K] for part in parts]
        together = np.concatenate(best)
        right = in_order(scores[positions], positions)[:K]
        assert merged_to(K)(scores[together], together.astype(np.int32)).tolist() == right
        by_score_alone = together[np.argsort(-scores[together], kind="stable")][:K]
        shares = np.concatenate([part[: -(-K // len(parts))] for part in best])[:K]
        for at, wrong in enumerate((together[:K], shares, by_score_alone)):
            differs[at] += set(wrong.tolist()) != set(right)
    assert len(rows) >= 3 and (differs > len(rows) // 2).all()


def test_candidates_of_no_more_rows_exist_than_the_workspace_holds(devices) -> None:
    """Half a megabyte beside the result, where the scores and candidates of all rows are several megabytes."""
    devices(2)
    rows, context, k = 1024, 1024, 128
    settings = AttentionSettings(
        Layout(64, 2, 1, index_shards=2),
        RecordFormat.sized("float32", 8, 8, WIDTH),
        "ag_rs",
        1.0,
        8,
        k,
        kernels="reference",
    )
    mesh = Mesh(np.array(jax.devices()[:2]).reshape(1, 2), TENSOR_AXES)

    def temporaries(workspace: int) -> int:
        def on_device(q, head_weights, pool, table, positions):
            block = Block(positions, positions, table)
            return select(q, head_weights, pool, 0, block, settings, False, workspace).positions

        specs = (P(), P(), P(None, "dcp"), P(), P())
        step = jax.jit(jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
        shaped = jax.ShapeDtypeStruct
        arrays = (
            shaped((1, rows, HEADS, WIDTH), jnp.float32),
            shaped((1, rows, HEADS), jnp.float32),
            shaped((1, context, WIDTH), jnp.float32),
            shaped((1, context // 128), jnp.int32),
            shaped((1, rows), jnp.int32),
        )
        return step.lower(*arrays).compile().memory_analysis().temp_size_in_bytes

    assert temporaries(2**18) < 2 * 2**18 + 4 * rows * k
    assert temporaries(2**28) > 4 * rows * context


class TestHash:
    CHOSEN = np.random.default_rng(0).integers(-1, 2**17, (3, 2, 40)).astype(np.int32)

    def test_it_is_a_sum_modulo_two_to_the_32(self) -> None:
        def mixed(number: int) -> int:
            number = (number ^ number >> 16) * 0x85EBCA6B % 2**32
            number = (number ^ number >> 13) * 0xC2B2AE35 % 2**32
            return number ^ number >> 16

        terms = [
            mixed(entry % 2**32 ^ mixed(place)) for place, entry in enumerate(self.CHOSEN.ravel().tolist())
        ]
        assert sum(terms) > 2**32
        for found in (selection_hash(self.CHOSEN), jax.jit(selection_hash)(self.CHOSEN)):
            assert (found.shape, found.dtype, int(found)) == ((), jnp.uint32, sum(terms) % 2**32)

    def test_every_entry_and_its_place_count(self) -> None:
        hash_of = jax.jit(selection_hash)
        rng, changed = np.random.default_rng(1), [self.CHOSEN]
        for _ in range(500):
            other = self.CHOSEN.copy()
            at, another = (tuple(rng.integers(0, other.shape)) for _ in range(2))
            if len(changed) % 2:
                other[at] += rng.choice([-1, 1, 64, 2**16])
            else:
                other[at], other[another] = other[another], other[at]
            changed.append(other)
        distinct = {one.tobytes() for one in changed}
        assert len(distinct) > 450
        assert len({int(hash_of(one)) for one in changed}) == len(distinct)

    def test_hashes_of_groups_hash_in_their_order(self) -> None:
        one, other = (selection_hash(part) for part in self.CHOSEN[:2])
        of_both = {
            int(selection_hash(jnp.stack(hashes))) for hashes in ([one, other], [other, one], [one, one])
        }
        assert len(of_both) == 3

    def test_masks_hash_too(self) -> None:
        mask = self.CHOSEN > 2**16
        assert selection_hash(mask) == selection_hash(mask.astype(np.int32)) != selection_hash(~mask)
