"""Reading JSON that others wrote: whatever is wrong with it is one kind of error."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

from glm_dcp_jax.config.errors import ConfigError


def parse_json(text: str | bytes) -> Any:
    """The value that `text` holds. Raises ValueError for everything that is wrong, hostile nesting included."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


class RepeatedKey(ValueError):
    """An object names a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {key!r} is there twice")
        self.key = key


def parse_unique_json(text: str) -> Any:
    """As `parse_json`, but an object that names a key twice is wrong, too: one of them would be ignored.

    Raises RepeatedKey, a ValueError, for that.
    """

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            names = Counter(name for name, _ in pairs)
            raise RepeatedKey(names.most_common(1)[0][0])
        return found

    try:
        return json.loads(text, object_pairs_hook=once)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a UTF-8 file. Raises ConfigError that names the file."""
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path} does not exist; a checkpoint directory needs a {path.name}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a directory, but must be a file that holds a JSON object") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{path} must hold a JSON object, but holds a {type(content).__name__}")
    return content
