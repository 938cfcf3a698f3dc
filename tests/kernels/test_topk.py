"""Selection against a plain sort: score descending, then lowest position, in both of its forms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.kernels.index_scores import index_scores
from glm_dcp_jax.kernels.topk import select_mask, select_positions

ROWS = 4
# Few shapes, many values: jax compiles once for each shape.
SHAPES = [(1, 1), (1, 5), (7, 1), (7, 3), (7, 7), (33, 8), (33, 40), (100, 64)]
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


def sorted_selection(scores: np.ndarray, visible: np.ndarray, k: int) -> np.ndarray:
    """[S, k], -1 behind: the definition, by sorting (negated score, position) pairs."""
    chosen = np.full((len(scores), k), -1)
    for row, (values, seen) in enumerate(zip(scores, visible, strict=True)):
        best = sorted(range(seen), key=lambda position: (-values[position], position))[:k]
        chosen[row, : len(best)] = best
    return chosen


@st.composite
def problems(draw: st.DrawFn) -> tuple[np.ndarray, np.ndarray, int]:
    length, k = draw(st.sampled_from(SHAPES))
    value = draw(st.sampled_from([FEW, ANY]))
    scores = draw(st.lists(value, min_size=ROWS * length, max_size=ROWS * length))
    visible = draw(st.lists(st.integers(0, length), min_size=ROWS, max_size=ROWS))
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
