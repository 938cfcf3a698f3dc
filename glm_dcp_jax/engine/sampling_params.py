"""What a request asks of sampling: vLLM's names, defaults and ranges, checked once when built."""

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

from glm_dcp_jax.engine.structured_outputs import StructuredOutputs

MAX_N = 128
MAX_LOGPROBS = 20
MAX_PENALTY = 2
MAX_BIAS = 100
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_DIGITS = re.compile("[0-9]{1,10}")
_LARGEST, _SMALLEST = 1e30, 1e-30
"""Above and below any sensible number, well inside float32."""
_INTEGERS = ("n", "top_k", "seed", "max_tokens", "min_tokens", "logprobs", "prompt_logprobs")
_FLOATS = ("presence_penalty", "frequency_penalty", "repetition_penalty", "temperature", "top_p", "min_p")
_GREEDY_BELOW = 1e-5
"""Temperatures below this count as 0: dividing float32 logits by them would overflow."""


class ParameterError(ValueError):
    """A sampling parameter out of its range. `field` is its name; the message says what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class SamplingParams:
    """How to continue one prompt. Raises ParameterError (a ValueError) for a value that cannot work.

    n: outputs per prompt. temperature: 0 is greedy. top_k: 0 or -1 is off. seed: None takes the engine's.
    max_tokens: None is as far as the model's length goes. stop: one or several strings that end the text.
    min_tokens: no end-of-sequence or stop token before so many. logprobs: how many alternatives to report per token
    besides the sampled one; None reports nothing. prompt_logprobs: the same of each prompt token but the first.
    detokenize: False leaves the text empty, and then `stop` cannot work. marked_token_ids: tokens that add nothing to
    the text; the output's marks say where they stood. Stop strings see them as any other token.

    presence_penalty, frequency_penalty: taken from the logit of a token that the output holds, once and for each time.
    repetition_penalty: divides a positive logit of a token that prompt or output holds, and multiplies a negative one;
    1 is off. logit_bias: token id (or its digits) to what is added to its logit. bad_words: texts that must not come.
    allowed_token_ids: the only tokens to sample. structured_outputs: the only outputs that are allowed. extra_args:
    {"kv_transfer_params": {...}} or nothing, see docs/disaggregation.md.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    stop: tuple[str, ...] | list[str] | str | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    bad_words: tuple[str, ...] | list[str] | None = None
    logit_bias: Mapping[int, float] | Mapping[str, float] | None = field(default=None, hash=False)
    allowed_token_ids: tuple[int, ...] | list[int] | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True
    marked_token_ids: tuple[int, ...] | list[int] | None = None
    extra_args: Mapping[str, Any] | None = field(default=None, hash=False)
    structured_outputs: StructuredOutputs | None = None

    def __post_init__(self) -> None:
        self._check_numbers()
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise ParameterError(name, f"{name} must be True or False, but is {getattr(self, name)!r}")
        self._make_plain()
        self._set("stop", _strings("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._set("stop_token_ids", _tokens("stop_token_ids", self.stop_token_ids))
        self._set("marked_token_ids", _tokens("marked_token_ids", self.marked_token_ids))
        self._set("bad_words", _strings("bad_words", self.bad_words))
        if self.allowed_token_ids is not None:
            self._set("allowed_token_ids", _tokens("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            self._set("logit_bias", _biases(self.logit_bias))
        if self.extra_args is not None:
            _check_extra(self.extra_args)
        self._check_together()

    def _check_numbers(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        for name in ("presence_penalty", "frequency_penalty"):
            _range(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY)
        allowed = f"a number above 0, from {_SMALLEST:g}"
        _number("repetition_penalty", self.repetition_penalty, allowed, lambda value: value >= _SMALLEST)
        _number("temperature", self.temperature, "a number of at least 0", lambda value: value >= 0)
        _number("top_p", self.top_p, "above 0 and at most 1", lambda value: 0 < value <= 1)
        _integer("top_k", self.top_k, -1, _INT32, " (0 and -1 turn it off)")
        _range("min_p", self.min_p, 0, 1)
        _integer("min_tokens", self.min_tokens, 0, _INT32)
        limits = {
            "seed": (-_INT64 - 1, _INT64),
            "max_tokens": (1, _INT32),
            "logprobs": (0, MAX_LOGPROBS),
            "prompt_logprobs": (0, MAX_LOGPROBS),
        }
        for name, (least, most) in limits.items():
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), least, most)

    def _check_together(self) -> None:
        if self.stop and not self.detokenize:
            raise ParameterError("stop", "stop strings need text: leave detokenize on, or use stop_token_ids")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError(
                "min_tokens",
                f"min_tokens must be at most max_tokens, which is {self.max_tokens}, but is {self.min_tokens}",
            )
        if self.allowed_token_ids == ():
            raise ParameterError(
                "allowed_token_ids",
                "allowed_token_ids must hold at least one token id; leave it out to allow all",
            )
        if self.structured_outputs is not None:
            self._check_structured(self.structured_outputs)

    def _check_structured(self, wanted: object) -> None:
        if not isinstance(wanted, StructuredOutputs):
            raise ParameterError(
                "structured_outputs", f"structured_outputs must be StructuredOutputs, but is {wanted!r}"
            )
        for name in ("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids"):
            if getattr(self, name):
                raise ParameterError(
                    name,
                    f"{name} cannot be combined with structured outputs: these say which tokens may come, and when an "
                    "output may end",
                )

    def _make_plain(self) -> None:
        """numpy's numbers become python's, which alone can be sent as JSON."""
        for name in _INTEGERS:
            if getattr(self, name) is not None:
                self._set(name, int(getattr(self, name)))
        for name in _FLOATS:
            self._set(name, float(getattr(self, name)))

    def _set(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _GREEDY_BELOW

    @property
    def filtered(self) -> bool:
        """Whether top_k, top_p or min_p may leave tokens out of a random draw."""
        return not self.greedy and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def counts_tokens(self) -> bool:
        """Whether a logit depends on which tokens came before: one of the three penalties is on."""
        return bool(self.presence_penalty or self.frequency_penalty or self.repetition_penalty != 1)

    @property
    def needs_history(self) -> bool:
        """Whether a row can only be sampled when the host knows all tokens before it."""
        is_bound = self.structured_outputs is not None
        return self.counts_tokens or bool(self.bad_words) or self.min_tokens > 0 or is_bound

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before sampling at all."""
        return self.needs_history or bool(self.logit_bias) or self.allowed_token_ids is not None

    @property
    def kv_transfer_params(self) -> Mapping[str, Any] | None:
        """Where the prompt's cache is, or whether to keep it for another engine."""
        return (self.extra_args or {}).get("kv_transfer_params")

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return tuple(self.stop or ())


def _tokens_of(wanted: StructuredOutputs | None) -> tuple[int, ...]:
    return () if wanted is None or wanted.after_token is None else (wanted.after_token,)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raise ParameterError for a token id that the model does not have, wherever it is named."""
    named: dict[str, Collection[int]] = {
        "stop_token_ids": params.stop_token_ids or (),
        "allowed_token_ids": params.allowed_token_ids or (),
        "logit_bias": [int(token) for token in params.logit_bias or ()],
        "structured_outputs": _tokens_of(params.structured_outputs),
    }
    for name, tokens in named.items():
        wrong = next((token for token in tokens if token >= vocab_size), None)
        if wrong is not None:
            raise ParameterError(
                name, f"{name} names token id {wrong}, which is not in the vocabulary (0 to {vocab_size - 1})"
            )


def _check_extra(given: object) -> None:
    name = "kv_transfer_params"
    if not isinstance(given, Mapping) or set(given) - {name}:
        raise ParameterError("extra_args", f"extra_args takes {name} alone, but is {given!r:.200}")
    if not isinstance(given.get(name) or {}, Mapping):
        raise ParameterError(name, f"{name} must be an object, but is {given[name]!r:.200}")


def _integer(field: str, value: object, least: int, most: int, note: str = "") -> None:
    integer = None if isinstance(value, bool) or not isinstance(value, Integral) else int(value)
    if integer is None or not least <= integer <= most:
        raise ParameterError(
            field, f"{field} must be an integer from {least} to {most}{note}, but is {value!r}"
        )


def _number(field: str, value: object, allowed: str, in_range: Callable[[float], bool]) -> None:
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, Real) else float(value)
    except OverflowError:  # an integer beyond any float
        number = math.inf
    if not abs(number) < _LARGEST or not in_range(number):
        raise ParameterError(field, f"{field} must be {allowed}, but is {value!r}")


def _range(field: str, value: object, least: float, most: float) -> None:
    _number(field, value, f"a number from {least:g} to {most:g}", lambda number: least <= number <= most)


def _strings(field: str, strings: object) -> tuple[str, ...]:
    if strings is not None and not isinstance(strings, (list, tuple)):
        one = "a string or " if field == "stop" else ""
        raise ParameterError(field, f"{field} must be {one}a list of strings, but is {strings!r}")
    for string in strings or ():
        if not isinstance(string, str) or not string:
            raise ParameterError(field, f"{field} must be non-empty strings, but holds {string!r}")
        if any("\ud800" <= character <= "\udfff" for character in string):
            raise ParameterError(
                field, f"{field} must be Unicode text, but holds {string!r}: half a character"
            )
    return tuple(strings or ())


def _tokens(field: str, ids: object) -> tuple[int, ...]:
    if ids is not None and not isinstance(ids, (list, tuple)):
        raise ParameterError(field, f"{field} must be a list of token ids, but is {ids!r}")
    for token in ids or ():
        _integer(field, token, 0, _INT32)
    return tuple(int(token) for token in ids or ())


def _biases(biases: object) -> dict[int, float]:
    """{token id: bias}. JSON's keys are strings, so digits are token ids too."""
    if not isinstance(biases, Mapping):
        raise ParameterError("logit_bias", f"logit_bias must map token ids to numbers, but is {biases!r}")
    found: dict[int, float] = {}
    for key, bias in biases.items():
        token = int(key) if isinstance(key, str) and _DIGITS.fullmatch(key) else key
        _integer("logit_bias", token, 0, _INT32, " for each token id")
        _range("logit_bias", bias, -MAX_BIAS, MAX_BIAS)
        found[int(token)] = float(bias)
    return found
