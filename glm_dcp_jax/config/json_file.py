"""Reading JSON that others wrote: whatever is wrong with it is one kind of error."""

import json
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from glm_dcp_jax.config.errors import ConfigError


class RepeatedKey(ValueError):
    """An object names a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is there twice")
        self.key = key


def parse_json(text: str | bytes) -> Any:
    """The value that `text` holds. Raises ValueError for everything that is wrong, hostile nesting included."""
    return _parsed(text, None)


def parse_unique_json(text: str | bytes) -> Any:
    """As `parse_json`, but an object that names a key twice is wrong, too: one of them would be ignored.

    Raises RepeatedKey, a ValueError, for that.
    """
    return _parsed(text, _once)


def _parsed(text: str | bytes, object_of: Callable[[list[tuple[str, Any]]], dict[str, Any]] | None) -> Any:
    try:
        return json.loads(text, object_pairs_hook=object_of)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
    except ValueError as error:
        if type(error) is not ValueError:  # it says itself what is wrong
            raise
        raise ValueError(f"an integer has more than {sys.get_int_max_str_digits()} digits") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        twice = next(name for name, count in counts.items() if count > 1)
        raise RepeatedKey(twice)
    return found


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a UTF-8 file, no key of which is there twice. Raises ConfigError that names the file."""
    try:
        content = parse_unique_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a checkpoint directory needs a {path.name}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, but must be a file that holds a JSON object") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content
