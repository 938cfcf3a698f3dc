"""What a request asks of sampling: vLLM's names, defaults and ranges, checked once when built."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Integral, Real

MAX_N = 128
MAX_LOGPROBS = 20
_INT32 = 2**31 - 1
_INT64 = 2**63 - 1
_LARGEST = 1e30
"""Above any sensible number, well inside float32."""
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
    logprobs: how many alternatives to report per token besides the sampled one; None reports nothing.
    detokenize: False leaves the text empty, and then `stop` cannot work.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    max_tokens: int | None = 16
    stop: tuple[str, ...] | list[str] | str | None = None
    stop_token_ids: tuple[int, ...] | list[int] | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    detokenize: bool = True

    def __post_init__(self) -> None:
        _integer("n", self.n, 1, MAX_N)
        _number("temperature", self.temperature, "a number of at least 0", lambda value: value >= 0)
        _number("top_p", self.top_p, "above 0 and at most 1", lambda value: 0 < value <= 1)
        _integer("top_k", self.top_k, -1, _INT32, " (0 and -1 turn it off)")
        _number("min_p", self.min_p, "from 0 to 1", lambda value: 0 <= value <= 1)
        if self.seed is not None:
            _integer("seed", self.seed, -_INT64 - 1, _INT64)
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1, _INT32)
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        for field in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, field), bool):
                raise ParameterError(field, f"{field} must be True or False, but is {getattr(self, field)!r}")
        self._make_plain()
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_tokens(self.stop_token_ids))
        if self.stop and not self.detokenize:
            raise ParameterError("stop", "stop strings need text: leave detokenize on, or use stop_token_ids")

    def _make_plain(self) -> None:
        """numpy's numbers become python's, which alone can be sent as JSON."""
        for field in ("n", "top_k", "seed", "max_tokens", "logprobs"):
            if getattr(self, field) is not None:
                object.__setattr__(self, field, int(getattr(self, field)))
        for field in ("temperature", "top_p", "min_p"):
            object.__setattr__(self, field, float(getattr(self, field)))

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < _GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, whichever way it was given."""
        return _stop_strings(self.stop)


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


def _stop_strings(stop: object) -> tuple[str, ...]:
    if stop is not None and not isinstance(stop, (str, list, tuple)):
        raise ParameterError("stop", f"stop must be a string or a list of strings, but is {stop!r}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise ParameterError("stop", f"stop must be non-empty strings, but holds {string!r}")
    return strings


def _stop_tokens(ids: object) -> tuple[int, ...]:
    if ids is not None and not isinstance(ids, (list, tuple)):
        raise ParameterError("stop_token_ids", f"stop_token_ids must be a list of token ids, but is {ids!r}")
    for token in ids or ():
        _integer("stop_token_ids", token, 0, _INT32)
    return tuple(int(token) for token in ids or ())
