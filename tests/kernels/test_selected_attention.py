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
    sharers: int = 1

    def __str__(self) -> str:
        shared = f"-{self.sharers} sharers" if self.sharers > 1 else ""
        return f"{self.name}-{self.latent}-{self.heads}x{self.count}{shared}"

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
    Case("float32", 24, 6, rows=3, heads=12, count=64, current=4, sharers=4),
    Case("bfloat16", 16, 4, rows=2, heads=21, count=50, current=3, dtype=BFLOAT16, sharers=3),
    Case("nvfp4_ds_mla", 64, 8, 2, 32, 70, 8, BFLOAT16, outer_scale=1.7, sharers=8),
    Case("fp8_ds_mla", 20, 3, rows=2, heads=31, count=7, sharers=31),
    Case("bfloat16", 16, 4, 16, 64, 100, 2, BFLOAT16, shared_memory=LARGE_SHARED_MEMORY, sharers=4),  # wide
]


class Problem(NamedTuple):
    """Arguments of the op: current and its mask, if the case has current records, then who sees what is listed."""

    q: np.ndarray
    pool: np.ndarray
    plane: int
    slots: np.ndarray
    own: tuple = ()
    seen_by: tuple = ()


@cache
def compiled(case: Case, backend: str) -> Callable[..., tuple[jax.Array, jax.Array]]:
    def run(q, pool, plane, slots, *more):
        scale, more = (more[0], more[1:]) if case.scales else (None, more)
        seen_by, own = (more[-1], more[:-1]) if case.sharers > 1 else (None, more)
        current, valid = own or (None, None)
        options = {"backend": backend, "shared_memory": case.shared_memory}
        options |= {"seen_by": seen_by, "sharers": case.sharers}
        return sparse_attention(q, pool, plane, slots, case.record, SCALE, scale, current, valid, **options)

    return jax.jit(run)


def attend(case: Case, problem: Problem, backend: str) -> tuple[np.ndarray, np.ndarray]:
    found = compiled(case, backend)(*problem[:4], *case.scales, *problem.own, *problem.seen_by)
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
        valid = who_sees(case, rng, case.rows, case.current)
        own = (unreadable(encoded(case, rng, case.rows, case.current), valid == 0), valid)
    seen_by = (who_sees(case, rng, *slots.shape),) if case.sharers > 1 else ()
    return Problem(q, pool, plane, slots.astype(np.int32), own, seen_by)


def who_sees(case: Case, rng: np.random.Generator, *shape: int) -> np.ndarray:
    """A mask, or of several sharers one in each bit. The second sharer sees nothing."""
    masks = rng.random((case.sharers, *shape)) < rng.random()
    if case.sharers == 1:
        return masks[0]
    masks[1] = False
    return sum(mask.astype(np.int32) << bit for bit, mask in enumerate(masks))


def decoded(case: Case, records: np.ndarray) -> np.ndarray:
    return np.asarray(decode(case.record, case.dtype)(records, *case.scales), np.float64)


def oracle(case: Case, problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """Output and LSE in float64, query by query over the records it selects, each as often as it is listed."""
    if case.sharers > 1:
        parts = [oracle_of(case, problem, sharer) for sharer in range(case.sharers)]
        out, lse = (np.concatenate(part, axis=1) for part in zip(*parts, strict=True))
        return out, lse
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


def oracle_of(case: Case, problem: Problem, sharer: int) -> tuple[np.ndarray, np.ndarray]:
    """One sharer's heads, by themselves."""

    def seen(bits: np.ndarray) -> np.ndarray:
        return bits >> sharer & 1 != 0

    each = case.heads // case.sharers
    own = (problem.own[0], seen(problem.own[1])) if problem.own else ()
    alone = problem._replace(
        q=problem.q[:, sharer * each :][:, :each],
        slots=np.where(seen(problem.seen_by[0]), problem.slots, -1),
        own=own,
        seen_by=(),
    )
    return oracle(case._replace(heads=each, sharers=1), alone)


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
        q, pool, plane, slots, (current, valid), _ = random_problem(case, 4, ["all"])
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


@pytest.mark.parametrize("sharers", [1, 4])
@pytest.mark.parametrize("wide", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_cost_is_what_the_kernel_does(moved: Callable[[], Cost], wide: bool, sharers: int) -> None:
    """Exactly where sizes fill their tiles, but that slots and masks are looked at twice, bits of masks once more."""
    heads, rows = (64, 16) if wide else (32, 2)
    memory = LARGE_SHARED_MEMORY if wide else SHARED_MEMORY
    case = Case("nvfp4_ds_mla", 64, 16, rows, heads, 64, 16, BFLOAT16, "bfloat16", 0.5, memory, sharers)
    problem = random_problem(case, 1, ["all"])
    everyone = np.ones((rows, 16), bool) if sharers == 1 else np.full((rows, 16), 15, np.int32)
    own = (encoded(case, np.random.default_rng(2), rows, 16), everyone)
    seen_by = (np.full_like(problem.slots, 15),) if sharers > 1 else ()
    jax.block_until_ready(attend(case, problem._replace(own=own, seen_by=seen_by), "interpret"))
    masks = 16 if sharers == 1 else 2 * 16 * 4
    again = rows * tiling(rows, heads, 64, BFLOAT16, memory).head_blocks(heads) * (64 * 4 + masks)
    declared = cost(rows, heads, 64, case.record, BFLOAT16, 16, True, memory, sharers > 1)
    assert moved() == declared._replace(bytes_read=declared.bytes_read + again)


class TestSharers:
    """Several queries over one list."""

    def run(self, sharers: int, seen_by: bool = True, heads: int = 4, valid: type = np.int32) -> None:
        record = RecordFormat.sized("bfloat16", 16, 4, 8)
        q, pool = np.zeros((2, heads, 20), BFLOAT16), np.zeros((1, 64, 20), BFLOAT16)
        slots, current = np.zeros((2, 8), np.int32), np.zeros((2, 3, 20), BFLOAT16)
        bits = slots if seen_by else None
        own = (None, current, np.zeros((2, 3), valid))
        sparse_attention(q, pool, 0, slots, record, SCALE, *own, seen_by=bits, sharers=sharers)

    def test_they_divide_the_heads_and_fit_the_bits(self):
        with pytest.raises(ValueError, match="sharers is 3, but must be 1 to 31 and divide the 4 heads of q"):
            self.run(3)
        with pytest.raises(ValueError, match="sharers is 32, but must be 1 to 31"):
            self.run(32, heads=64)

    def test_there_are_bits_if_and_only_if_there_are_several(self):
        for sharers, seen_by in ((2, False), (1, True)):
            with pytest.raises(ValueError, match="pass it if, and only if, sharers > 1"):
                self.run(sharers, seen_by)

    def test_a_mask_is_for_one(self):
        with pytest.raises(ValueError, match="current_valid is bool, but must be int32"):
            self.run(2, valid=bool)

    def test_a_union_is_read_once(self):
        """4 rows of 8 heads: one program's heads, for which a record is read and decoded once."""
        record = RecordFormat.sized("nvfp4_ds_mla", 512, 64, 128)
        union = cost(32, 32, 8192, record, BFLOAT16, 4, shared_lists=True, listed=1.75 / 4)
        alone = cost(128, 8, 2048, record, BFLOAT16, 4)
        records = 32 * 3584 * record.record_bytes
        assert union.bytes_read < 1.5 * records and alone.bytes_read > 2.3 * records
