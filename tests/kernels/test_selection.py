"""Selections from paged keys against scores and a sort in numpy, exactly: whole numbers leave nothing to round."""

from collections.abc import Callable
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.selection import select_paged, select_scored
from glm_dcp_jax.kernels.topk import maxima_group, triton

HEADS, WIDTH, PAGES, PAGE_TOKENS, BLOCK_SIZE, K = 3, 8, 6, 8, 4, 10
CONTEXT = PAGES * PAGE_TOKENS
INDEX = IndexKeyFormat("float32", WIDTH)
ROW = 4 * CONTEXT
"""Bytes of a row's scores."""

# Requests, rows, workspace: all rows at once; requests in blocks; one request's rows in blocks; and each request's.
CASES = [(3, 2, 2**20), (4, 2, 4 * ROW), (1, 6, 2 * ROW), (2, 6, 3 * ROW), (1, 3, 1)]


def problem(requests: int, rows: int, seed: int) -> tuple[np.ndarray, ...]:
    """(q, head_weights, pool, layer, page_table, visible): of whole numbers, small enough that many scores tie."""
    rng = np.random.default_rng(seed)
    whole = lambda *shape: rng.integers(-1, 2, shape).astype(np.float32)  # noqa: E731
    table = np.array([rng.permutation(2 * PAGES)[:PAGES] for _ in range(requests)], np.int32)
    table[:, -1] = np.where(rng.random(requests) < 0.5, -1, table[:, -1])
    return (
        whole(requests, rows, HEADS, WIDTH),
        whole(requests, rows, HEADS),
        whole(2, 2 * CONTEXT, WIDTH),
        np.int32(rng.integers(2)),
        table,
        rng.choice([0, 1, K - 1, K, 30, CONTEXT], (requests, rows)).astype(np.int32),
    )


def scored(q, head_weights, pool, layer, page_table) -> np.ndarray:
    """[N, S, CONTEXT]: the definition."""
    slots = np.maximum(page_table, 0)[:, :, None] * PAGE_TOKENS + np.arange(PAGE_TOKENS)
    keys = pool[layer][slots.reshape(len(q), CONTEXT)]
    dots = np.maximum(np.einsum("nshd,ntd->nsht", q, keys), 0)
    return np.einsum("nsht,nsh->nst", dots, head_weights)


def chosen(q, head_weights, pool, layer, page_table, visible) -> np.ndarray:
    """[N, S, K]: the definition."""
    scores = scored(q, head_weights, pool, layer, page_table)
    found = np.full((*visible.shape, K), -1)
    for at in np.ndindex(visible.shape):
        best = sorted(range(visible[at]), key=lambda position: (-scores[at][position], position))[:K]
        found[at][: len(best)] = best
    return found


@cache
def select(as_mask: bool, workspace: int, backend: str, searched: bool = False) -> Callable[..., jax.Array]:
    """The jitted op. searched: rows are not sorted, however short they are, but in groups of two, whose maxima come
    with the scores."""
    names = {"k": K, "index": INDEX, "page_tokens": PAGE_TOKENS, "block_size": BLOCK_SIZE}

    def run(*arrays: jax.Array) -> jax.Array:
        with pytest.MonkeyPatch.context() as patch:
            if searched:
                patch.setattr(triton, "SORTED_COLUMNS", 0)
                patch.setattr(triton, "ITEMS", 32)
                assert maxima_group(CONTEXT, K) == 2
            return select_paged(*arrays, **names, as_mask=as_mask, workspace=workspace, backend=backend)

    return jax.jit(run)


def check_mask(mask: jax.Array, expected: np.ndarray) -> None:
    assert mask.shape == (*expected.shape[:2], CONTEXT) and mask.dtype == bool
    for at in np.ndindex(expected.shape[:2]):
        np.testing.assert_array_equal(np.flatnonzero(mask[at]), np.sort(expected[at][expected[at] >= 0]))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(CASES), st.sampled_from(["reference", "interpret"]), st.integers(0, 2**32 - 1))
def test_positions_are_the_best_of_each_row(case: tuple[int, int, int], backend: str, seed: int) -> None:
    """Whatever blocks the workspace makes."""
    requests, rows, workspace = case
    arrays = problem(requests, rows, seed)
    np.testing.assert_array_equal(select(False, workspace, backend)(*arrays), chosen(*arrays))


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(CASES[1::2]), st.sampled_from(["reference", "interpret"]), st.integers(0, 2**32 - 1))
def test_the_mask_is_the_same_set(case: tuple[int, int, int], backend: str, seed: int) -> None:
    requests, rows, workspace = case
    arrays = problem(requests, rows, seed)
    check_mask(select(True, workspace, backend)(*arrays), chosen(*arrays))


@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_rows_too_long_to_sort_are_searched_in_the_same_blocks(case: tuple[int, int, int]) -> None:
    requests, rows, workspace = case
    for seed in range(5):
        arrays = problem(requests, rows, seed)
        found = select(False, workspace, "interpret", searched=True)(*arrays)
        np.testing.assert_array_equal(found, chosen(*arrays))


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("case", [CASES[0], CASES[3]], ids=str)
def test_positions_can_come_with_their_scores(case: tuple[int, int, int], backend: str) -> None:
    requests, rows, workspace = case
    op = partial(select_scored, k=K, index=INDEX, page_tokens=PAGE_TOKENS, block_size=BLOCK_SIZE)
    run = jax.jit(partial(op, workspace=workspace, backend=backend))
    for seed in range(5):
        arrays = problem(requests, rows, seed)
        scores, positions = run(*arrays)
        np.testing.assert_array_equal(positions, chosen(*arrays))
        expected = np.take_along_axis(scored(*arrays[:5]), np.maximum(positions, 0), axis=2)
        np.testing.assert_array_equal(
            np.where(positions < 0, 0, scores), np.where(positions < 0, 0, expected)
        )


def full_size(requests: int, rows: int, context: int, page_tokens: int, index: IndexKeyFormat) -> tuple:
    """Abstract arrays with GLM-5.2's index heads."""
    shaped = jax.ShapeDtypeStruct
    return (
        shaped((requests, rows, 32, 128), jnp.bfloat16),
        shaped((requests, rows, 32), jnp.float32),
        shaped(index.pool_shape(21, requests * context, 64), index.dtype),
        shaped((), jnp.int32),
        shaped((requests, context // page_tokens), jnp.int32),
        shaped((requests, rows), jnp.int32),
    )


@pytest.mark.parametrize(
    ("requests", "rows", "context", "blocks_of"),
    [(8, 4, 131_072, 32), (1, 2048, 131_072, 512), (1, 2048, 2**20, 64), (32, 4, 2**20, 64)],
)
def test_on_gpus_scores_exist_for_no_more_rows_than_the_workspace_holds(
    requests: int, rows: int, context: int, blocks_of: int
) -> None:
    """256 MiB of float32: 512 rows with 131,072 positions, 64 with a million. No row is sorted whole."""
    index = IndexKeyFormat("e4m3", 128)
    op = partial(select_paged, k=2048, index=index, page_tokens=512, block_size=64, as_mask=False)
    arrays = full_size(requests, rows, context, 512, index)
    text = jax.jit(op).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    assert f"tensor<{blocks_of}x{context}xf32>" in text
    assert f"tensor<{blocks_of * 2}x{context}xf32>" not in text
    assert f"tensor<{blocks_of}x2048xui32>" in text
    assert "top_k" not in text


@pytest.mark.parametrize("as_mask", [False, True])
def test_the_references_memory_is_what_its_workspace_allows(as_mask: bool) -> None:
    """A megabyte, and the result, where all scores at once are 8 megabytes."""
    rows, context, shaped = 512, 4096, jax.ShapeDtypeStruct
    arrays = (
        shaped((1, rows, 2, 8), jnp.float32),
        shaped((1, rows, 2), jnp.float32),
        shaped((1, context, 8), jnp.float32),
        shaped((), jnp.int32),
        shaped((1, context // 64), jnp.int32),
        shaped((1, rows), jnp.int32),
    )

    def temporaries(workspace: int) -> int:
        op = partial(select_paged, k=256, index=INDEX, page_tokens=64, block_size=64, as_mask=as_mask)
        compiled = jax.jit(partial(op, workspace=workspace, backend="reference")).lower(*arrays).compile()
        memory = compiled.memory_analysis()
        return memory.temp_size_in_bytes + memory.output_size_in_bytes

    assert temporaries(2**20) < 2**20 + 2 * rows * (context if as_mask else 4 * 256)
    assert temporaries(2**28) > 4 * rows * context
