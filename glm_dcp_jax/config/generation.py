"""Sampling defaults that a checkpoint brings along in generation_config.json, as vLLM reads them."""

import json
import logging
from pathlib import Path

from glm_dcp_jax.config.errors import ConfigError

_log = logging.getLogger(__name__)

_INTEGERS = {"top_k": "top_k", "max_new_tokens": "max_tokens"}
_FLOATS = {"temperature": "temperature", "top_p": "top_p", "min_p": "min_p"}

SamplingDefaults = dict[str, int | float]
"""SamplingParams fields to use where a request says nothing."""


def sampling_defaults(directory: Path, choice: str) -> SamplingDefaults:
    """What generation_config.json suggests for absent fields; nothing for choice `vllm` or without that file.

    Raises ConfigError if the file cannot be read, or holds something else than numbers there.
    """
    file = directory / "generation_config.json"
    if choice == "vllm" or not file.exists():
        return {}
    try:
        given = json.loads(file.read_text(encoding="utf-8"))
        found: SamplingDefaults = {
            ours: kind(given[theirs])
            for names, kind in ((_INTEGERS, int), (_FLOATS, float))
            for theirs, ours in names.items()
            if given.get(theirs) is not None
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}; --generation-config vllm ignores it") from None
    if given.get("repetition_penalty", 1) != 1:
        _log.warning("%s asks for a repetition_penalty, which is not supported and left out", file)
    if found:
        _log.info("Sampling defaults from %s: %s", file.name, found)
    return found
