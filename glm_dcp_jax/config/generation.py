"""Sampling defaults that a checkpoint brings along in generation_config.json, as vLLM reads them."""

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.json_file import read_json_object

_log = logging.getLogger(__name__)

_INT32 = 2**31 - 1
_LARGEST = 1e30

SamplingDefaults = dict[str, int | float]
"""SamplingParams fields to use where a request says nothing."""


@dataclass(frozen=True)
class _Rule:
    """Which SamplingParams field a suggestion becomes, and the values that SamplingParams takes there.

    The ranges are repeated here, because SamplingParams would refuse a bad one only at the first request.
    """

    field: str
    kind: type[int] | type[float]
    allowed: str
    in_range: Callable[[float], bool]

    def accepts(self, value: object) -> bool:
        """Whether value is a number of the rule's kind (a whole one is a float too) in its range; NaN never is."""
        kinds = (int,) if self.kind is int else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.in_range(value)


_RULES = {
    "temperature": _Rule(
        "temperature", float, f"a number from 0 to below {_LARGEST:g}", lambda v: 0 <= v < _LARGEST
    ),
    "top_p": _Rule("top_p", float, "a number above 0 and at most 1", lambda v: 0 < v <= 1),
    "top_k": _Rule(
        "top_k", int, f"an integer from -1 to {_INT32} (0 and -1 turn it off)", lambda v: -1 <= v <= _INT32
    ),
    "min_p": _Rule("min_p", float, "a number from 0 to 1", lambda v: 0 <= v <= 1),
    "repetition_penalty": _Rule(
        "repetition_penalty", float, f"a number above 0 and below {_LARGEST:g}", lambda v: 0 < v < _LARGEST
    ),
    "max_new_tokens": _Rule("max_tokens", int, f"an integer from 1 to {_INT32}", lambda v: 1 <= v <= _INT32),
}


def sampling_defaults(directory: Path, choice: str) -> SamplingDefaults:
    """What generation_config.json suggests for absent fields; nothing for choice `vllm` or without that file.

    Raises ConfigError if the file cannot be read, or suggests what SamplingParams would refuse.
    """
    file = directory / "generation_config.json"
    if choice == "vllm" or not file.exists():
        return {}
    given = read_json_object(file)
    found: SamplingDefaults = {}
    for name, rule in _RULES.items():
        value = given.get(name)
        if value is None:
            continue
        if not rule.accepts(value):
            raise ConfigError(
                f"{file}: {name} must be {rule.allowed}, but is {value!r}; correct it, or let "
                "--generation-config vllm ignore the suggestions"
            )
        found[rule.field] = rule.kind(value)
    if found:
        _log.info("Sampling defaults from %s: %s", file.name, found)
    return found
