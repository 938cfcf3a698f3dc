"""Records between pools and steps: the right slots, nothing else, and no wrap-around at either end."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.kernels.records import commit_records, gather_pages, gather_records, write_records

LAYERS, SLOTS, WIDTH = 3, 12, 4

gather = jax.jit(gather_records)
write = jax.jit(write_records)
commit = jax.jit(commit_records)


def pool_of(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((LAYERS, SLOTS, WIDTH)).astype(np.float32)


def records_of(seed: int, *sizes: int) -> np.ndarray:
    return np.random.default_rng([seed, 1]).standard_normal((*sizes, WIDTH)).astype(np.float32)


# One length, so that jax compiles once; distinct slots, as a step's rows have, among skipped ones.
step_slots = st.permutations([*range(SLOTS), *[-1] * 6, -7]).map(lambda slots: np.array(slots[:8], np.int32))
seeds = st.integers(0, 2**32 - 1)
layers = st.integers(0, LAYERS - 1)


@settings(max_examples=50, deadline=None)
@given(seeds, layers, st.lists(st.integers(0, SLOTS - 1), min_size=6, max_size=6))
def test_gathered_records_are_the_layers_own(seed: int, layer: int, slots: list[int]) -> None:
    """In the order asked for, repeated where a slot is; the layer may be traced, as under a scan."""
    pool, wanted = pool_of(seed), np.array(slots, np.int32).reshape(2, 3)
    np.testing.assert_array_equal(gather(pool, layer, wanted), pool[layer][wanted])


def test_a_negative_slot_reads_the_null_page() -> None:
    pool = pool_of(1)
    slots = np.array([-1, 5, -3], np.int32)
    np.testing.assert_array_equal(gather(pool, 2, slots), pool[2][[0, 5, 0]])


@settings(max_examples=30, deadline=None)
@given(seeds, layers, st.lists(st.integers(-1, 3), min_size=6, max_size=6))
def test_gathered_pages_come_in_page_table_order(seed: int, layer: int, pages: list[int]) -> None:
    pool, table = pool_of(seed), np.array(pages, np.int32).reshape(2, 3)
    found = jax.jit(gather_pages, static_argnums=3)(pool, layer, table, 3)
    for request, row in enumerate(table):
        rows = np.concatenate([pool[layer, 3 * max(page, 0) : 3 * max(page, 0) + 3] for page in row])
        np.testing.assert_array_equal(found[request], rows)


@settings(max_examples=50, deadline=None)
@given(seeds, layers, step_slots)
def test_a_write_changes_its_slots_and_no_other(seed: int, layer: int, slots: np.ndarray) -> None:
    pool, records = pool_of(seed), records_of(seed, len(slots))
    expected = pool.copy()
    for slot, record in zip(slots, records, strict=True):
        if slot >= 0:
            expected[layer, slot] = record
    np.testing.assert_array_equal(write(pool, layer, slots, records), expected)


@settings(max_examples=50, deadline=None)
@given(seeds, step_slots)
def test_a_commit_changes_the_same_slots_of_every_layer(seed: int, slots: np.ndarray) -> None:
    pool, records = pool_of(seed), records_of(seed, LAYERS, len(slots))
    expected = pool.copy()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[:, slot] = records[:, row]
    np.testing.assert_array_equal(commit(pool, slots, records), expected)


@pytest.mark.parametrize("nothing", [-1, -SLOTS, -SLOTS - 1, np.iinfo(np.int32).min])
def test_a_skipped_slot_does_not_wrap_around(nothing: int) -> None:
    """An index of -1 is the last slot to everyone but us; a padded row must not overwrite it."""
    pool, slots = pool_of(2), np.full(8, nothing, np.int32)
    np.testing.assert_array_equal(write(pool, 1, slots, records_of(2, 8)), pool)
    np.testing.assert_array_equal(commit(pool, slots, records_of(2, LAYERS, 8)), pool)


def test_what_is_written_is_read_back_bit_for_bit() -> None:
    """NaN payloads, infinities and negative zeros included: a pool stores bytes."""
    odd = np.array([[np.nan, np.inf, -np.inf, -0.0]], np.float32)
    pool = write(pool_of(3), 1, np.array([7], np.int32), odd)
    found = np.asarray(gather(pool, 1, np.array([7], np.int32)))
    np.testing.assert_array_equal(found.view(np.uint32), odd.view(np.uint32))


def test_a_donated_pool_is_written_in_place() -> None:
    pool = jax.ShapeDtypeStruct((LAYERS, 10_000, WIDTH), np.float32)
    slots, records = (
        jax.ShapeDtypeStruct((8,), np.int32),
        jax.ShapeDtypeStruct((LAYERS, 8, WIDTH), np.float32),
    )
    compiled = jax.jit(commit_records, donate_argnums=0).lower(pool, slots, records).compile()
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == LAYERS * 10_000 * WIDTH * 4
    assert memory.temp_size_in_bytes < 10_000
