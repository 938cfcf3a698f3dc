"""A call's arguments as JSON, written while its values are still coming."""

import json
from typing import NoReturn

from glm_dcp_jax.serve.parsing.parameters import Parameters, Types, type_name

_BLANKS = " \t\n\r"
_AMBIGUOUS = frozenset({"null", "array", "object"})
"""Types beside string whose values are told from a text by how they are written."""


class ArgumentsWriter:
    """One call's arguments. What its methods return is, one after the other, the text of one JSON object.

    A value whose parameter can only be a string is that text, to the letter, and comes as it is written. Where a
    parameter can be a string and more, null, arrays and objects that parse are what they say, the rest is text. Any
    other value is JSON if it parses, else text. Of a key that comes twice the first value counts.
    """

    def __init__(self, parameters: Parameters) -> None:
        self._parameters = parameters
        self._keys: set[str] = set()
        self._value: _Value | None = None

    def begin(self, key: str) -> None:
        """A value begins. Blanks around a key count if the tool's parameter has them."""
        self._value = None
        key = key if self._parameters.has(key) else key.strip()
        if key not in self._keys:
            start = (", " if self._keys else "{") + json.dumps(key, ensure_ascii=False) + ": "
            self._keys.add(key)
            self._value = _Value(start, self._parameters.types(key))

    def text(self, piece: str) -> str:
        """The value goes on."""
        return "" if self._value is None else self._value.take(piece)

    def end(self) -> str:
        """The value ends, if there is one."""
        value, self._value = self._value, None
        return "" if value is None else value.end()

    def close(self) -> str:
        """The call ends."""
        return self.end() + ("}" if self._keys else "{}")


class _Value:
    """start: what comes before it in the JSON text. types: what it may be."""

    def __init__(self, start: str, types: Types) -> None:
        self._start = start
        self._others = frozenset() if types is None else types & _AMBIGUOUS
        self._may_be_any = types is None or "string" not in types
        self._waits = self._may_be_any
        """Whether only its end will tell what it is."""
        self._held: list[str] | None = []
        """Its text, as long as it may turn out to be other than a string; None from then on."""

    def take(self, piece: str) -> str:
        if self._held is None:
            return _inside_quotes(piece)
        self._held.append(piece)
        if self._waits or self._undecided("".join(self._held).strip(_BLANKS)):
            return ""
        text, self._held = "".join(self._held), None
        return f'{self._start}"{_inside_quotes(text)}'

    def end(self) -> str:
        if self._held is None:
            return '"'
        text = "".join(self._held)
        plain = text.strip(_BLANKS)
        return self._start + (plain if self.reads_json(text) else f'"{_inside_quotes(text)}"')

    def _undecided(self, begun: str) -> bool:
        """begun: the text so far, without blanks around it."""
        if not begun:
            return bool(self._others)
        self._waits = {"[": "array", "{": "object"}.get(begun[0]) in self._others
        return self._waits or ("null" in self._others and "null".startswith(begun))

    def reads_json(self, text: str) -> bool:
        """Whether the whole value means JSON, not itself."""
        if not (self._may_be_any or self._others):
            return False
        try:  # integers may have more digits than Python likes
            kind = type_name(json.loads(text.strip(_BLANKS), parse_constant=_refuse, parse_int=float))
        except (ValueError, RecursionError):
            return False
        return self._may_be_any or kind in self._others


def reads_as_text(word: str, types: Types) -> bool:
    """Whether a value that is written like this is this very text, where the parameter may have these types."""
    return not _Value("", types).reads_json(word)


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(constant: str) -> NoReturn:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(constant)
