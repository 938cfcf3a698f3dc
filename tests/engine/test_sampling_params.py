"""SamplingParams has vLLM's names and defaults, and refuses what cannot work by field and range."""

import math

import numpy as np
import pytest

from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams


def test_defaults_are_vllms():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.top_k, params.min_p) == (1, 1.0, 1.0, 0, 0.0)
    assert (params.max_tokens, params.seed, params.logprobs, params.ignore_eos) == (16, None, None, False)
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
        ("stop", "", "non-empty"),
        ("stop", ["a", ""], "non-empty"),
        ("stop", 5, "a string or a list of strings"),
        ("stop_token_ids", [-1], "from 0"),
        ("stop_token_ids", 7, "a list of token ids"),
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
