"""Index scores against the formula in float64: of keys in a row, and of keys in their pages, by both backends."""

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

from glm_dcp_jax.cache.records import IndexKeyFormat
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.index_scores import index_scores, paged_index_scores, paged_scores_and_maxima, triton
from glm_dcp_jax.kernels.index_scores.cost import cost
from glm_dcp_jax.kernels.index_scores.reference import _ROWS_AT_ONCE
from glm_dcp_jax.kernels.topk.reference import sortable

# rows, heads, width, keys; few shapes, because jax compiles each.
SHAPES = [
    (1, 1, 1, 1),
    (3, 4, 8, 5),
    (_ROWS_AT_ONCE, 3, 16, 7),
    (_ROWS_AT_ONCE + 1, 3, 16, 7),
    (40, 5, 4, 33),
]

scores_of = jax.jit(index_scores)


def formula(q: np.ndarray, head_weights: np.ndarray, keys: np.ndarray) -> np.ndarray:
    """[S, L] float64: sum over heads of weight * relu(q . k)."""
    q, head_weights, keys = (np.asarray(part, np.float64) for part in (q, head_weights, keys))
    total = np.zeros((q.shape[0], keys.shape[0]))
    for head in range(q.shape[1]):
        total += head_weights[:, head, None] * np.maximum(q[:, head] @ keys.T, 0.0)
    return total


def random_problem(
    shape: tuple[int, int, int, int], seed: int, dtype: type = np.float32
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rows, heads, width, length = shape
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((rows, heads, width)).astype(dtype)
    keys = rng.standard_normal((length, width)).astype(dtype)
    return q, rng.standard_normal((rows, heads)).astype(np.float32), keys


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_scores_are_the_formula(shape: tuple[int, int, int, int], seed: int) -> None:
    q, head_weights, keys = random_problem(shape, seed)
    scores = scores_of(q, head_weights, keys)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, formula(q, head_weights, keys), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_bfloat16_queries_and_keys_are_summed_in_float32(shape: tuple[int, int, int, int]) -> None:
    q, head_weights, keys = random_problem(shape, 5, jnp.bfloat16)
    scores = scores_of(q, head_weights, keys)
    assert scores.dtype == jnp.float32
    np.testing.assert_allclose(scores, formula(q, head_weights, keys), rtol=1e-5, atol=1e-4)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(SHAPES), st.integers(0, 2**32 - 1))
def test_no_score_is_a_negative_zero(shape: tuple[int, int, int, int], seed: int) -> None:
    """Keys that no query points at score 0; a negative head weight would make it -0.0, which top-k ranks lower."""
    q, head_weights, keys = random_problem(shape, seed)
    q, keys = np.abs(q), np.where(np.arange(len(keys))[:, None] % 2, keys, -np.abs(keys))
    scores = np.asarray(scores_of(q, -np.abs(head_weights), keys))
    assert (scores[:, ::2] == 0).all()
    assert not np.signbit(scores[scores == 0]).any()


def test_a_row_scores_alike_whatever_rows_come_with_it() -> None:
    """A prompt's rows must choose the same positions in a chunk as one by one, up to rounding."""
    q, head_weights, keys = random_problem((2 * _ROWS_AT_ONCE, 4, 16, 50), 9)
    together = scores_of(q, head_weights, keys)
    for row in range(0, len(q), 7):
        alone = scores_of(q[row : row + 1], head_weights[row : row + 1], keys)
        np.testing.assert_allclose(together[row : row + 1], alone, rtol=1e-5, atol=1e-5)


def test_many_rows_do_not_need_memory_for_every_head() -> None:
    rows, heads, width, length = 64, 16, 8, 512
    shapes = [(rows, heads, width), (rows, heads), (length, width)]
    compiled = scores_of.lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < heads * rows * length * 4 / 2


class Paged(NamedTuple):
    """Sizes of a problem with paged keys. pages: of the page table; the pool has twice as many, and two layers."""

    requests: int
    rows: int
    heads: int
    width: int
    pages: int
    page_tokens: int
    block_size: int
    kind: str
    dtype: str

    @property
    def context(self) -> int:
        return self.pages * self.page_tokens

    @property
    def index(self) -> IndexKeyFormat:
        return IndexKeyFormat(self.kind, self.width)

    @property
    def pool_shape(self) -> tuple[int, ...]:
        return self.index.pool_shape(2, 2 * self.context, self.block_size)

    def scores(self, backend: str) -> Callable[..., jax.Array]:
        """The jitted op, of (q, head_weights, pool, layer, page_table, visible)."""
        return _op(self.index, self.page_tokens, self.block_size, backend)


@cache
def _op(index: IndexKeyFormat, page_tokens: int, block_size: int, backend: str) -> Callable[..., jax.Array]:
    paging = {"index": index, "page_tokens": page_tokens, "block_size": block_size}
    return jax.jit(partial(paged_index_scores, **paging, backend=backend))


PAGED = [
    Paged(2, 3, 4, 16, 5, 16, 8, "e4m3", "float32"),
    Paged(
        1, 9, 3, 6, 3, 12, 4, "e4m3", "float32"
    ),  # keys that are no whole words, heads and rows that are padded
    Paged(3, 2, 32, 128, 3, 128, 64, "e4m3", "bfloat16"),  # GLM-5.2's heads and pages
    Paged(2, 5, 5, 20, 40, 10, 10, "float32", "float32"),  # several runs of key tiles
    Paged(2, 4, 5, 20, 4, 10, 10, "bfloat16", "bfloat16"),
]


def paged_problem(case: Paged, seed: int) -> tuple[tuple[np.ndarray, ...], np.ndarray]:
    """The op's arrays, and the keys [2, slots, D] float32 that its pool holds. Encoded here, not by the cache."""
    rng = np.random.default_rng(seed)
    slots, block = 2 * case.context, case.block_size
    q = rng.standard_normal((case.requests, case.rows, case.heads, case.width)).astype(case.dtype)
    weights = rng.standard_normal((case.requests, case.rows, case.heads)).astype(np.float32)
    keys = rng.standard_normal((2, slots, case.width)).astype(np.float32)
    if case.kind == "e4m3":
        codes = (keys * 64).astype(ml_dtypes.float8_e4m3fn)
        scales = 2.0 ** rng.integers(-9, 4, (2, slots)).astype(np.float32)
        keys = codes.astype(np.float32) * scales[..., None]
        planar = codes.view(np.uint8).reshape(2, -1, block * case.width)
        pool = np.concatenate([planar, scales.view(np.uint8).reshape(2, -1, 4 * block)], axis=-1)
    else:
        pool = keys.astype(case.kind)
        keys = pool.astype(np.float32)
    pages = [rng.permutation(2 * case.pages)[: case.pages] for _ in range(case.requests)]
    edges = rng.choice([0, 1, case.page_tokens, case.context - 1, case.context], (case.requests, case.rows))
    inside = rng.integers(0, case.context + 1, edges.shape)
    visible = np.where(rng.random(edges.shape) < 0.5, edges, inside).astype(np.int32)
    return (q, weights, pool, np.int32(rng.integers(2)), np.array(pages, np.int32), visible), keys


def paged_formula(case: Paged, arrays: tuple[np.ndarray, ...], keys: np.ndarray) -> np.ndarray:
    """[N, S, L] float64, -inf beyond what a row sees."""
    q, weights, _, layer, table, visible = arrays
    slots = (table[:, :, None] * case.page_tokens + np.arange(case.page_tokens)).reshape(case.requests, -1)
    total = np.stack([formula(*row) for row in zip(q, weights, keys[layer][slots], strict=True)])
    return np.where(np.arange(case.context) < visible[..., None], total, -np.inf)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(PAGED), st.integers(0, 2**32 - 1))
def test_paged_scores_are_the_formula(case: Paged, seed: int) -> None:
    """In bfloat16 too: its products are exact in float32, and so are E4M3 codes times powers of two."""
    arrays, keys = paged_problem(case, seed)
    expected = paged_formula(case, arrays, keys)
    size = np.abs(expected[np.isfinite(expected)]).max(initial=1.0)
    for backend in ("reference", "interpret"):
        found = np.asarray(case.scores(backend)(*arrays))
        assert found.dtype == np.float32
        np.testing.assert_array_equal(np.isneginf(found), np.isneginf(expected))
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5 * size)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("case", PAGED, ids=str)
def test_maxima_are_those_of_groups_of_visible_scores(case: Paged, backend: str) -> None:
    """And the scores beside them are the op's."""
    (*arrays, visible), _ = paged_problem(case, 9)
    group = 2 if case.context % 4 else 4
    paging = case.index, case.page_tokens, case.block_size
    scores, maxima = jax.jit(lambda *a: paged_scores_and_maxima(*a, *paging, group, backend=backend))(
        *arrays, visible
    )
    np.testing.assert_array_equal(scores, case.scores(backend)(*arrays, visible))
    numbers = np.where(np.arange(case.context) < visible[..., None], sortable(scores), 0)
    np.testing.assert_array_equal(maxima, numbers.reshape(*visible.shape, -1, group).max(-1))


@pytest.mark.parametrize("group", [0, 3, 16])
def test_groups_that_are_not_whole_are_refused(group: int) -> None:
    case = PAGED[1]  # of 36 keys
    arrays, _ = paged_problem(case, 9)
    with pytest.raises(ValueError, match=f"groups of {group}"):
        paged_scores_and_maxima(*arrays, case.index, case.page_tokens, case.block_size, group)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_no_paged_score_is_a_negative_zero(case: Paged) -> None:
    (q, weights, pool, layer, table, visible), _ = paged_problem(case, 3)
    arrays = np.zeros_like(q), -np.abs(weights), pool, layer, table, np.full_like(visible, case.context)
    for backend in ("reference", "interpret"):
        scores = np.asarray(case.scores(backend)(*arrays))
        assert (scores == 0).all() and not np.signbit(scores).any()


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_pages_that_no_row_sees_do_not_matter(case: Paged) -> None:
    """The table may hold anything there: padding of -1, or numbers beyond the pool."""
    (q, weights, pool, layer, table, visible), keys = paged_problem(case, 4)
    half = case.pages // 2
    visible = np.minimum(visible, half * case.page_tokens)
    padded = table.copy()
    padded[:, half:] = [-1] * (case.pages - half - 1) + [10**6]
    expected = paged_formula(case, (q, weights, pool, layer, table, visible), keys)
    found = case.scores("interpret")(q, weights, pool, layer, padded, visible)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("programs", [1, 10])
def test_a_program_may_take_several_key_tiles(monkeypatch: pytest.MonkeyPatch, programs: int) -> None:
    """All seven of the context, or four and then three; rows see all, part or nothing of them."""
    case = PAGED[3]
    monkeypatch.setattr(triton, "_PROGRAMS", programs)
    tiling = triton.Tiling.of(case.requests, case.rows, case.heads, case.width, case.context, 4)
    assert (tiling.keys, tiling.tiles) == (64, 16 if programs == 1 else 4)
    arrays, keys = paged_problem(case, 10)
    arrays[-1][:] = [[400, 257, 256, 255, 64], [63, 10, 1, 0, 0]]
    paging = {"index": case.index, "page_tokens": case.page_tokens, "block_size": case.block_size}
    found = jax.jit(partial(paged_index_scores, **paging, backend="interpret"))(*arrays)
    np.testing.assert_allclose(found, paged_formula(case, arrays, keys), rtol=1e-5, atol=1e-3)


def test_a_negative_page_reads_page_0() -> None:
    case = PAGED[0]
    (q, weights, pool, layer, table, visible), _ = paged_problem(case, 5)
    negative, zero = table.copy(), table.copy()
    negative[:, 1], zero[:, 1] = -3, 0
    visible = np.full_like(visible, case.context)
    for backend in ("reference", "interpret"):
        scores = case.scores(backend)
        np.testing.assert_array_equal(
            scores(q, weights, pool, layer, negative, visible), scores(q, weights, pool, layer, zero, visible)
        )


def test_a_limit_beyond_the_context_is_the_context() -> None:
    case = PAGED[0]
    (*arrays, visible), _ = paged_problem(case, 6)
    for backend in ("reference", "interpret"):
        beyond, whole = (
            case.scores(backend)(*arrays, np.full_like(visible, n)) for n in (1000, case.context)
        )
        np.testing.assert_array_equal(beyond, whole)


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize("empty", ["requests", "rows", "pages", "heads"])
def test_sizes_of_0_have_no_scores_and_no_heads_score_0(empty: str, backend: str) -> None:
    case = PAGED[0]
    (q, weights, pool, layer, table, visible), _ = paged_problem(case, 11)
    arrays = {
        "requests": (q[:0], weights[:0], pool, layer, table[:0], visible[:0]),
        "rows": (q[:, :0], weights[:, :0], pool, layer, table, visible[:, :0]),
        "pages": (q, weights, pool, layer, table[:, :0], visible),
        "heads": (q[:, :, :0], weights[:, :, :0], pool, layer, table, visible),
    }[empty]
    scores = case.scores(backend)(*arrays)
    context = arrays[4].shape[1] * case.page_tokens
    assert scores.dtype == np.float32
    expected = np.where(np.arange(context) < arrays[5][..., None], 0, -np.inf)
    np.testing.assert_array_equal(scores, expected)


def test_rows_score_alike_in_a_prompt_and_one_by_one() -> None:
    """However rows are put together for one product."""
    case = Paged(1, 9, 4, 16, 5, 16, 8, "e4m3", "bfloat16")
    (q, weights, pool, layer, table, visible), _ = paged_problem(case, 7)
    together = case.scores("interpret")(q, weights, pool, layer, table, visible)
    for row in range(case.rows):
        one = (part[:, row : row + 1] for part in (q, weights))
        alone = case.scores("interpret")(*one, pool, layer, table, visible[:, row : row + 1])
        np.testing.assert_allclose(together[:, row : row + 1], alone, rtol=1e-6, atol=1e-5)


def lowered_for_gpus(case: Paged, slots: int) -> str:
    """The StableHLO of the op on GPUs at any sizes."""
    shaped, small = jax.ShapeDtypeStruct, jnp.int32
    heads = (case.requests, case.rows, case.heads)
    arrays = (
        shaped((*heads, case.width), case.dtype),
        shaped(heads, jnp.float32),
        shaped(case.index.pool_shape(21, slots, case.block_size), case.index.dtype),
        shaped((), small),
        shaped((case.requests, case.pages), small),
        shaped(heads[:2], small),
    )
    return case.scores("auto").trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("rows", [1, 4, 2048])
@pytest.mark.parametrize(
    ("kind", "dtype"), [("e4m3", "bfloat16"), ("bfloat16", "bfloat16"), ("float32", "float32")]
)
def test_full_size_lowers_for_gpus_without_a_gather(rows: int, kind: str, dtype: str) -> None:
    case = Paged(1 if rows > 4 else 8, rows, 32, 128, 256, 512, 64, kind, dtype)
    text = lowered_for_gpus(case, 8 * 131_072)
    assert "index_scores" in text
    assert "stablehlo.gather" not in text and "dynamic_slice" not in text


def test_a_large_pool_of_odd_keys_is_refused() -> None:
    """Its bytes would be counted by 32-bit offsets; words of whole ones are not."""
    odd, whole = (Paged(1, 1, 4, width, 4, 64, 64, "e4m3", "float32") for width in (126, 128))
    with pytest.raises(ValueError, match="below 2 GiB"):
        lowered_for_gpus(odd, 2**20)
    lowered_for_gpus(whole, 2**20)


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_declared_costs_are_the_kernels_own(moved: Callable[[], Cost], case: Paged) -> None:
    (q, *arrays, visible), _ = paged_problem(case, 8)
    options = {"index": case.index, "page_tokens": case.page_tokens, "block_size": case.block_size}
    options["backend"] = "interpret"
    ops = {0: paged_index_scores, 2: partial(paged_scores_and_maxima, group=2)}
    for group, op in ops.items():
        score = jax.jit(partial(op, **options))
        for seen in (case.context + 1000, case.page_tokens + 3, 0):
            jax.block_until_ready(score(q, *arrays, np.full_like(visible, seen)))
            sizes = case.requests, case.rows, case.heads, case.context, min(seen, case.context)
            assert moved() == cost(*sizes, case.index, q.dtype.itemsize, group)


def test_programs_read_no_more_than_a_few_times_the_keys() -> None:
    """32 rows of 8 requests with 131,072 tokens read each request's keys once: queries are small beside them."""
    index = IndexKeyFormat("e4m3", 128)
    declared = cost(8, 4, 32, 131_072, 131_072, index, 2)
    keys = 8 * 131_072 * index.key_bytes
    assert keys < declared.bytes_read < 1.5 * keys
    assert triton.Tiling.of(8, 4, 32, 128, 131_072, 2).rows == 4
