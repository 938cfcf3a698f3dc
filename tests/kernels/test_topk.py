"""Selection against a plain sort: score descending, then lowest position, in all of its forms."""

import re
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.index_scores import index_scores
from glm_dcp_jax.kernels.tiles import next_power
from glm_dcp_jax.kernels.topk import maxima_group, select_mask, select_positions, triton
from glm_dcp_jax.kernels.topk.cost import cost, sort_cost
from glm_dcp_jax.kernels.topk.reference import sortable

ROWS = 4
# Few shapes, many values: jax compiles once for each shape.
SHAPES = [(1, 1), (1, 5), (7, 1), (7, 3), (7, 7), (33, 8), (33, 40), (100, 64)]
SEARCHED = [(5, 8), (100, 8), (129, 3), (129, 2)]
"""Shapes of the kernels, which take seconds to compile: in one program; in groups of two, of four, of eight."""
INFINITY, LARGEST, SMALLEST = float("inf"), float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)
FEW = st.sampled_from([0.0, 1.0, -1.0])
"""So few values that nearly all columns tie."""
ANY = st.one_of(
    FEW,
    st.sampled_from([INFINITY, -INFINITY, LARGEST, -LARGEST, SMALLEST, -SMALLEST, 1.0 + 2**-23]),
    st.floats(width=32, allow_nan=False, allow_subnormal=False),
)

positions_of = jax.jit(select_positions, static_argnums=2)
mask_of = jax.jit(select_mask, static_argnums=2)


def search_in_small_tiles(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
    """`select_positions` by its kernels, with so small ones that short rows have groups of several sizes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(triton, "SORTED_COLUMNS", 0)
        patch.setattr(triton, "TILE", 64)
        patch.setattr(triton, "ITEMS", max(16, 2 * next_power(k)))
        return select_positions(scores, visible, k, "interpret")


search = jax.jit(search_in_small_tiles, static_argnums=2)


def sorted_selection(scores: np.ndarray, visible: np.ndarray, k: int) -> np.ndarray:
    """[S, k], -1 behind: the definition, by sorting (negated score, position) pairs."""
    scores = np.where(np.isnan(scores), -np.inf, scores)
    chosen = np.full((len(scores), k), -1)
    for row, (values, seen) in enumerate(zip(scores, visible, strict=True)):
        best = sorted(range(seen), key=lambda position: (-values[position], position))[:k]
        chosen[row, : len(best)] = best
    return chosen


@st.composite
def problems(draw: st.DrawFn, shapes: list[tuple[int, int]] = SHAPES) -> tuple[np.ndarray, np.ndarray, int]:
    length, k = draw(st.sampled_from(shapes))
    value = draw(st.sampled_from([FEW, ANY, st.one_of(ANY, st.just(np.nan))]))
    scores = draw(st.lists(value, min_size=ROWS * length, max_size=ROWS * length))
    some = st.one_of(
        st.integers(0, length), st.sampled_from([0, 1, min(k, length) - 1, min(k, length), length])
    )
    visible = draw(st.lists(some, min_size=ROWS, max_size=ROWS))
    # Adding 0.0 makes -0.0 the +0.0 that the operations ask for.
    return np.array(scores, np.float32).reshape(ROWS, length) + 0.0, np.array(visible, np.int32), k


@settings(max_examples=150, deadline=None)
@given(problems())
def test_positions_are_those_of_a_sort(problem: tuple[np.ndarray, np.ndarray, int]) -> None:
    scores, visible, k = problem
    np.testing.assert_array_equal(
        positions_of(scores, visible, k), sorted_selection(scores, visible, k), err_msg=str(problem)
    )


@settings(max_examples=150, deadline=None)
@given(problems(SEARCHED))
def test_the_search_selects_what_a_sort_does(problem: tuple[np.ndarray, np.ndarray, int]) -> None:
    """Bit for bit what lax.top_k gives, too, which is the reference."""
    scores, visible, k = problem
    found = search(scores, visible, k)
    np.testing.assert_array_equal(found, sorted_selection(scores, visible, k), err_msg=str(problem))
    np.testing.assert_array_equal(found, positions_of(scores, visible, k))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_the_mask_is_the_same_set(problem: tuple[np.ndarray, np.ndarray, int]) -> None:
    scores, visible, k = problem
    mask = np.asarray(mask_of(scores, visible, k))
    for row, chosen in enumerate(sorted_selection(scores, visible, k)):
        np.testing.assert_array_equal(np.flatnonzero(mask[row]), np.sort(chosen[chosen >= 0]))


@pytest.mark.parametrize("value", [0.0, -3.5, 7.25, -INFINITY])
def test_constant_scores_select_the_lowest_positions(value: float) -> None:
    scores, visible = np.full((3, 50), value, np.float32), np.array([50, 20, 7], np.int32)
    expected = [list(range(10)), list(range(10)), [*range(7), -1, -1, -1]]
    assert positions_of(scores, visible, 10).tolist() == expected
    assert [np.flatnonzero(row).tolist() for row in mask_of(scores, visible, 10)] == [
        [position for position in row if position >= 0] for row in expected
    ]


def test_a_tie_at_the_last_place_goes_to_the_lowest_position() -> None:
    """The k-th best score occurs before, between and behind better ones."""
    scores = np.array([[2, 5, 2, 9, 2, 2, 5, 2]], np.float32)
    visible = np.array([8], np.int32)
    assert positions_of(scores, visible, 5).tolist() == [[3, 1, 6, 0, 2]]
    assert np.flatnonzero(mask_of(scores, visible, 5)[0]).tolist() == [0, 1, 2, 3, 6]


def test_a_row_that_sees_nothing_selects_nothing() -> None:
    scores, visible = np.ones((2, 9), np.float32), np.zeros(2, np.int32)
    assert (np.asarray(positions_of(scores, visible, 4)) == -1).all()
    assert not np.asarray(mask_of(scores, visible, 4)).any()


def test_fewer_columns_than_k_are_all_selected_and_padded() -> None:
    scores, visible = np.array([[1.0, 3.0, 2.0]], np.float32), np.array([3], np.int32)
    assert positions_of(scores, visible, 6).tolist() == [[1, 2, 0, -1, -1, -1]]
    assert mask_of(scores, visible, 6).tolist() == [[True, True, True]]


@pytest.mark.parametrize("select", [positions_of, search])
def test_no_more_is_visible_than_there_is(select: Callable[..., jax.Array]) -> None:
    """A limit past the last column is the last column: no position is repeated to fill k."""
    scores = np.random.default_rng(6).standard_normal((ROWS, 33)).astype(np.float32)
    beyond, all_of_them = np.array([33, 34, 40, 2**31 - 1], np.int32), np.full(ROWS, 33)
    expected = sorted_selection(scores, all_of_them, 40)
    np.testing.assert_array_equal(select(scores, beyond, 40), expected)
    mask = mask_of(scores, beyond, 8)
    assert [set(np.flatnonzero(row)) for row in mask] == [set(row[:8]) for row in expected]


@pytest.mark.parametrize("backend", ["reference", "interpret"])
@pytest.mark.parametrize(("rows", "columns", "k"), [(0, 1, 1), (2, 1, 0), (0, 0, 0), (2, 0, 3)])
@pytest.mark.parametrize("times", [1, triton.SORTED_COLUMNS + 1])
def test_nothing_is_selected_of_nothing(rows: int, columns: int, k: int, times: int, backend: str) -> None:
    scores, visible = np.zeros((rows, columns * times), np.float32), np.full(rows, columns * times, np.int32)
    found = select_positions(scores, visible, k, backend)
    assert found.shape == (rows, k) and found.dtype == np.int32
    assert (np.asarray(found) == -1).all()
    assert not np.asarray(select_mask(scores, visible, k)).any()


def test_what_is_not_visible_may_hold_anything() -> None:
    """Columns past `visible` are keys of other tokens, or of none: the best score there, or NaN, counts for nothing."""
    scores = np.array([[1.0, 2.0, INFINITY, np.nan, 9.0]], np.float32)
    visible = np.array([2], np.int32)
    assert positions_of(scores, visible, 4).tolist() == [[1, 0, -1, -1]]
    assert np.flatnonzero(mask_of(scores, visible, 4)[0]).tolist() == [0, 1]


def test_zeros_of_both_signs_tie_when_they_come_from_index_scores() -> None:
    """relu(...) = 0 times a negative head weight is -0.0, which sorting ranks below +0.0."""
    q, keys = np.ones((1, 1, 2), np.float32), -np.ones((6, 2), np.float32)
    scores = jnp.concatenate(
        [index_scores(q, np.array([[weight]], np.float32), keys) for weight in (-1.0, 1.0)], axis=1
    )
    visible = np.array([12], np.int32)
    assert positions_of(scores, visible, 4).tolist() == [[0, 1, 2, 3]]
    assert np.flatnonzero(mask_of(scores, visible, 4)[0]).tolist() == [0, 1, 2, 3]


def test_nan_ranks_as_minus_infinity() -> None:
    """Of either sign: such scores are errors, which must not push out real ones."""
    minus_nan = np.float32(np.copysign(np.nan, -1))
    scores = np.full((ROWS, 33), 5.0, np.float32)
    scores[:, :6] = [np.nan, 1.0, -INFINITY, minus_nan, 2.0, INFINITY]
    visible = np.array([6, 5, 4, 1], np.int32)
    expected = [[5, 4, 1, 0, 2, 3], [4, 1, 0, 2, 3, -1], [1, 0, 2, 3, -1, -1], [0, -1, -1, -1, -1, -1]]
    for select in (positions_of, search):
        assert select(scores, visible, 40)[:, :6].tolist() == expected
    kept = [np.flatnonzero(row).tolist() for row in mask_of(scores, visible, 3)]
    assert kept == [sorted(place for place in row[:3] if place >= 0) for row in expected]


def few_values(shape: tuple[int, int]) -> np.ndarray:
    return np.random.default_rng(2).integers(-2, 3, shape).astype(np.float32)


@pytest.mark.parametrize(("columns", "levels"), [(5000, 1), (20_000, 2), (150_000, 3)])
class TestSearchOfLongRows:
    """The kernels as GPUs get them, on rows that are too long to be sorted."""

    rows, k = 3, 2048

    @staticmethod
    @jax.jit
    def select(scores, visible):
        return select_positions(scores, visible, TestSearchOfLongRows.k, "interpret")

    def agrees(self, scores: np.ndarray) -> bool:
        visible = np.array([scores.shape[1], self.k, self.k - 1], np.int32)
        expected = sorted_selection(scores, visible, self.k)
        return np.array_equal(self.select(scores, visible), expected)

    def test_rows_are_long_enough(self, columns, levels):
        assert columns > triton.SORTED_COLUMNS
        assert len(triton.Levels.of(columns, self.k).sizes) == levels

    def test_random_scores(self, columns, levels):
        assert self.agrees(np.random.default_rng(1).standard_normal((self.rows, columns)).astype(np.float32))

    def test_the_threshold_ties_in_many_groups_and_tiles(self, columns, levels):
        assert self.agrees(few_values((self.rows, columns)))

    def test_the_best_columns_are_neighbours(self, columns, levels):
        """They fill few groups; those chosen beside them tie."""
        scores = few_values((self.rows, columns))
        scores[:, columns // 2 : columns // 2 + 1500] = np.arange(1500) + 5
        assert self.agrees(scores)

    def test_equal_scores_select_the_lowest_positions(self, columns, levels):
        assert self.agrees(np.full((self.rows, columns), -7.5, np.float32))


@pytest.mark.parametrize("columns", [20_480, 150_016])
def test_known_maxima_change_nothing(columns: int) -> None:
    rows, k = 3, 2048
    scores, visible = few_values((rows, columns)), np.array([columns, 5000, 0])
    group = maxima_group(columns, k)
    numbers = np.where(np.arange(columns) < visible[:, None], sortable(scores), 0)
    maxima = numbers.reshape(rows, -1, group).max(-1)
    for backend in ("reference", "interpret"):
        found = jax.jit(partial(select_positions, k=k, backend=backend))(scores, visible, maxima=maxima)
        np.testing.assert_array_equal(found, sorted_selection(scores, visible, k))


def test_maxima_that_do_not_fit_are_refused() -> None:
    scores, visible = jnp.zeros((3, 20_480)), np.zeros(3, np.int32)
    with pytest.raises(ValueError, match="maxima"):
        select_positions(scores, visible, 2048, maxima=jnp.zeros((3, 20_480 // 4), jnp.uint32))
    with pytest.raises(ValueError, match="maxima"):
        select_positions(scores, visible, 2048, maxima=jnp.zeros((3, 20_480 // 8)))


@pytest.mark.parametrize(("columns", "k", "group"), [(131_072, 2048, 8), (131_072, 4096, 4), (2**20, 64, 8)])
def test_maxima_of_whole_groups_are_of_use(columns: int, k: int, group: int) -> None:
    assert maxima_group(columns, k) == group
    assert maxima_group(columns + 8, k) == maxima_group(triton.ITEMS, k) == maxima_group(columns, 9000) == 0


@pytest.mark.parametrize("k", [1, 64, 2048, 4096, 8192])
@pytest.mark.parametrize("columns", [4097, 16_385, 131_072, 2**20])
def test_each_level_is_the_groups_of_the_one_below(columns: int, k: int) -> None:
    """What is chosen of a level has no more members below than one program can choose from."""
    group, sizes = triton.Levels.of(columns, k)
    assert sizes[0] == columns and sizes[-1] <= triton.ITEMS
    assert group * next_power(k) <= triton.ITEMS
    for below, above in zip(sizes, sizes[1:], strict=False):
        assert below <= group * above < below + group * group and above % group == 0
    assert triton.TILE % group ** (len(sizes) - 1) == 0


def test_what_is_too_much_for_the_kernels_is_sorted() -> None:
    assert triton.Levels.of(131_072, triton.ITEMS) is None
    assert triton.Levels.of(2**24, 2048) is None
    scores = few_values((2, 5000))
    found = jax.jit(partial(select_positions, k=8200, backend="interpret"))(scores, np.array([5000, 9]))
    np.testing.assert_array_equal(found, sorted_selection(scores, np.array([5000, 9]), 8200))


@pytest.mark.parametrize("rows", [1, 32, 512])
@pytest.mark.parametrize("k", [2048, 64])
def test_on_gpus_no_long_row_is_sorted(rows: int, k: int) -> None:
    """Only the k chosen columns are; and what is lowered for GPUs are the kernels."""
    shapes = [jax.ShapeDtypeStruct((rows, 131_072), jnp.float32), jax.ShapeDtypeStruct((rows,), jnp.int32)]
    traced = jax.jit(partial(select_positions, k=k)).trace(*shapes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("topk_maxima") and text.count("topk_choose")
    assert "top_k" not in text
    sorts = re.findall(r"stablehlo.sort.*?\) -> \(tensor<(\w+)xui32>", text, re.DOTALL)
    assert sorts == [f"{rows}x{k}"]


@pytest.mark.parametrize("columns", [5000, 20_000, 150_000])
def test_declared_bytes_are_what_the_kernels_move(columns: int, moved: Callable[[], Cost]) -> None:
    """All but those of the last sort, which is XLA's, whatever the scores."""
    rows, k = 3, 300
    select = jax.jit(partial(select_positions, k=k, backend="interpret"))
    for visible in (columns - 12, 2500, 900):
        jax.block_until_ready(select(few_values((rows, columns)), np.full(rows, visible, np.int32)))
        declared, found, by_xla = cost(rows, columns, visible, k), moved(), sort_cost(rows, k)
        assert found.bytes_read == declared.bytes_read - by_xla.bytes_read
        assert found.bytes_written == declared.bytes_written - by_xla.bytes_written


@pytest.mark.parametrize("columns", [20_480, 150_016])
def test_with_known_maxima_scores_are_read_only_where_they_are_chosen(
    columns: int, moved: Callable[[], Cost]
) -> None:
    rows, k = 3, 300
    scores, visible = few_values((rows, columns)), np.full(rows, columns, np.int32)
    maxima = np.asarray(sortable(scores)).reshape(rows, -1, 8).max(-1)
    jax.block_until_ready(
        jax.jit(partial(select_positions, k=k, backend="interpret"))(scores, visible, maxima=maxima)
    )
    declared, by_xla = cost(rows, columns, columns, k, has_maxima=True), sort_cost(rows, k)
    assert moved() == Cost(
        declared.bytes_read - by_xla.bytes_read, declared.bytes_written - by_xla.bytes_written
    )


def test_short_rows_cost_their_sort() -> None:
    assert cost(2, 1000, 10, 64) == (4 * 2 * 1000, 8 * 2 * 64, 0)
