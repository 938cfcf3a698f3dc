"""Sampling: greedy and its ties, exact filters, the right distribution, reproducibility, health, log probabilities."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
import pytest
from drawing import DRAWS, PROBABILITIES, assert_drawn_from, draw, kept, softmax

from glm_dcp_jax.engine.sampling import row_params, sample, score
from glm_dcp_jax.engine.sampling_params import MAX_LOGPROBS, SamplingParams

GREEDY = SamplingParams(temperature=0)
VOCABULARY = 50


def many(logits: Sequence[float], params: SamplingParams) -> np.ndarray:
    """DRAWS tokens from one row of up to 8 logits, with seeds 0, 1, 2, ..., in one call."""
    row = np.full(8, -np.inf)
    row[: len(logits)] = logits
    return draw(np.tile(row, (DRAWS, 1)), params).token


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
            {"temperature": 0.7, "top_p": 0.9},
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

    @pytest.mark.parametrize("vocabulary", [VOCABULARY, 5000])
    @pytest.mark.parametrize("ties", [False, True])
    def test_the_kept_set_is_the_one_that_sorting_gives(self, vocabulary, ties):
        """What numpy's sort leaves, and nothing else, can be drawn: with the rest gone, filters change no token."""
        random = np.random.default_rng(8)
        logits = random.normal(size=(64, vocabulary)) * 2
        logits = np.round(logits) if ties else logits
        logits[3] = 0.0
        logits[3, ::2] = -0.0  # equal to 0.0
        choices = [(0, 0.931), (17, 1.0), (9, 0.71), (0, 0.537), (vocabulary, 0.0113), (1, 1.0)]
        filters = [
            {"temperature": 0.7, "top_k": top_k, "top_p": top_p, "min_p": min_p}
            for top_k, top_p in choices
            for min_p in (0.0, 0.0123)
        ]
        each = [filters[row % len(filters)] for row in range(64)]
        shares = [
            kept(**wanted, probabilities=softmax(row)) for row, wanted in zip(logits, each, strict=True)
        ]
        left = np.where(np.array(shares) > 0, logits, -np.inf)
        params = [SamplingParams(**wanted) for wanted in each]
        for seed in range(8):
            seeds = range(64 * seed, 64 * seed + 64)
            tokens = draw(logits, params, seeds, rows=64).token
            expected = draw(left, SamplingParams(temperature=0.7), seeds, filtered=False, rows=64).token
            np.testing.assert_array_equal(tokens, expected)

    def test_rows_without_filters_draw_the_same_where_no_row_has_any(self):
        logits = np.round(np.random.default_rng(9).normal(size=(400, VOCABULARY)), 1)
        logits[:50, 3] = -np.inf
        logits[50:100] *= 200
        with_others = [SamplingParams(temperature=1.3), SamplingParams(top_k=2, top_p=0.3)] * 200
        together = draw(logits, with_others).token
        alone = draw(logits, SamplingParams(temperature=1.3), filtered=False).token
        np.testing.assert_array_equal(together[::2], alone[::2])

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

    def test_steps_may_come_from_the_device(self):
        params = row_params([(SamplingParams(), seed, 0) for seed in range(8)], 8)
        logits = jnp.asarray(self.LOGITS, jnp.float32)
        there = sample(logits, params._replace(step=jnp.arange(8, dtype=jnp.int32) + 3), True, False)
        expected = draw(self.LOGITS, SamplingParams(), steps=range(3, 11)).token
        np.testing.assert_array_equal(there.token, expected)

    def test_all_64_bits_of_a_seed_count(self):
        logits, same = np.zeros((4, VOCABULARY)), [7, 7 + 2**32, 7 - 2**63, 7 + 2**64]
        drawn = [draw(logits, SamplingParams(), seeds=same, steps=[step] * 4).token for step in range(8)]
        of_seed = [tuple(tokens) for tokens in np.array(drawn).T]
        assert of_seed[0] == of_seed[3] and len(set(of_seed)) == 3

    def test_padded_rows_are_greedy(self):
        params = row_params([(SamplingParams(temperature=0.5, top_k=-1, top_p=0.9, min_p=0.1), -1, 4)], 3)
        assert params.temperature.tolist() == [0.5, 0.0, 0.0]
        assert params.top_k.tolist() == [0, 0, 0]
        assert params.seed.tolist() == [[2**32 - 1, 2**32 - 1], [0, 0], [0, 0]] and params.step.tolist() == [
            4,
            0,
            0,
        ]

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

    def test_any_token_can_be_scored_as_the_sampled_one_is(self):
        logits = np.random.default_rng(10).normal(size=(30, VOCABULARY)).astype(np.float32)
        tokens = np.arange(30, dtype=np.int32)
        scores = score(jnp.asarray(logits), tokens)
        distribution = np.log(np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True))
        np.testing.assert_allclose(scores.logprob, distribution[tokens, tokens], atol=1e-5)
        ranks = 1 + (logits > logits[tokens, tokens][:, None]).sum(axis=1)
        np.testing.assert_array_equal(scores.rank, ranks)
        np.testing.assert_array_equal(scores.top_tokens, np.argsort(-logits, axis=1)[:, :MAX_LOGPROBS])
