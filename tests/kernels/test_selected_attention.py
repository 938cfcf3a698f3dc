"""Attention over a pool's selected records: reference and kernel against a softmax in float64 over decoded records."""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels import record_tiles, tiles
from glm_dcp_jax.kernels.combine import combine
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.sparse_attention import sparse_attention
from glm_dcp_jax.kernels.sparse_attention.cost import cost
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY, tiling

PLANES, SLOTS, SCALE = 2, 40, 0.3
LARGE_SHARED_MEMORY = 227 * 1024


class Case(NamedTuple):
    """Sizes of a problem: few, because each is compiled."""

    name: str
    latent: int
    rope: int
    rows: int
    heads: int
    count: int
    current: int = 0
    dtype: type = np.float32
    rope_kind: str = "bfloat16"
    outer_scale: float | None = None
    shared_memory: int = SHARED_MEMORY

    def __str__(self) -> str:
        return f"{self.name}-{self.latent}-{self.heads}x{self.count}"

    @property
    def record(self) -> RecordFormat:
        return RecordFormat.sized(self.name, self.latent, self.rope, 8, self.rope_kind)

    @property
    def scales(self) -> tuple:
        return () if self.outer_scale is None else (np.float32(self.outer_scale),)


BFLOAT16 = ml_dtypes.bfloat16
CASES = [
    Case("float32", 1, 1, rows=1, heads=1, count=1),
    Case("float32", 24, 6, rows=2, heads=17, count=64, current=3),
    Case("bfloat16", 16, 4, rows=2, heads=8, count=7, current=1, dtype=BFLOAT16),
    Case("bfloat16", 33, 2, rows=48, heads=17, count=100),  # several tiles to a program
    Case("fp8_ds_mla", 20, 3, rows=2, heads=5, count=7, current=20),  # 30 bytes a record: bytewise
    Case("fp8_ds_mla", 144, 8, rows=3, heads=8, count=64, dtype=BFLOAT16),  # two groups, words
    Case("nvfp4_ds_mla", 24, 3, rows=2, heads=1, count=100, current=2, outer_scale=0.4),  # bytewise
    Case("nvfp4_ds_mla", 64, 8, rows=3, heads=17, count=7, current=1, dtype=BFLOAT16, outer_scale=1.7),
    Case("nvfp4_ds_mla", 128, 16, rows=2, heads=8, count=100, dtype=BFLOAT16, rope_kind="fp8"),
    Case("nvfp4_ds_mla", 40, 5, rows=2, heads=5, count=7, current=2, rope_kind="fp8"),  # bytewise
    Case(
        "bfloat16", 16, 4, 16, 64, 300, 2, BFLOAT16, shared_memory=LARGE_SHARED_MEMORY
    ),  # wide programs, too
]


class Problem(NamedTuple):
    """Arguments of the op: current and its mask last, if the case has current records."""

    q: np.ndarray
    pool: np.ndarray
    plane: int
    slots: np.ndarray
    own: tuple = ()


@cache
def compiled(case: Case, backend: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def run(q, pool, plane, slots, *more):
        scale, own = (more[0], more[1:]) if case.scales else (None, more)
        current, valid = own or (None, None)
        options = {"backend": backend, "shared_memory": case.shared_memory}
        return sparse_attention(q, pool, plane, slots, case.record, SCALE, scale, current, valid, **options)

    return jax.jit(run)


def attend(case: Case, problem: Problem, backend: str) -> tuple[np.ndarray, np.ndarray]:
    found = compiled(case, backend)(*problem[:4], *case.scales, *problem.own)
    assert [part.dtype for part in found] == [np.float32, np.float32]
    out, lse = map(np.asarray, found)
    return out, lse


@cache
def encode(record: RecordFormat) -> Callable[..., jax.Array]:
    return jax.jit(record.encode)


@cache
def decode(record: RecordFormat, dtype: type) -> Callable[..., jax.Array]:
    return jax.jit(lambda records, *scales: record.decode(records, dtype, *scales).astype(np.float32))


def encoded(case: Case, rng: np.random.Generator, *shape: int) -> np.ndarray:
    latent, rope = (rng.standard_normal((*shape, n)).astype(np.float32) for n in (case.latent, case.rope))
    return np.array(encode(case.record)(latent, rope, *case.scales))


def unreadable(records: np.ndarray, unused: np.ndarray) -> np.ndarray:
    """Records of which the unused ones are NaN throughout: bytes of ones are NaN in every format but E2M1."""
    spoilt = records.copy()
    spoilt.view(np.uint8)[unused] = 255
    return spoilt


def listed(rng: np.random.Generator, kind: str, count: int) -> np.ndarray:
    """A row's slots; the last of the pool is among them, if any is."""
    chosen = rng.integers(0, SLOTS, count)
    chosen[0] = SLOTS - 1
    front = np.arange(count)
    kept = {
        "none": front < 0,
        "one": front < 1,
        "all but one": front < max(count - 1, 1),
        "all": front < count,
        "scattered": rng.random(count) < 0.3,
        "the last alone": front == count - 1,
    }[kind]
    return np.where(kept, chosen, -1)


KINDS = ("none", "one", "all but one", "all", "scattered", "the last alone")


def random_problem(case: Case, seed: int, kinds: list[str]) -> Problem:
    rng = np.random.default_rng(seed)
    slots = np.stack([listed(rng, kinds[row % len(kinds)], case.count) for row in range(case.rows)])
    plane = seed % PLANES
    unused = np.ones((PLANES, SLOTS), bool)
    unused[plane, slots[slots >= 0]] = False
    pool = unreadable(encoded(case, rng, PLANES, SLOTS), unused)
    q = rng.standard_normal((case.rows, case.heads, case.latent + case.rope)).astype(case.dtype)
    own: tuple = ()
    if case.current:
        valid = rng.random((case.rows, case.current)) < rng.random()
        own = (unreadable(encoded(case, rng, case.rows, case.current), ~valid), valid)
    return Problem(q, pool, plane, slots.astype(np.int32), own)


def decoded(case: Case, records: np.ndarray) -> np.ndarray:
    return np.asarray(decode(case.record, case.dtype)(records, *case.scales), np.float64)


def oracle(case: Case, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE in float64, row by row over the records it selects, each as often as it is listed."""
    out = np.zeros((case.rows, case.heads, case.latent))
    lse = np.full((case.rows, case.heads), -np.inf)
    pool, (current, valid) = decoded(case, problem.pool)[problem.plane], problem.own or ((), ())
    current = decoded(case, current) if len(current) else current
    for row, slots in enumerate(problem.slots):
        values = pool[slots[slots >= 0]]
        if len(current):
            values = np.concatenate([values, current[row][valid[row]]])
        if not len(values):
            continue
        scores = np.asarray(problem.q[row], np.float64) @ values.T * SCALE
        top = scores.max(axis=1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True)
        out[row] = weights / total @ values[:, : case.latent]
        lse[row] = (top + np.log(total))[:, 0]
    return out, lse


def assert_close(case: Case, problem: Problem, found: tuple) -> None:
    """1e-5; in bfloat16 probabilities are rounded, and an output is off by up to 2**-8 of the largest latent."""
    out, lse = oracle(case, problem)
    records = (problem.pool, *problem.own[:1])
    largest = max(np.nanmax(np.abs(decoded(case, part)), initial=0) for part in records)
    np.testing.assert_allclose(found[1], lse, rtol=1e-5, atol=1e-5)
    rounding = 0 if case.dtype is np.float32 else 2**-8 * largest
    np.testing.assert_allclose(found[0], out, rtol=1e-5, atol=1e-5 + rounding)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_it_is_softmax_over_the_selected_and_the_current_records(case: Case, backend: str) -> None:
    """Whatever else the pool holds; and nothing is output 0 and LSE -inf."""

    @settings(max_examples=10, deadline=None)
    @given(st.integers(0, 2**32 - 1), st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    def holds(seed: int, kinds: list[str]) -> None:
        problem = random_problem(case, seed, [*kinds, *KINDS])
        assert_close(case, problem, attend(case, problem, backend))

    holds()


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_current_records_count_as_if_they_were_in_the_pool(backend: str) -> None:
    case = CASES[9]
    problem = random_problem(case, 3, ["all"])
    current, valid = problem.own
    problem.slots[0, -case.current :] = -1
    expected = attend(case, problem._replace(own=(current, np.ones_like(valid))), backend)
    room = np.setdiff1d(np.arange(SLOTS), problem.slots[0])[: case.current]
    problem.slots[0, -case.current :] = room
    problem.pool[problem.plane, room] = current[0]
    found = attend(case, problem._replace(own=(current, np.zeros_like(valid))), backend)
    for part, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(part[0], other[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
class TestSizesOf0:
    """Of rows and heads nothing comes; without a list, or current records, the others count alone."""

    @pytest.mark.parametrize("current", [0, 1])
    def test_an_empty_list(self, current, backend):
        case = CASES[2]._replace(count=0, current=current)
        problem = random_problem(case._replace(count=1), 4, ["none"])
        problem = problem._replace(slots=problem.slots[:, :0])
        found = attend(case, problem, backend)
        assert_close(case, problem, found)
        if not current:
            assert (found[0] == 0).all() and np.isneginf(found[1]).all()

    def test_no_current_records(self, backend):
        case = CASES[2]._replace(current=0)
        problem = random_problem(case, 4, ["all", "none"])
        none = np.zeros((case.rows, 0, case.record.width), BFLOAT16), np.ones((case.rows, 0), bool)
        assert_close(case, problem, attend(case, problem._replace(own=none), backend))

    @pytest.mark.parametrize(("rows", "heads"), [(0, 2), (2, 0)])
    def test_no_rows_and_no_heads(self, rows, heads, backend):
        case = CASES[2]._replace(rows=2)
        q, pool, plane, slots, (current, valid) = random_problem(case, 4, ["all"])
        problem = Problem(q[:rows, :heads], pool, plane, slots[:rows], (current[:rows], valid[:rows]))
        out, lse = attend(case, problem, backend)
        assert out.shape == (rows, heads, case.latent) and lse.shape == (rows, heads)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
def test_quantised_records_are_as_good_as_what_they_decode_to(backend: str) -> None:
    """The same values in a pool of plain bfloat16 give the same answer, to float32's rounding."""
    case = CASES[7]._replace(current=0)
    problem = random_problem(case, 5, ["all", "scattered"])
    plain = case._replace(name="bfloat16", outer_scale=None)
    pool = decoded(case, problem.pool).astype(BFLOAT16)
    found, expected = attend(case, problem, backend), attend(plain, problem._replace(pool=pool), backend)
    for part, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(part, other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("case", [case for case in CASES if case.record.quantised], ids=str)
def test_kernels_decode_every_code(case: Case) -> None:
    """Random bytes: all codes and scales, subnormal and NaN ones among them, to the same bits as the reference."""
    record, rows = case.record, 64
    raw = np.random.default_rng(0).integers(0, 256, (1, rows, record.width)).astype(np.uint8)
    slots = np.random.default_rng(1).permutation(rows).astype(np.int32)
    slots[5] = -1

    def kernel(stored, slots, latent, rope):
        rows = jnp.arange(64)
        slot = tiles.load(slots, rows)
        tile = record_tiles.RecordTile(stored, jnp.int32(0), slot, slot >= 0, record)
        for out, values in (
            (latent, record_tiles.load_latent(tile, np.float32, *case.scales)),
            (rope, record_tiles.load_rope(tile, np.float32)),
        ):
            tiles.store(out, rows[:, None], jnp.arange(values.shape[1])[None, :], value=values)

    widths = record_tiles.latent_columns(record), record_tiles.rope_columns(record)
    shapes = [jax.ShapeDtypeStruct((rows, width), np.float32) for width in widths]
    stored = record_tiles.as_stored(raw, record)
    latent, rope = pl.pallas_call(kernel, out_shape=shapes, interpret=True)(stored, slots)
    expected = np.array(record.decode(raw[0, slots], np.float32, *case.scales))
    expected[5] = 0
    # The kernel multiplies scale and outer scale first, which rounds differently.
    close = partial(np.testing.assert_allclose, rtol=0 if case.outer_scale is None else 3e-7)
    close(latent[:, : record.latent_width], expected[:, : record.latent_width])
    close(rope[:, : record.rope_width], expected[:, record.latent_width :])
    for padding in (latent[:, record.latent_width :], rope[:, record.rope_width :]):
        assert not np.any(np.nan_to_num(padding))  # zeros, times scales that may be NaN


class TestCombine:
    """Merging partial outputs, each with its LSE."""

    def test_it_weighs_parts_by_their_lse(self) -> None:
        rng = np.random.default_rng(0)
        out = rng.standard_normal((2, 5, 3, 20)).astype(np.float32)
        lse = (10 * rng.standard_normal((2, 5, 3))).astype(np.float32)
        lse[0, 1:, 0] = lse[1, :, 2] = -np.inf
        out[np.isneginf(lse)] = np.nan
        merged, merged_lse = combine(out, lse, interpret=True)
        weights = np.exp(lse.astype(np.float64))
        total = weights.sum(axis=1)
        expected = (np.where(weights > 0, weights, 0)[..., None] * np.nan_to_num(out)).sum(axis=1)
        expected /= np.where(total > 0, total, 1)[..., None]
        np.testing.assert_allclose(merged, expected, rtol=1e-5, atol=1e-6)
        with np.errstate(divide="ignore"):
            np.testing.assert_allclose(merged_lse, np.log(total), rtol=1e-5)
        assert not np.any(merged[1, 2])

    def test_one_part_is_the_result(self) -> None:
        out, lse = np.ones((2, 1, 3, 4), np.float32), np.zeros((2, 1, 3), np.float32)
        merged, merged_lse = combine(out, lse, interpret=True)
        assert merged.shape == (2, 3, 4) and merged_lse.shape == (2, 3)


class TestTiling:
    """How work is cut up at full size."""

    @pytest.mark.parametrize("heads", [8, 16, 64])
    @pytest.mark.parametrize("rows", [1, 4, 16, 32])
    @pytest.mark.parametrize("shared_memory", [SHARED_MEMORY, LARGE_SHARED_MEMORY])
    def test_a_gpu_is_filled_or_each_program_has_one_tile(self, rows, heads, shared_memory):
        cut = tiling(rows, heads, 2048, jnp.bfloat16, shared_memory)
        programs = rows * cut.head_blocks(heads) * cut.splits
        assert programs >= 128 or cut.splits * cut.records == 2048
        assert cut.splits == 1 or programs < 256

    def test_heads_share_a_program_where_there_is_room(self):
        assert tiling(16, 64, 2048, jnp.bfloat16).head_blocks(64) == 4
        assert tiling(16, 64, 2048, jnp.bfloat16, LARGE_SHARED_MEMORY).head_blocks(64) == 1
        assert tiling(1, 64, 2048, jnp.bfloat16, LARGE_SHARED_MEMORY).head_blocks(64) == 4
        assert not tiling(16, 16, 2048, jnp.bfloat16, LARGE_SHARED_MEMORY).wide

    def test_a_short_list_is_one_tile(self):
        assert tiling(1, 64, 7, jnp.bfloat16).splits == 1


@pytest.mark.parametrize("wide", [False, True])
def test_cost_is_what_the_kernel_does(moved: Callable[[], Cost], wide: bool) -> None:
    """Exactly where sizes fill their tiles, but that slots and masks are looked at twice."""
    heads, rows = (64, 16) if wide else (32, 2)
    memory = LARGE_SHARED_MEMORY if wide else SHARED_MEMORY
    case = Case("nvfp4_ds_mla", 64, 16, rows, heads, 64, 16, BFLOAT16, "bfloat16", 0.5, memory)
    problem = random_problem(case, 1, ["all"])
    own = (encoded(case, np.random.default_rng(2), rows, 16), np.ones((rows, 16), bool))
    jax.block_until_ready(attend(case, problem._replace(own=own), "interpret"))
    again = rows * tiling(rows, heads, 64, BFLOAT16, memory).head_blocks(heads) * (64 * 4 + 16)
    declared = cost(rows, heads, 64, case.record, BFLOAT16, 16, True, memory)
    assert moved() == declared._replace(bytes_read=declared.bytes_read + again)


def test_byte_pools_beyond_32_bit_offsets_are_refused_and_words_are_not() -> None:
    def shape(record: RecordFormat, slots: int) -> tuple:
        q = jax.ShapeDtypeStruct((1, 1, record.latent_width + record.rope_width), BFLOAT16)
        pool = jax.ShapeDtypeStruct((78, slots, record.width), np.uint8)
        run = partial(sparse_attention, record=record, scale=SCALE, backend="interpret")
        return jax.eval_shape(run, q, pool, 0, jax.ShapeDtypeStruct((1, 8), np.int32))[0].shape

    assert shape(RecordFormat.sized("nvfp4_ds_mla", 512, 64, 128), 2**20) == (1, 1, 512)
    with pytest.raises(ValueError, match="below 2 GiB"):
        shape(RecordFormat.sized("nvfp4_ds_mla", 24, 3, 8), 2**20)


def test_more_rows_than_a_grid_takes_are_refused() -> None:
    record = RecordFormat.sized("bfloat16", 16, 4, 8)
    shapes = [((65_536, 1, 20), BFLOAT16), ((1, 64, 20), BFLOAT16), ((65_536, 8), np.int32)]
    q, pool, slots = (jax.ShapeDtypeStruct(*shape) for shape in shapes)
    run = partial(sparse_attention, record=record, scale=SCALE, backend="triton")
    with pytest.raises(ValueError, match="65536 rows are more than a GPU's grid takes; .* at most 65535"):
        jax.eval_shape(run, q, pool, 0, slots)
