"""Reading a JSON object's fields by type, with errors that name the field."""

import sys
from collections.abc import Mapping
from typing import Any

from glm_dcp_jax.config.errors import ConfigError

MOST = 2**31 - 1
"""What an int32 holds, as which sizes and positions are computed with."""


class Fields(dict[str, Any]):
    """The non-null fields of a config.json. Every reader raises ConfigError for a field that is missing or wrong."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        super().__init__({key: value for key, value in fields.items() if value is not None})

    def integer(self, name: str, default: int | None = None, least: int = 1, most: int = MOST) -> int:
        """A whole number of at least `least` and at most `most`; without a default it must be there."""
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            wanted = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ConfigError(f"{name} must be {wanted}, but is {value!r}")
        if value > most:
            raise ConfigError(f"{name} {value} is not plausible; at most {most} are allowed")
        return value

    def integers(self, name: str) -> tuple[int, ...]:
        """One whole number of at least 0, or a list of them; empty when absent."""
        value = self.get(name, [])
        many = value if isinstance(value, list) else [value]
        if not all(type(entry) is int and entry >= 0 for entry in many):
            raise ConfigError(f"{name} must be a token id or a list of them, but is {value!r}")
        return tuple(many)

    def number(self, name: str, default: float | None = None) -> float:
        """A finite number above 0."""
        value = self._value(name, default)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not 0 < value <= sys.float_info.max
        ):
            raise ConfigError(f"{name} must be a number above 0, but is {value!r}")
        return float(value)

    def switch(self, name: str, default: bool) -> bool:
        """true or false; the words "true" and "false" are neither."""
        value = self.get(name, default)
        if not isinstance(value, bool):
            raise ConfigError(f"{name} must be true or false, but is {value!r}")
        return value

    def text(self, name: str, default: str) -> str:
        """A string."""
        value = self.get(name, default)
        if not isinstance(value, str):
            raise ConfigError(f"{name} must be a string, but is {value!r}")
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """A JSON object; empty when absent."""
        value = self.get(name, {})
        if not isinstance(value, Mapping):
            raise ConfigError(f"{name} must be an object, but is {value!r}")
        return value

    def words(self, name: str, text_allowed: bool = False) -> list[str] | str | None:
        """A list of strings, or where allowed one string; None when absent."""
        value = self.get(name)
        if value is None or (text_allowed and isinstance(value, str)):
            return value
        if not isinstance(value, list) or not all(isinstance(word, str) for word in value):
            raise ConfigError(f"{name} must be a list of words, but is {value!r}")
        return value

    def _value(self, name: str, default: object) -> Any:
        if default is None and name not in self:
            raise ConfigError(f"config.json lacks {name}")
        return self.get(name, default)
