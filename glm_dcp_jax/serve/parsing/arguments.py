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
        """A value begins."""
        self._value = None
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
    def __init__(self, start: str, types: Types) -> None:
        self._start = start
        self._types = types
        self._held: str | None = ""
        """The text, as long as it may turn out to be other than a string; None from then on."""

    def take(self, piece: str) -> str:
        if self._held is None:
            return _inside_quotes(piece)
        self._held += piece
        if self._undecided(self._held):
            return ""
        text, self._held = self._held, None
        return f'{self._start}"{_inside_quotes(text)}'

    def end(self) -> str:
        if self._held is None:
            return '"'
        plain = self._held.strip(_BLANKS)
        return self._start + (plain if self._is_json(plain) else f'"{_inside_quotes(self._held)}"')

    def _undecided(self, text: str) -> bool:
        if self._types is None or "string" not in self._types:
            return True
        start = text.strip(_BLANKS)
        if not start:
            return not _AMBIGUOUS.isdisjoint(self._types)
        return (
            (start[0] == "[" and "array" in self._types)
            or (start[0] == "{" and "object" in self._types)
            or ("null" in self._types and "null".startswith(start))
        )

    def _is_json(self, text: str) -> bool:
        try:
            kind = type_name(json.loads(text, parse_constant=_refuse))
        except (ValueError, RecursionError):
            return False
        if self._types is None or "string" not in self._types:
            return True
        return kind in self._types & _AMBIGUOUS


def _inside_quotes(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def _refuse(constant: str) -> NoReturn:
    """Python reads NaN and Infinity, which JSON does not have."""
    raise ValueError(constant)
