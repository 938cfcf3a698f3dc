"""Speculative decoding's settings: vLLM's keys and words, and what is said of everything else."""

from dataclasses import replace

import pytest
from published import GLM_5_2

from glm_dcp_jax.config import ConfigError, ModelConfig, SpeculativeConfig, engine_config

MODEL = ModelConfig.from_hf(GLM_5_2)


def test_it_is_off_by_default():
    assert engine_config("m").speculative is None
    assert engine_config("m", speculative_config=None).speculative is None


@pytest.mark.parametrize(
    "given",
    [
        {"method": "mtp", "num_speculative_tokens": 3},
        '{"method": "mtp", "num_speculative_tokens": 3}',
        {"num_speculative_tokens": 3},
    ],
)
def test_a_dict_or_json_as_in_vllm(given):
    assert engine_config("m", speculative_config=given).speculative == SpeculativeConfig(3, "mtp")


def test_the_name_that_vllm_has_for_this_familys_layers():
    given = {"method": "deepseek_mtp", "num_speculative_tokens": 1}
    assert engine_config("m", speculative_config=given).speculative == SpeculativeConfig(1, "deepseek_mtp")


@pytest.mark.parametrize("count", range(1, 8))
def test_one_to_seven_drafts(count):
    assert SpeculativeConfig(count).num_speculative_tokens == count


@pytest.mark.parametrize("count", [0, 8, -1, 2.0, "3", True, None])
def test_other_numbers_of_drafts(count):
    with pytest.raises(ConfigError) as raised:
        engine_config("m", speculative_config={"num_speculative_tokens": count})
    assert str(raised.value) == (
        f"speculative_config: num_speculative_tokens must be an integer from 1 to 7, but is {count!r}"
    )


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"method": "eagle3", "num_speculative_tokens": 3},
            "method 'eagle3' is unknown; use one of mtp, deepseek_mtp",
        ),
        ({"method": ["mtp"], "num_speculative_tokens": 3}, r"method \['mtp'\] is unknown"),
        ({"method": "mtp"}, "lacks num_speculative_tokens; give an integer from 1 to 7"),
        ({}, "lacks num_speculative_tokens"),
        (
            {"num_speculative_tokens": 3, "model": "m"},
            "no key 'model'; it takes num_speculative_tokens and method",
        ),
        ({"num_speculative_tokens": 3, 1: 2}, "no key 1"),
        ("{", "speculative_config is not valid JSON"),
        ('{"method": "mtp", "method": "mtp"}', "the key 'method' is there twice"),
        ("[3]", r"speculative_config must be a JSON object, but got \[3\]"),
        (3, "speculative_config must be a JSON object, but got 3"),
    ],
)
def test_what_cannot_be_read(given, says):
    with pytest.raises(ConfigError, match=says):
        engine_config("m", speculative_config=given)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_nextn_predict_layers": 0}, "exactly one MTP layer, but .* num_nextn_predict_layers 0"),
        ({"num_nextn_predict_layers": 2}, "exactly one MTP layer, but .* num_nextn_predict_layers 2"),
        ({"sparse": (False,) * 78}, "the model has no layer with experts"),
    ],
)
def test_a_model_that_cannot_draft(changes, says):
    SpeculativeConfig(3).check_model(MODEL)
    with pytest.raises(ConfigError, match=says + ".*; leave --speculative-config out"):
        SpeculativeConfig(3).check_model(replace(MODEL, **changes))
