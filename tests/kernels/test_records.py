"""Records between pools and steps: the right slots, nothing else, no wrap-around at either end, and the right bytes.

Every op is held against numpy, in each of its forms: plain JAX, and the Triton kernels as the interpreter runs them.
"""

import sys
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.records import gather_pages, pack_records, unpack_records, write_records
from glm_dcp_jax.kernels.records.cost import pack_cost, write_cost

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

import record_oracle

LAYERS, SLOTS, WIDTH = 3, 12, 4


def pool_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((LAYERS, SLOTS, WIDTH)).astype(np.float32)


seeds = st.integers(0, 2**32 - 1)
layers = st.integers(0, LAYERS - 1)


@settings(max_examples=30, deadline=None)
@given(seeds, layers, st.lists(st.integers(-1, 3), min_size=6, max_size=6))
def test_gathered_pages_come_in_page_table_order(seed: int, layer: int, pages: list[int]) -> None:
    pool, table = pool_of(seed), np.array(pages, np.int32).reshape(2, 3)
    found = jax.jit(gather_pages, static_argnums=3)(pool, layer, table, 3)
    for request, row in enumerate(table):
        rows = np.concatenate([pool[layer, 3 * max(page, 0) : 3 * max(page, 0) + 3] for page in row])
        np.testing.assert_array_equal(found[request], rows)


def test_a_donated_pool_is_written_in_place() -> None:
    pool = jax.ShapeDtypeStruct((LAYERS, 10_000, WIDTH), np.float32)
    planes, slots, records = (
        jax.ShapeDtypeStruct((LAYERS,), np.int32),
        jax.ShapeDtypeStruct((8,), np.int32),
        jax.ShapeDtypeStruct((LAYERS, 8, WIDTH), np.float32),
    )
    compiled = jax.jit(unpack_records, donate_argnums=0).lower(pool, planes, slots, records).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == LAYERS * 10_000 * WIDTH * 4
    assert memory.temp_size_in_bytes < 10_000


# Widths of pools: whole words, bytes alone, and elements of both float types.
POOLS = {
    "words": (np.uint8, 56),
    "bytes": (np.uint8, 53),
    "bfloat16": (jnp.bfloat16, 12),
    "float32": (np.float32, 5),
}
BACKENDS = ("reference", "interpret")
# Distinct slots of a pool among ones that are nothing: before its start and past its end.
moved_slots = st.permutations([*range(SLOTS), -1, -1, -7, -(2**31), SLOTS, SLOTS + 3, 2**31 - 1]).map(
    lambda slots: np.array(slots[:11], np.int32)
)
two_planes = st.permutations(range(LAYERS)).map(lambda planes: np.array(planes[:2], np.int32))


def raw_pool(kind: str, seed: int) -> np.ndarray:
    """A pool of random bytes or numbers."""
    dtype, width = POOLS[kind]
    return random_elements(np.random.default_rng(seed), (LAYERS, SLOTS, width), dtype)


def random_elements(rng: np.random.Generator, shape: tuple[int, ...], dtype: type) -> np.ndarray:
    """Random bytes, or random numbers: CPUs do not keep the bits of a bfloat16 NaN."""
    if dtype == np.uint8:
        return rng.integers(0, 256, shape, np.uint8)
    return rng.standard_normal(shape).astype(dtype)


def raw(array: jax.Array | np.ndarray) -> np.ndarray:
    """Bytes, so that NaNs compare."""
    return np.ascontiguousarray(array).view(np.uint8)


def real(slots: np.ndarray) -> list[tuple[int, int]]:
    """(row, slot) of the slots that are in the pool."""
    return [(row, slot) for row, slot in enumerate(slots.tolist()) if 0 <= slot < SLOTS]


pack = {backend: jax.jit(partial(pack_records, backend=backend)) for backend in BACKENDS}
unpack = {backend: jax.jit(partial(unpack_records, backend=backend)) for backend in BACKENDS}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", POOLS)
class TestPackAndUnpack:
    @settings(max_examples=20, deadline=None)
    @given(seeds, two_planes, moved_slots)
    def test_a_packed_buffer_holds_each_planes_records_and_zeros_for_nothing(
        self, kind, backend, seed, planes, slots
    ):
        pool = raw_pool(kind, seed)
        expected = np.zeros((2, len(slots), pool.shape[2]), pool.dtype)
        for row, slot in real(slots):
            expected[:, row] = pool[planes, slot]
        np.testing.assert_array_equal(raw(pack[backend](pool, planes, slots)), raw(expected))

    @settings(max_examples=20, deadline=None)
    @given(seeds, two_planes, moved_slots)
    def test_unpacking_changes_its_planes_slots_and_no_other(self, kind, backend, seed, planes, slots):
        pool = raw_pool(kind, seed)
        packed = raw_pool(kind, seed ^ 1)[:2, : len(slots)]
        expected = pool.copy()
        for row, slot in real(slots):
            expected[planes, slot] = packed[:, row]
        np.testing.assert_array_equal(raw(unpack[backend](pool, planes, slots, packed)), raw(expected))

    def test_no_slots_and_no_planes_move_nothing(self, kind, backend):
        pool = jnp.asarray(raw_pool(kind, 4))
        for planes, slots in ((2, 0), (0, 3)):
            chosen = jnp.arange(planes), jnp.arange(slots)
            packed = pack_records(pool, *chosen, backend=backend)
            assert packed.shape == (planes, slots, pool.shape[2]) and packed.dtype == pool.dtype
            found = unpack_records(pool, *chosen, packed, backend=backend)
            np.testing.assert_array_equal(raw(found), raw(pool))

    def test_a_pool_without_slots_packs_as_zeros_and_takes_nothing(self, kind, backend):
        pool, planes, slots = jnp.asarray(raw_pool(kind, 4)[:, :0]), jnp.arange(2), jnp.arange(3)
        packed = pack_records(pool, planes, slots, backend=backend)
        assert packed.shape == (2, 3, pool.shape[2]) and not np.any(packed)
        assert unpack_records(pool, planes, slots, packed, backend=backend).shape == pool.shape


class Case(tuple):
    """(name, rope_kind, latent width, rope width, input dtype) of a record format; str() names the test."""

    def __str__(self) -> str:
        return " ".join(map(str, (*self[:4], np.dtype(self[4]).name)))

    @property
    def record(self) -> RecordFormat:
        name, rope_kind, latent, rope, _ = self
        return RecordFormat.sized(name, latent, rope, 16, rope_kind)


PLAIN = [("float32", "bfloat16"), ("bfloat16", "bfloat16")]
QUANTISED = [("fp8_ds_mla", "bfloat16"), ("nvfp4_ds_mla", "bfloat16"), ("nvfp4_ds_mla", "fp8")]
CASES = [
    *(Case((*kind, 130, 3, np.float32)) for kind in PLAIN),
    *(Case((*kind, 512, 64, jnp.bfloat16)) for kind in QUANTISED),
    *(Case((*kind, 64, 8, np.float32)) for kind in QUANTISED),  # words in small
    *(Case((*kind, 130, 3, np.float32)) for kind in QUANTISED),  # bytes, and groups that are not full
]
ROWS = 5


def values_of(rng: np.random.Generator, width: int) -> np.ndarray:
    """[2, ROWS, width] float32 of all magnitudes: rows of noise, of ties between codes, of zeros, with an outlier."""
    noise = rng.standard_normal((2, ROWS, width))
    ties = rng.integers(-48, 49, noise.shape) / 4 * np.where(rng.random(noise.shape) < 0.5, 1, -1)
    outlier = noise * 2.0**-9
    outlier[..., rng.integers(width)] = 3.0
    rows = np.stack([noise, ties, np.zeros_like(noise), outlier])
    chosen = rng.choice(4, (2, ROWS), p=[0.4, 0.3, 0.1, 0.2])
    size = 2.0 ** rng.integers(-12, 6, (2, ROWS, 1))
    return (np.take_along_axis(rows, chosen[None, ..., None], axis=0)[0] * size).astype(np.float32)


@cache
def writer(case: Case, backend: str) -> Callable[..., jax.Array]:
    """The jitted op. Outer scales come as the last argument, or not at all."""

    def write(pool, planes, slots, latent, rope_key, *outer_scales):
        scales = outer_scales[0] if outer_scales else None
        return write_records(pool, planes, slots, latent, rope_key, case.record, scales, backend)

    return jax.jit(write)


def problem(case: Case, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(pool, latent, rope_key) of a case."""
    rng = np.random.default_rng(seed)
    record, dtype = case.record, case[4]
    pool = random_elements(rng, (LAYERS, SLOTS, record.width), record.dtype)
    return pool, values_of(rng, case[2]).astype(dtype), values_of(rng, case[3]).astype(dtype)


def check_written(
    case: Case, backend: str, seed: int, planes: np.ndarray, slots: np.ndarray, *outer: np.ndarray
) -> None:
    """The op's pool is the oracle's, byte for byte."""
    pool, latent, rope_key = problem(case, seed)
    expected = raw(pool).copy()
    for order, plane in enumerate(planes):
        scale = outer[0][order] if outer else None
        records = record_oracle.encode(case[0], latent[order], rope_key[order], case[1], scale)
        for row, slot in real(slots):
            expected[plane, slot] = records[row]
    written = writer(case, backend)(pool, planes, slots, latent, rope_key, *outer)
    np.testing.assert_array_equal(raw(written), expected)


@pytest.mark.parametrize("backend", BACKENDS)
class TestQuantiseAndWrite:
    @pytest.mark.parametrize("case", CASES, ids=str)
    @settings(max_examples=15, deadline=None)
    @given(seeds, two_planes, moved_slots)
    def test_writes_the_oracles_records_at_its_slots_and_nothing_else(
        self, backend, case, seed, planes, slots
    ):
        check_written(case, backend, seed, planes, slots[:ROWS])

    @pytest.mark.parametrize("case", CASES[3:5], ids=str)
    @settings(max_examples=15, deadline=None)
    @given(seeds, two_planes)
    def test_outer_scales_divide_their_planes_latents(self, backend, case, seed, planes):
        outer_scales = np.random.default_rng([seed, 2]).uniform(0.01, 2, 2).astype(np.float32)
        slots = np.array([3, -1, SLOTS - 1, 0, 7], np.int32)
        check_written(case, backend, seed, planes, slots, outer_scales)

    def test_nothing_new_changes_nothing(self, backend):
        case = CASES[3]
        pool, latent, rope_key = problem(case, 6)
        planes, nowhere = np.array([0, 2], np.int32), np.full(ROWS, -1, np.int32)
        written = writer(case, backend)(pool, planes, nowhere, latent, rope_key)
        np.testing.assert_array_equal(written, pool)

    @pytest.mark.parametrize("case", [CASES[0], *CASES[2:5]], ids=str)
    @pytest.mark.parametrize(("planes", "rows"), [(2, 0), (0, ROWS)])
    def test_no_records_and_no_planes_change_nothing(self, backend, case, planes, rows):
        pool, latent, rope_key = problem(case, 7)
        new = latent[:planes, :rows], rope_key[:planes, :rows], case.record
        where = np.arange(planes, dtype=np.int32), np.arange(rows, dtype=np.int32)
        for scales in (None, np.ones(planes, np.float32)):
            written = write_records(pool, *where, *new, scales, backend)
            np.testing.assert_array_equal(raw(written), raw(pool))


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("name", ["float32", "fp8_ds_mla", "nvfp4_ds_mla"])
def test_a_donated_pool_is_written_without_a_copy(name: str, backend: str) -> None:
    record, shaped = RecordFormat.sized(name, 64, 8, 16), jax.ShapeDtypeStruct
    pool = shaped((LAYERS, 20_000, record.width), record.dtype)
    planes, slots = shaped((2,), np.int32), shaped((8,), np.int32)
    packed = shaped((2, 8, record.width), record.dtype)
    latent, rope_key = shaped((2, 8, 64), np.float32), shaped((2, 8, 8), np.float32)
    for op, *inputs in (
        (partial(unpack_records, backend=backend), packed),
        (partial(write_records, record=record, backend=backend), latent, rope_key),
    ):
        compiled = jax.jit(op, donate_argnums=0).lower(pool, planes, slots, *inputs).compile()
        memory = compiled.memory_analysis()
        assert memory.alias_size_in_bytes == LAYERS * 20_000 * record.record_bytes
        assert memory.temp_size_in_bytes < 50_000


def test_byte_pools_beyond_32_bit_offsets_are_refused() -> None:
    """53 bytes are no words; 56 are, and their offsets fit until Pallas turns to 64 bits."""
    some = jax.ShapeDtypeStruct((2,), np.int32)
    op = partial(pack_records, backend="interpret")
    with pytest.raises(ValueError, match="2222981120 bytes.*below 2 GiB"):
        jax.eval_shape(op, jax.ShapeDtypeStruct((40, 2**20, 53), np.uint8), some, some)
    assert jax.eval_shape(op, jax.ShapeDtypeStruct((70, 2**20, 56), np.uint8), some, some).shape == (2, 2, 56)


class TestCost:
    """Declared bytes are what the kernels move when every slot is real."""

    slots = np.array([3, 0, 11, 7, 5, 1, 2], np.int32)
    planes = np.array([2, 0], np.int32)

    @pytest.mark.parametrize("kind", POOLS)
    def test_pack_and_unpack(self, moved, kind):
        pool = raw_pool(kind, 8)
        declared = pack_cost(len(self.planes), len(self.slots), pool[0, 0].nbytes)
        packed = pool[: len(self.planes), : len(self.slots)]
        jax.block_until_ready(pack_records(pool, self.planes, self.slots, "interpret"))
        assert moved() == declared
        jax.block_until_ready(unpack_records(pool, self.planes, self.slots, packed, "interpret"))
        assert moved() == declared

    @pytest.mark.parametrize("case", [CASES[index] for index in (0, 2, 7, 10)], ids=str)
    def test_write_records(self, moved, case):
        pool, latent, rope_key = problem(case, 9)
        outer_scales = np.ones(2, np.float32) if case[0] == "nvfp4_ds_mla" else None
        given = (pool, self.planes, self.slots[:ROWS], latent, rope_key, case.record, outer_scales)
        itemsize = latent.dtype.itemsize
        declared = write_cost(2, ROWS, case.record, itemsize, outer_scales is not None)
        jax.block_until_ready(write_records(*given, "interpret"))
        assert moved() == declared
