"""Index keys in their pools, against numpy: planar and plain, written as plain JAX and as the Triton interpreter do."""

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

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.index_keys import (
    gather_index_keys,
    pack_index_keys,
    unpack_index_keys,
    write_index_keys,
)
from glm_dcp_jax.kernels.index_keys.cost import write_cost

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

import record_oracle

FULL, SLOTS, KEYS = 2, 24, 9
# Kind, width, block size: plain, words at full width, and bytes in blocks of an odd size.
FORMATS = [("float32", 6, 4), ("bfloat16", 8, 4), ("e4m3", 128, 4), ("e4m3", 6, 3)]
BACKENDS = ("reference", "interpret")

seeds = st.integers(0, 2**32 - 1)
layers = st.integers(0, FULL - 1)
# Distinct slots of a pool among ones that are nothing: before its start and past its end.
written_slots = st.permutations([*range(SLOTS), -1, -1, -7, -(2**31), SLOTS, SLOTS + 3, 2**31 - 1]).map(
    lambda slots: np.array(slots[:KEYS], np.int32)
)


def random_pool(index: IndexKeyFormat, block_size: int, seed: int) -> np.ndarray:
    """Random numbers, or random codes (none an E4M3 NaN) and scales."""
    rng, shape = np.random.default_rng(seed), index.pool_shape(FULL, SLOTS, block_size)
    if not index.quantised:
        return rng.standard_normal(shape).astype(index.dtype)
    pool = rng.integers(0, 127, shape, np.uint8)
    scales = 2.0 ** rng.integers(-22, 9, (*shape[:2], block_size))
    pool[..., block_size * index.width :] = scales.astype(np.float32).view(np.uint8)
    return pool


def random_keys(width: int, seed: int) -> np.ndarray:
    """bfloat16 [KEYS, width] of many magnitudes; a key of zeros, and one whose scale is a power of two already."""
    rng = np.random.default_rng([seed, 1])
    keys = rng.standard_normal((KEYS, width)) * 2.0 ** rng.integers(-20, 9, (KEYS, 1))
    keys[rng.integers(KEYS)] = 0
    keys[rng.integers(KEYS)] = 448 * 2.0 ** rng.integers(-8, 9) * rng.uniform(-1, 1, width).round()
    return keys.astype(jnp.bfloat16)


def in_numpy(
    pool: np.ndarray, layer: int, slots: np.ndarray, keys: np.ndarray, index: IndexKeyFormat, block_size: int
) -> np.ndarray:
    """The pool with keys at those slots that it has."""
    pool, width = pool.copy(), index.width
    codes, scales = record_oracle.encode_index_keys(keys)
    for row, slot in enumerate(slots.tolist()):
        if not 0 <= slot < SLOTS:
            continue
        if not index.quantised:
            pool[layer, slot] = keys[row].astype(index.dtype)
            continue
        block, offset = divmod(slot, block_size)
        first_scale = block_size * width
        pool[layer, block, width * offset : width * (offset + 1)] = codes[row]
        scale_bytes = scales[row : row + 1].view(np.uint8)
        pool[layer, block, first_scale + 4 * offset : first_scale + 4 * (offset + 1)] = scale_bytes
    return pool


@cache
def writer(index: IndexKeyFormat, block_size: int, backend: str) -> Callable[..., jax.Array]:
    return jax.jit(partial(write_index_keys, index=index, block_size=block_size, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("kind", "width", "block_size"), FORMATS)
class TestWrite:
    @settings(max_examples=25, deadline=None)
    @given(seeds, layers, written_slots)
    def test_writes_the_oracles_keys_at_its_slots_and_nothing_else(
        self, kind, width, block_size, backend, seed, layer, slots
    ):
        index, keys = IndexKeyFormat(kind, width), random_keys(width, seed)
        pool = random_pool(index, block_size, seed)
        written = writer(index, block_size, backend)(pool, layer, slots, keys)
        np.testing.assert_array_equal(written, in_numpy(pool, layer, slots, keys, index, block_size))

    @pytest.mark.parametrize("nothing", [-1, -SLOTS, -SLOTS - 1, SLOTS, np.iinfo(np.int32).min])
    def test_a_skipped_slot_does_not_wrap_around(self, kind, width, block_size, backend, nothing):
        index = IndexKeyFormat(kind, width)
        pool, slots = random_pool(index, block_size, 2), np.full(KEYS, nothing, np.int32)
        written = writer(index, block_size, backend)(pool, 1, slots, random_keys(width, 2))
        np.testing.assert_array_equal(written, pool)

    def test_no_keys_leave_the_pool_as_it_is(self, kind, width, block_size, backend):
        index = IndexKeyFormat(kind, width)
        pool, keys = random_pool(index, block_size, 2), random_keys(width, 2)[:0]
        written = write_index_keys(pool, 1, np.zeros(0, np.int32), keys, index, block_size, backend)
        np.testing.assert_array_equal(written, pool)


@pytest.mark.parametrize(("kind", "width", "block_size"), FORMATS)
class TestGather:
    @settings(max_examples=20, deadline=None)
    @given(seeds, layers, st.lists(st.integers(-1, SLOTS // 12 - 1), min_size=6, max_size=6))
    def test_pages_come_in_page_table_order_and_decoded(self, kind, width, block_size, seed, layer, pages):
        """A page of 12 tokens is 3 or 4 blocks; a negative page reads page 0."""
        index, page_tokens, table = IndexKeyFormat(kind, width), 12, np.array(pages, np.int32).reshape(2, 3)
        pool = random_pool(index, block_size, seed)
        found = jax.jit(gather_index_keys, static_argnums=(3, 4, 5, 6))(
            pool, layer, table, index, page_tokens, block_size, jnp.float32
        )
        assert found.shape == (2, 3 * page_tokens, width)
        for request, row in enumerate(table):
            for place, page in enumerate(row):
                for token in range(page_tokens):
                    slot = max(page, 0) * page_tokens + token
                    expected = self.stored(pool, layer, slot, index, block_size)
                    np.testing.assert_array_equal(found[request, place * page_tokens + token], expected)

    @staticmethod
    def stored(pool: np.ndarray, layer: int, slot: int, index: IndexKeyFormat, block_size: int) -> np.ndarray:
        if not index.quantised:
            return pool[layer, slot].astype(np.float32)
        (block, offset), width = divmod(slot, block_size), index.width
        codes, scales = np.split(pool[layer, block], [block_size * width])
        values = codes[width * offset : width * (offset + 1)].view(record_oracle.E4M3).astype(np.float32)
        return values * scales.view(np.float32)[offset]

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_what_is_written_is_read_back_within_a_code(self, kind, width, block_size, dtype):
        """Exactly by the floats; E4M3 is off by 2^-4 of a value, or half the smallest step of the key's scale."""
        index, keys = IndexKeyFormat(kind, width), random_keys(width, 5)
        slots = np.random.default_rng(5).permutation(SLOTS)[:KEYS].astype(np.int32)
        pool = writer(index, block_size, "reference")(random_pool(index, block_size, 5), 1, slots, keys)
        every_page = np.arange(SLOTS // 12, dtype=np.int32)[None]
        found = gather_index_keys(pool, 1, every_page, index, 12, block_size, dtype)
        assert found.dtype == dtype
        given = keys.astype(np.float32)
        _, scales = record_oracle.encode_index_keys(given)
        error = np.abs(np.asarray(found[0, slots], np.float32) - given)
        bound = np.maximum(2.0**-4 * np.abs(given), 2.0**-10 * scales[:, None]) if index.quantised else 0
        assert (error <= bound).all()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("kind", ["float32", "e4m3"])
def test_a_donated_pool_is_written_without_a_copy(kind: str, backend: str) -> None:
    index, shaped = IndexKeyFormat(kind, 32), jax.ShapeDtypeStruct
    pool = shaped(index.pool_shape(FULL, 64_000, 16), index.dtype)
    write = partial(write_index_keys, index=index, block_size=16, backend=backend)
    lowered = jax.jit(write, donate_argnums=0).lower(
        pool, shaped((), np.int32), shaped((8,), np.int32), shaped((8, 32), np.float32)
    )
    memory = lowered.compile().memory_analysis()
    assert memory.alias_size_in_bytes == FULL * 64_000 * index.key_bytes
    assert memory.temp_size_in_bytes < 50_000


@pytest.mark.parametrize(("kind", "width", "block_size"), FORMATS)
def test_declared_bytes_are_what_the_kernel_moves(
    moved: Callable[[], Cost], kind: str, width: int, block_size: int
) -> None:
    index, keys, slots = IndexKeyFormat(kind, width), random_keys(width, 3), np.arange(KEYS, dtype=np.int32)
    pool = random_pool(index, block_size, 3)
    jax.block_until_ready(write_index_keys(pool, 1, slots, keys, index, block_size, "interpret"))
    assert moved() == write_cost(KEYS, keys.dtype.itemsize, index)


def keys_of(pool: np.ndarray, slot: int, index: IndexKeyFormat, block_size: int) -> np.ndarray:
    """One slot's key in every layer as it is kept, [FULL, key]; zeros for a slot that there is not."""
    width = index.key_bytes if index.quantised else index.width
    if not 0 <= slot < SLOTS:
        return np.zeros((FULL, width), pool.dtype)
    if not index.quantised:
        return pool[:, slot]
    block, at = divmod(slot, block_size)
    scales = block_size * index.width + 4 * at
    codes = pool[:, block, at * index.width : (at + 1) * index.width]
    return np.concatenate([codes, pool[:, block, scales : scales + 4]], axis=1)


class TestPacking:
    @settings(max_examples=20, deadline=None)
    @given(seeds, written_slots, st.sampled_from(FORMATS))
    def test_every_layers_keys_at_the_same_slots_in_one_buffer(self, seed, slots, form):
        kind, width, block_size = form
        index = IndexKeyFormat(kind, width)
        pool = random_pool(index, block_size, seed)
        packed = np.asarray(pack_index_keys(pool, slots, index, block_size))
        wanted = np.stack([keys_of(pool, int(slot), index, block_size) for slot in slots], axis=1)
        assert packed.dtype == pool.dtype and packed.tobytes() == wanted.tobytes()

    @settings(max_examples=20, deadline=None)
    @given(seeds, written_slots, st.sampled_from(FORMATS))
    def test_unpacking_is_the_inverse_and_touches_nothing_else(self, seed, slots, form):
        kind, width, block_size = form
        index = IndexKeyFormat(kind, width)
        source, target = random_pool(index, block_size, seed), random_pool(index, block_size, seed + 1)
        packed = pack_index_keys(source, slots, index, block_size)
        found = np.asarray(unpack_index_keys(jnp.asarray(target), slots, packed, index, block_size))
        real = {int(slot) for slot in slots if 0 <= slot < SLOTS}
        for slot in range(SLOTS):
            wanted = source if slot in real else target
            assert (
                keys_of(found, slot, index, block_size).tobytes()
                == keys_of(wanted, slot, index, block_size).tobytes()
            )

    def test_what_does_not_fit_is_refused(self):
        index = IndexKeyFormat("e4m3", 6)
        pool = random_pool(index, 3, 0)
        with pytest.raises(ValueError, match="slots is float32"):
            pack_index_keys(pool, np.zeros(2, np.float32), index, 3)
        with pytest.raises(ValueError, match="pool is"):
            pack_index_keys(pool, np.zeros(2, np.int32), index, 4)
        with pytest.raises(ValueError, match="packed is"):
            unpack_index_keys(pool, np.zeros(2, np.int32), np.zeros((FULL, 2, 6), np.uint8), index, 3)
