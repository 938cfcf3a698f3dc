"""Sampling defaults from generation_config.json."""

import json

import pytest

from glm_dcp_jax.config import ConfigError, sampling_defaults


def write(directory, content: str) -> None:
    (directory / "generation_config.json").write_text(content)


def test_the_checkpoints_suggestions_become_defaults(tmp_path):
    write(tmp_path, json.dumps({"temperature": 1, "top_p": 0.95, "top_k": None, "max_new_tokens": 7, "x": 1}))
    assert sampling_defaults(tmp_path, "auto") == {"temperature": 1.0, "top_p": 0.95, "max_tokens": 7}


def test_nothing_without_the_file_or_when_not_wanted(tmp_path):
    assert sampling_defaults(tmp_path, "auto") == {}
    write(tmp_path, json.dumps({"temperature": 0.1}))
    assert sampling_defaults(tmp_path, "vllm") == {}


@pytest.mark.parametrize("content", ["{", "[]", '{"top_p": "high"}', '{"top_k": [1]}'])
def test_an_unreadable_file_is_named_with_the_way_around_it(tmp_path, content):
    write(tmp_path, content)
    with pytest.raises(ConfigError, match="generation_config.json.*--generation-config vllm"):
        sampling_defaults(tmp_path, "auto")


def test_a_repetition_penalty_is_left_out_loudly(tmp_path, caplog):
    write(tmp_path, json.dumps({"repetition_penalty": 1.1, "top_p": 0.9}))
    assert sampling_defaults(tmp_path, "auto") == {"top_p": 0.9}
    assert "repetition_penalty" in caplog.text
