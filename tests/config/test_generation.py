"""Sampling defaults from generation_config.json."""

import json

import pytest

from glm_dcp_jax.config import ConfigError, sampling_defaults
from glm_dcp_jax.engine.sampling_params import SamplingParams


def write(directory, content: str) -> None:
    (directory / "generation_config.json").write_text(content)


def test_the_checkpoints_suggestions_become_defaults(tmp_path):
    write(tmp_path, json.dumps({"temperature": 1, "top_p": 0.95, "top_k": None, "max_new_tokens": 7, "x": 1}))
    assert sampling_defaults(tmp_path, "auto") == {"temperature": 1.0, "top_p": 0.95, "max_tokens": 7}


def test_nothing_without_the_file_or_when_not_wanted(tmp_path):
    assert sampling_defaults(tmp_path, "auto") == {}
    write(tmp_path, json.dumps({"temperature": 0.1}))
    assert sampling_defaults(tmp_path, "vllm") == {}


@pytest.mark.parametrize("content", ["{", "[]", pytest.param("[" * 100_000, id="deep")])
def test_an_unreadable_file_is_named(tmp_path, content):
    write(tmp_path, content)
    with pytest.raises(ConfigError, match="generation_config.json .*JSON"):
        sampling_defaults(tmp_path, "auto")


@pytest.mark.parametrize(
    ("field", "values", "allowed"),
    [
        ("temperature", "-1 NaN Infinity -Infinity 1e999 true [1]", "a number from 0 to below 1e+30"),
        ("top_p", '0 1.01 -0.5 NaN Infinity true "high" "0.9"', "a number above 0 and at most 1"),
        ("top_k", "-7 1.5 2147483648 1e999 NaN true [1]", "an integer from -1 to 2147483647"),
        ("min_p", "-0.1 1.1 NaN true", "a number from 0 to 1"),
        ("max_new_tokens", "0 1.5 -1 1e999 2147483648 true", "an integer from 1 to 2147483647"),
    ],
)
def test_what_sampling_params_would_refuse_is_refused_at_start(tmp_path, field, values, allowed):
    for value in values.split():
        write(tmp_path, f'{{"{field}": {value}}}')
        with pytest.raises(ConfigError) as raised:
            sampling_defaults(tmp_path, "auto")
        start = f"{tmp_path / 'generation_config.json'}: {field} must be {allowed}"
        assert str(raised.value).startswith(start), value
        assert f"but is {json.loads(value)!r}; " in str(raised.value)
        assert "--generation-config vllm" in str(raised.value)
        assert sampling_defaults(tmp_path, "vllm") == {}
        with pytest.raises(ValueError):
            SamplingParams(**{field.replace("max_new", "max"): json.loads(value)})


def test_the_ends_of_the_ranges_are_allowed(tmp_path):
    for ends in (
        {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "max_new_tokens": 1},
        {"temperature": 9e29, "top_p": 1e-9, "top_k": 2**31 - 1, "min_p": 1.0, "max_new_tokens": 2**31 - 1},
    ):
        write(tmp_path, json.dumps(ends))
        found = sampling_defaults(tmp_path, "auto")
        SamplingParams(**found)  # takes them too
        assert [*found.values()] == [*ends.values()] and type(found["temperature"]) is float


def test_a_repetition_penalty_is_taken(tmp_path):
    write(tmp_path, json.dumps({"repetition_penalty": 1.1, "top_p": 0.9}))
    assert sampling_defaults(tmp_path, "auto") == {"repetition_penalty": 1.1, "top_p": 0.9}


@pytest.mark.parametrize("value", [0, -1, "high", True])
def test_a_repetition_penalty_that_cannot_be_is_refused(tmp_path, value):
    write(tmp_path, json.dumps({"repetition_penalty": value}))
    with pytest.raises(ConfigError, match="repetition_penalty must be a number above 0"):
        sampling_defaults(tmp_path, "auto")
