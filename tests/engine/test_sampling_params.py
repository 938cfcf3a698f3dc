"""SamplingParams has vLLM's names and defaults, and refuses what cannot work by field and range."""

import math

import numpy as np
import pytest

from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams, check_vocabulary


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.seed, params.logprobs, params.ignore_eos) == (16, None, None, False)
    penalties = (params.presence_penalty, params.frequency_penalty, params.repetition_penalty)
    assert penalties == (0.0, 0.0, 1.0) and params.min_tokens == 0
    assert (params.logit_bias, params.allowed_token_ids, params.prompt_logprobs) == (None, None, None)
    assert params.skip_special_tokens and params.detokenize and not params.include_stop_str_in_output


@pytest.mark.parametrize(
    ("field", "value", "allowed"),
    [
        ("n", 0, "from 1 to 128"),
        ("n", 10**9, "from 1 to 128"),
        ("n", True, "integer"),
        ("temperature", -0.1, "at least 0"),
        ("temperature", math.nan, "at least 0"),
        ("temperature", math.inf, "at least 0"),
        ("temperature", 10**400, "at least 0"),
        ("temperature", "hot", "at least 0"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.5, "above 0 and at most 1"),
        ("top_k", -2, "0 and -1 turn it off"),
        ("top_k", 2**31, "from -1"),
        ("min_p", -0.5, "from 0 to 1"),
        ("seed", 2**64, "integer"),
        ("seed", 1.5, "integer"),
        ("max_tokens", 0, "from 1"),
        ("logprobs", 21, "from 0 to 20"),
        ("logprobs", -1, "from 0 to 20"),
        ("temperature", True, "at least 0"),
        ("presence_penalty", 2.01, "a number from -2 to 2"),
        ("presence_penalty", None, "a number from -2 to 2"),
        ("presence_penalty", "1", "a number from -2 to 2"),
        ("frequency_penalty", -2.01, "a number from -2 to 2"),
        ("frequency_penalty", math.nan, "a number from -2 to 2"),
        ("repetition_penalty", 0, "above 0"),
        ("repetition_penalty", -1.0, "above 0"),
        ("repetition_penalty", 1e-40, "above 0"),
        ("repetition_penalty", None, "above 0"),
        ("repetition_penalty", math.inf, "above 0"),
        ("logit_bias", [5], "map token ids to numbers"),
        ("logit_bias", {"x": 1}, "integer from 0"),
        ("logit_bias", {"-1": 1}, "integer from 0"),
        ("logit_bias", {1.0: 1}, "integer from 0"),
        ("logit_bias", {True: 1}, "integer from 0"),
        ("logit_bias", {"9" * 5000: 1}, "integer from 0"),
        ("logit_bias", {5: 100.5}, "a number from -100 to 100"),
        ("logit_bias", {5: None}, "a number from -100 to 100"),
        ("min_tokens", -1, "from 0"),
        ("min_tokens", None, "from 0"),
        ("min_tokens", 17, "at most max_tokens, which is 16"),
        ("bad_words", "word", "a list of strings"),
        ("bad_words", ["a", ""], "non-empty"),
        ("bad_words", [5], "non-empty strings"),
        ("allowed_token_ids", [], "at least one"),
        ("allowed_token_ids", 5, "a list of token ids"),
        ("allowed_token_ids", [-1], "from 0"),
        ("allowed_token_ids", ["5"], "integer"),
        ("prompt_logprobs", 21, "from 0 to 20"),
        ("prompt_logprobs", True, "integer"),
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", "a\ud83d", "must be Unicode text"),
        ("bad_words", ["\udc00"], "must be Unicode text"),
        ("stop", 5, "a string or a list of strings"),
        ("stop_token_ids", [-1], "from 0"),
        ("stop_token_ids", 7, "a list of token ids"),
        ("marked_token_ids", ["a"], "from 0"),
    ],
)
def test_values_out_of_range_are_named_with_what_is_allowed(field, value, allowed):
    with pytest.raises(ParameterError, match=field) as raised:
        SamplingParams(**{field: value})
    assert raised.value.field == field
    assert allowed in str(raised.value)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("value", [0, -1, 1, 2**31 - 1])
def test_top_k_is_off_at_zero_and_minus_one_and_else_a_count(value):
    assert SamplingParams(top_k=value).top_k == value


def test_stop_is_one_string_or_several():
    assert SamplingParams(stop="end").stop_strings == ("end",)
    assert SamplingParams(stop=["a", "b"]).stop_strings == ("a", "b")
    assert SamplingParams().stop_strings == ()


def test_stop_strings_need_text():
    with pytest.raises(ParameterError, match="detokenize"):
        SamplingParams(stop="end", detokenize=False)


def test_a_vanishing_temperature_is_greedy():
    assert SamplingParams(temperature=0).greedy
    assert SamplingParams(temperature=1e-300).greedy  # float32 would make it a division by zero
    assert not SamplingParams(temperature=0.01).greedy


@pytest.mark.parametrize(
    "field", ["ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"]
)
def test_switches_are_true_or_false(field):
    for value in ("no", 0, None):
        with pytest.raises(ParameterError, match=f"{field} must be True or False") as caught:
            SamplingParams(**{field: value})
        assert caught.value.field == field


def test_numpys_numbers_become_pythons():
    params = SamplingParams(
        seed=np.int64(7),
        max_tokens=np.int32(3),
        temperature=np.float32(0.5),
        top_p=np.float64(0.5),
        min_p=np.int8(0),
        stop_token_ids=[np.int32(5)],
    )
    assert (params.seed, params.max_tokens, params.temperature, params.stop_token_ids) == (7, 3, 0.5, (5,))
    assert type(params.seed) is int and type(params.temperature) is float
    assert type(params.stop_token_ids[0]) is int
    with pytest.raises(ParameterError, match="temperature"):
        SamplingParams(temperature=np.float32("nan"))
    with pytest.raises(ParameterError, match="seed"):
        SamplingParams(seed=np.float32(1))
    made = SamplingParams(logit_bias={np.int64(5): np.float32(1.5)}, allowed_token_ids=[np.int32(5)])
    assert (made.logit_bias, made.allowed_token_ids) == ({5: 1.5}, (5,))
    assert [type(value) for item in made.logit_bias.items() for value in item] == [int, float]


def test_logit_bias_takes_jsons_keys():
    assert SamplingParams(logit_bias={"17": -100, 3: 0.5}).logit_bias == {17: -100.0, 3: 0.5}


def test_as_many_tokens_as_wanted_where_there_is_no_max_tokens():
    assert SamplingParams(min_tokens=10**6, max_tokens=None).min_tokens == 10**6


def test_parameters_can_be_dictionary_keys():
    made = [SamplingParams(logit_bias={5: bias}, stop=["a"], bad_words=["b"]) for bias in (1, 1.0, 2)]
    assert len(set(made)) == 2


@pytest.mark.parametrize(
    ("wanted", "changes", "history", "filters"),
    [
        ({}, False, False, False),
        ({"temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1}, False, False, False),
        ({"top_p": 0.5}, False, False, True),
        ({"top_k": 3}, False, False, True),
        ({"top_k": -1}, False, False, False),
        ({"min_p": 0.1}, False, False, True),
        ({"logit_bias": {}}, False, False, False),
        ({"logit_bias": {5: 1}}, True, False, False),
        ({"allowed_token_ids": [5]}, True, False, False),
        ({"bad_words": ["a"]}, True, True, False),
        ({"min_tokens": 1}, True, True, False),
        ({"presence_penalty": 0.1}, True, True, False),
        ({"frequency_penalty": -0.1}, True, True, False),
        ({"repetition_penalty": 0.9}, True, True, False),
    ],
    ids=str,
)
def test_what_sampling_must_do_for_them(wanted, changes, history, filters):
    params = SamplingParams(**wanted)
    assert (params.changes_logits, params.needs_history, params.filtered) == (changes, history, filters)


@pytest.mark.parametrize("field", ["stop_token_ids", "allowed_token_ids", "logit_bias"])
def test_tokens_must_be_in_the_vocabulary_where_that_is_known(field):
    wrap = (lambda token: {token: 1.0}) if field == "logit_bias" else (lambda token: [0, token])
    check_vocabulary(SamplingParams(**{field: wrap(99)}), 100)
    with pytest.raises(ParameterError, match=f"{field} names token id 100, .*0 to 99") as raised:
        check_vocabulary(SamplingParams(**{field: wrap(100)}), 100)
    assert raised.value.field == field
