"""Sampling: greedy and its ties, exact filters, the right distribution, reproducibility, health, log probabilities."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from glm_dcp_jax.engine.sampling import Sampled, row_params, sample
from glm_dcp_jax.engine.sampling_params import MAX_LOGPROBS, SamplingParams

GREEDY = SamplingParams(temperature=0)
VOCABULARY = 50
ROWS = 512
DRAWS = 20_000
SIGNIFICANCE = 1e-6  # draws are the same on every run; this only bounds how unlucky their fixed seeds may be


def draw(
    logits: np.ndarray,
    params: SamplingParams | Sequence[SamplingParams],
    seeds: Sequence[int] | None = None,
    steps: Sequence[int] | None = None,
    random: bool = True,
    logprobs: bool = False,
    rows: int = ROWS,
) -> Sampled:
    """Sample logits [M, V], row i with seed i and step 0 unless given. Padded to `rows`: few programs serve all."""
    count = len(logits)
    each = [params] * count if isinstance(params, SamplingParams) else params
    wanted = list(zip(each, seeds or range(count), steps or [0] * count, strict=True))
    rows = max(rows, count)
    padded = np.zeros((rows, logits.shape[1]), np.float32)
    padded[:count] = logits
    sampled = sample(jnp.asarray(padded), row_params(wanted, rows), random, logprobs)
    return Sampled(*(None if part is None else np.asarray(part)[:count] for part in sampled))


def many(logits: Sequence[float], params: SamplingParams) -> np.ndarray:
    """DRAWS tokens from one row of up to 8 logits, with seeds 0, 1, 2, ..., in one call."""
    row = np.full(8, -np.inf)
    row[: len(logits)] = logits
    return draw(np.tile(row, (DRAWS, 1)), params).token


def softmax(logits: Sequence[float], temperature: float = 1.0) -> np.ndarray:
    scaled = np.asarray(logits, np.float64) / temperature
    exponentials = np.exp(scaled - scaled.max())
    return exponentials / exponentials.sum()


def assert_drawn_from(tokens: np.ndarray, probabilities: np.ndarray) -> None:
    """A chi-square test; tokens of probability 0 must not occur at all."""
    counts = np.bincount(tokens, minlength=len(probabilities))
    possible = probabilities > 0
    assert len(counts) == len(possible) and not counts[~possible].any(), "tokens that the filter excludes"
    if possible.sum() == 1:
        return
    expected = probabilities[possible] * len(tokens)
    assert expected.min() > 5, "too few draws for the test"
    assert stats.chisquare(counts[possible], expected).pvalue > SIGNIFICANCE


class TestGreedy:
    def test_the_likeliest_token_and_of_equals_the_lowest(self):
        logits = np.random.default_rng(0).normal(size=(6, VOCABULARY))
        logits[3, [11, 30, 42]] = 9.0
        logits[4] = 1.0
        for random in (False, True):
            tokens = draw(logits, GREEDY, random=random).token
            np.testing.assert_array_equal(tokens, logits.argmax(axis=1))
            assert tokens[3] == 11 and tokens[4] == 0

    def test_beside_rows_that_are_drawn(self):
        logits = np.random.default_rng(1).normal(size=(40, VOCABULARY))
        params = [GREEDY if row % 2 else SamplingParams() for row in range(40)]
        tokens, likeliest = draw(logits, params).token, logits.argmax(axis=1)
        np.testing.assert_array_equal(tokens[1::2], likeliest[1::2])
        assert (tokens[::2] != likeliest[::2]).any()

    @pytest.mark.parametrize(
        "params",
        [
            SamplingParams(top_k=1),
            SamplingParams(top_p=1e-9),
            SamplingParams(min_p=1.0),
            SamplingParams(temperature=1.1e-5),
            SamplingParams(top_k=1, top_p=0.5, min_p=0.5, temperature=50.0),
        ],
        ids=["top_k 1", "tiny top_p", "min_p 1", "tiny temperature", "all at once"],
    )
    def test_filters_that_leave_one_token_are_greedy(self, params):
        logits = np.random.default_rng(2).normal(size=(200, VOCABULARY))
        np.testing.assert_array_equal(draw(logits, params).token, logits.argmax(axis=1))

    def test_top_k_of_equals_keeps_the_lowest(self):
        logits = np.zeros((200, VOCABULARY))
        assert set(draw(logits, SamplingParams(top_k=1)).token) == {0}
        assert set(draw(logits, SamplingParams(top_k=3)).token) == {0, 1, 2}


class TestDistribution:
    LOGITS = (1.0, -0.5, 0.3, 2.0, -1.0, 0.3, 0.0, 1.7)

    @pytest.mark.parametrize("temperature", [0.7, 1.0, 2.5])
    def test_draws_follow_the_softmax_at_the_temperature(self, temperature):
        tokens = many(self.LOGITS, SamplingParams(temperature=temperature))
        assert_drawn_from(tokens, softmax(self.LOGITS, temperature))

    def test_the_steps_of_one_request_follow_it_too(self):
        """Seeds 0, 1, 2, ... are many requests; this is one, token after token."""
        logits = np.tile(np.asarray(self.LOGITS, np.float32), (DRAWS, 1))
        tokens = draw(logits, SamplingParams(), [1234] * DRAWS, range(DRAWS)).token
        assert_drawn_from(tokens, softmax(self.LOGITS))
        pairs = tokens[:-1] * 8 + tokens[1:]
        assert_drawn_from(pairs, np.outer(softmax(self.LOGITS), softmax(self.LOGITS)).reshape(-1))


# Descending and shuffled, so that sorting matters: 0.4, 0.2, 0.15, 0.1, 0.1, 0.05.
PROBABILITIES = np.array([0.1, 0.4, 0.05, 0.2, 0.1, 0.15])


def kept(temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """vLLM's rules on PROBABILITIES, step by step; each sees what the one before it left, made to sum to 1 again."""
    left = softmax(np.log(PROBABILITIES), temperature)
    left = np.where(left >= min_p * left.max(), left, 0)
    order = np.argsort(-left, kind="stable")
    if top_k > 0:
        left[order[top_k:]] = 0
    left /= left.sum()
    before = np.cumsum(left[order]) - left[order]
    left[order[before >= top_p]] = 0
    return left / left.sum()


class TestFilters:
    @pytest.mark.parametrize(
        "filters",
        [
            {"top_k": 3},
            {"top_k": -1},
            {"top_k": 100},
            {"top_p": 0.39},
            {"top_p": 0.41},
            {"top_p": 0.74},
            {"top_p": 0.76},
            {"top_p": 0.999},
            {"min_p": 0.2},
            {"min_p": 0.3},
            {"min_p": 0.45},
            {"top_k": 4, "min_p": 0.45},
            {"temperature": 2.0, "top_p": 0.5},
            {"temperature": 2.0, "min_p": 0.55},
        ],
        ids=str,
    )
    def test_exactly_the_right_tokens_in_the_right_proportion(self, filters):
        tokens = many(np.log(PROBABILITIES), SamplingParams(**filters))
        assert_drawn_from(tokens, kept(**filters))

    @pytest.mark.parametrize(
        "filters",
        [{"top_k": 2, "top_p": 0.65}, {"top_k": 3, "top_p": 0.5}, {"min_p": 0.45, "top_p": 0.65}],
        ids=str,
    )
    def test_top_p_is_a_share_of_what_top_k_and_min_p_have_left(self, filters):
        """In vLLM the probabilities that top_p sums are those after the other filters."""
        unlike = {name: value for name, value in filters.items() if name != "top_p"}
        assert (kept(**filters) != kept(**unlike)).any()
        tokens = many(np.log(PROBABILITIES), SamplingParams(**filters))
        assert_drawn_from(tokens, kept(**filters))

    def test_each_row_has_filters_of_its_own(self):
        logits = np.full((300, VOCABULARY), -np.inf)
        logits[:, :6] = np.log(PROBABILITIES)
        each = [SamplingParams(top_k=1), SamplingParams(top_k=2), SamplingParams()] * 100
        tokens = draw(logits, each).token
        assert [set(tokens[start::3]) for start in range(3)] == [{1}, {1, 3}, set(range(6))]


class TestReproducibility:
    LOGITS = np.random.default_rng(3).normal(size=(8, VOCABULARY))

    def test_the_same_seed_and_step_draw_the_same_token(self):
        first, second = (draw(self.LOGITS, SamplingParams()).token for _ in range(2))
        np.testing.assert_array_equal(first, second)

    def test_seeds_and_steps_matter(self):
        flat = np.zeros((64, VOCABULARY))
        by_seed = draw(flat, SamplingParams(), seeds=range(64)).token
        by_step = draw(flat, SamplingParams(), seeds=[0] * 64, steps=range(64)).token
        assert len(set(by_seed)) > 20 and len(set(by_step)) > 20
        assert by_seed.tolist() != by_step.tolist()

    def test_a_row_draws_the_same_alone_elsewhere_and_in_other_company(self):
        params = [
            SamplingParams(),
            SamplingParams(top_p=0.9),
            SamplingParams(top_k=40, temperature=0.8),
            GREEDY,
        ] * 2
        seeds, steps = [5, -1, 2**40, 7, 5, 5, 0, 9], [0, 3, 17, 1, 1, 0, 2, 2]
        together = draw(self.LOGITS, params, seeds, steps).token
        for row in range(8):
            alone = draw(self.LOGITS[[row]], [params[row]], [seeds[row]], [steps[row]], rows=1).token
            assert alone[0] == together[row]
        order = np.random.default_rng(4).permutation(8)
        pick = lambda values: [values[row] for row in order]  # noqa: E731
        moved = draw(self.LOGITS[order], pick(params), pick(seeds), pick(steps)).token
        np.testing.assert_array_equal(moved, together[order])

    def test_padded_rows_are_greedy(self):
        params = row_params([(SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1), -1, 4)], 3)
        assert params.temperature.tolist() == [0.5, 0.0, 0.0]
        assert params.top_k.tolist() == [0, 0, 0]
        assert params.seed.tolist() == [2**32 - 1, 0, 0] and params.step.tolist() == [4, 0, 0]

    def test_a_vanishing_temperature_is_greedy(self):
        assert row_params([(SamplingParams(temperature=1e-9), 0, 0)], 1).temperature.tolist() == [0.0]


class TestHealth:
    @pytest.mark.parametrize("random", [False, True])
    def test_a_row_with_a_nan_is_unhealthy_and_the_others_are_not_touched(self, random):
        logits = np.random.default_rng(5).normal(size=(4, VOCABULARY))
        clean = draw(logits, SamplingParams(), random=random).token
        logits[1, 7] = np.nan
        logits[2, :] = np.nan
        sampled = draw(logits, SamplingParams(), random=random)
        assert sampled.healthy.tolist() == [True, False, False, True]
        assert sampled.token[[0, 3]].tolist() == clean[[0, 3]].tolist()

    def test_a_banned_token_is_healthy_and_never_drawn(self):
        logits = np.zeros((500, VOCABULARY))
        logits[:, 2] = -np.inf
        sampled = draw(logits, SamplingParams(temperature=5.0))
        assert sampled.healthy.all() and set(sampled.token) == set(range(VOCABULARY)) - {2}


class TestLogprobs:
    def test_none_unless_asked_for(self):
        sampled = draw(np.zeros((2, VOCABULARY)), GREEDY)
        assert (sampled.logprob, sampled.rank, sampled.top_tokens, sampled.top_logprobs) == (None,) * 4

    def test_they_are_the_models_own_before_temperature_and_filters(self):
        logits = np.random.default_rng(6).normal(size=(30, VOCABULARY)) * 3
        sampled = draw(logits, SamplingParams(temperature=3.0, top_k=20), logprobs=True)
        rows = np.arange(30)
        expected = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(sampled.logprob, expected[rows, sampled.token], atol=1e-5)
        order = np.argsort(-logits, axis=1)
        np.testing.assert_array_equal(sampled.top_tokens, order[:, :MAX_LOGPROBS])
        np.testing.assert_allclose(
            sampled.top_logprobs, np.take_along_axis(expected, order, 1)[:, :20], atol=1e-5
        )
        ranks = 1 + np.argsort(order, axis=1)[rows, sampled.token]
        np.testing.assert_array_equal(sampled.rank, ranks)
        assert ranks.max() > 3, "some token that is not among the likeliest was drawn"

    def test_the_likeliest_has_rank_1_and_equals_share_theirs(self):
        logits = np.zeros((1, VOCABULARY))
        logits[0, [4, 9]] = 2.0
        logits[0, 30] = 3.0
        assert draw(logits, GREEDY, logprobs=True).rank.tolist() == [1]
        logits[0, 30] = 0.0
        sampled = draw(np.tile(logits, (100, 1)), SamplingParams(top_k=2), logprobs=True)
        assert set(sampled.token) == {4, 9} and set(sampled.rank) == {1}
        assert sampled.top_tokens[0, :2].tolist() == [4, 9]

    def test_a_vocabulary_smaller_than_the_list(self):
        assert draw(np.zeros((2, 7)), GREEDY, logprobs=True).top_tokens.shape == (2, 7)

    def test_asking_for_them_changes_no_token(self):
        logits = np.random.default_rng(7).normal(size=(50, VOCABULARY))
        plain = draw(logits, SamplingParams()).token
        np.testing.assert_array_equal(plain, draw(logits, SamplingParams(), logprobs=True).token)
