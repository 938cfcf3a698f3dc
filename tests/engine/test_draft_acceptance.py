"""What the engine builds on sampling: a draft is accepted when it equals the token drawn in the row before it.

With argmax drafts this is Leviathan's rule: accepted with probability p(draft), else drawn from p without the draft.
"""

import numpy as np
import pytest
from drawing import DRAWS, SIGNIFICANCE, assert_drawn_from, draw, kept
from scipy import stats

from glm_dcp_jax.engine.sampling_params import SamplingParams

FILTERS = {"temperature": 0.7, "top_p": 0.9}
FIRST = np.array([0.3, 0.25, 0.2, 0.15, 0.06, 0.04])
SECOND = np.random.default_rng(11).dirichlet(np.ones(6) * 2, size=6)
"""Distributions behind each first token."""
TARGET = kept(**FILTERS, probabilities=FIRST)
DRAFTS = range(5)


@pytest.fixture(scope="module")
def drawn() -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """DRAWS requests with seeds 0, 1, ...: drafts, tokens of the last known row, tokens of the draft's row."""
    drafts = np.random.default_rng(12).choice(DRAFTS, size=DRAWS, p=[0.5, 0.1, 0.2, 0.1, 0.1])
    params = SamplingParams(**FILTERS)
    first = draw(np.tile(np.log(FIRST), (DRAWS, 1)), params).token
    second = draw(np.log(SECOND)[drafts], params, steps=[1] * DRAWS).token
    return drafts, first, second


def test_the_first_token_does_not_depend_on_the_draft(drawn):
    drafts, first, _ = drawn
    assert_drawn_from(first, TARGET)
    for draft in DRAFTS:
        assert_drawn_from(first[drafts == draft], TARGET)


def test_a_draft_is_accepted_as_often_as_it_is_likely_and_never_if_filters_exclude_it(drawn):
    drafts, first, _ = drawn
    assert TARGET[4] == 0
    for draft in DRAFTS:
        accepted = first[drafts == draft] == draft
        test = stats.binomtest(int(accepted.sum()), len(accepted), float(TARGET[draft]))
        assert test.pvalue > SIGNIFICANCE


def test_a_rejected_draft_is_replaced_by_one_of_the_others_in_their_proportion(drawn):
    drafts, first, _ = drawn
    for draft in DRAFTS:
        replaced = first[(drafts == draft) & (first != draft)]
        rest = np.where(np.arange(6) == draft, 0, TARGET)
        assert_drawn_from(replaced, rest / rest.sum())


def test_behind_an_accepted_draft_the_next_token_follows_its_own_distribution(drawn):
    drafts, first, second = drawn
    for draft in np.flatnonzero(TARGET):
        after = second[(drafts == draft) & (first == draft)]
        assert len(after) > 200
        assert_drawn_from(after, kept(**FILTERS, probabilities=SECOND[draft]))
