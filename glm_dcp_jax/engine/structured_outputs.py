"""What a request may ask its output to look like: vLLM's `StructuredOutputsParams`, checked when built."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

KINDS = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
"""Exactly one of them says what the output looks like."""
MAX_BYTES = 1 << 20
"""Of what says it, as JSON."""
MAX_CHOICES = 10_000
_MAX_BLANKS = 1000


class StructuredOutputsError(ValueError):
    """What cannot be asked for. `field` is the kind's name; the message says what is allowed."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class StructuredOutputs:
    """The only outputs that are allowed. Raises StructuredOutputsError, a ValueError, for what cannot work.

    json: a JSON schema, as an object or as text. json_object: True for any JSON object. regex: of the whole output.
    choice: one of these texts. grammar: in llguidance's variant of Lark. structural_tag: free text with tagged parts,
    {"structures": [{"begin", "schema", "end"}], "triggers": [...]}, as an object or as text.

    disable_any_whitespace: JSON without blanks and line ends between its parts. whitespace_pattern: a regex for what
    may be there. after_token: the output is free up to and with this token, as reasoning is up to `</think>`, and may
    not end before; None: all of it is bound.
    """

    json: Mapping[str, Any] | str | None = field(default=None, hash=False)
    json_object: bool = False
    regex: str | None = None
    choice: tuple[str, ...] | list[str] | None = None
    grammar: str | None = None
    structural_tag: Mapping[str, Any] | str | None = field(default=None, hash=False)
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None
    after_token: int | None = None

    def __post_init__(self) -> None:
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool):
                raise _wrong(name, "True or False", getattr(self, name))
        given = [name for name in KINDS if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            found = " and ".join(given) if given else "none"
            raise StructuredOutputsError(
                given[-1] if given else "json",
                f"structured outputs need exactly one of {', '.join(KINDS)}, but there is {found}",
            )
        for name in ("json", "structural_tag"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _object(name, getattr(self, name)))
        for name in ("regex", "grammar", "whitespace_pattern"):
            _check_text(name, getattr(self, name))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(self.choice))
        self._check_whitespace()
        if isinstance(self.structural_tag, dict):
            _check_tags(self.structural_tag)

    @property
    def kind(self) -> str:
        """The one of KINDS that it is."""
        return next(name for name in KINDS if getattr(self, name) not in (None, False))

    @property
    def key(self) -> str:
        """The same for what allows the same outputs; `after_token` does not count."""
        whitespace = (self.disable_any_whitespace, self.whitespace_pattern)
        return json.dumps([self.kind, getattr(self, self.kind), *whitespace])

    def _check_whitespace(self) -> None:
        for name in ("disable_any_whitespace", "whitespace_pattern"):
            if getattr(self, name) and self.kind not in ("json", "json_object", "structural_tag"):
                raise StructuredOutputsError(name, f"{name} is for JSON, not for {self.kind}")
        if self.disable_any_whitespace and self.whitespace_pattern is not None:
            raise StructuredOutputsError(
                "whitespace_pattern", "whitespace_pattern cannot be given with disable_any_whitespace"
            )
        if self.whitespace_pattern is not None and len(self.whitespace_pattern) > _MAX_BLANKS:
            raise StructuredOutputsError(
                "whitespace_pattern", f"whitespace_pattern must have at most {_MAX_BLANKS} characters"
            )


def _wrong(name: str, allowed: str, value: object) -> StructuredOutputsError:
    shown = repr(value)
    shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
    return StructuredOutputsError(name, f"{name} must be {allowed}, but is {shown}")


def _object(name: str, value: object) -> dict[str, Any]:
    """A copy of a JSON object that was given as such or as text."""
    try:
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        found = json.loads(text)
        size = len(text.encode())
    except (ValueError, TypeError, RecursionError) as error:
        raise StructuredOutputsError(name, f"{name} must be a JSON object: {error}") from None
    if not isinstance(found, dict):
        raise _wrong(name, "a JSON object", value)
    if size > MAX_BYTES:
        raise StructuredOutputsError(name, f"{name} must have at most {MAX_BYTES} bytes, but has {size}")
    return found


def _check_text(name: str, text: object) -> None:
    if text is None:
        return
    if not isinstance(text, str) or not text or _half_character(text):
        raise _wrong(name, "a text that is not empty", text)
    if len(text.encode()) > MAX_BYTES:
        raise StructuredOutputsError(name, f"{name} must have at most {MAX_BYTES} bytes")


def _choices(values: object) -> tuple[str, ...]:
    if not isinstance(values, (list, tuple)) or not 1 <= len(values) <= MAX_CHOICES:
        raise _wrong("choice", f"a list of 1 to {MAX_CHOICES} texts", values)
    for value in values:
        if not isinstance(value, str) or not value or _half_character(value):
            raise _wrong("choice", "texts that are not empty", value)
    if sum(map(len, values)) > MAX_BYTES:
        raise StructuredOutputsError("choice", f"choice must have at most {MAX_BYTES} characters in all")
    return tuple(dict.fromkeys(values))


def _check_tags(tag: Mapping[str, Any]) -> None:
    structures, triggers = tag.get("structures"), tag.get("triggers")
    if not isinstance(structures, list) or not structures or not isinstance(triggers, list) or not triggers:
        raise StructuredOutputsError(
            "structural_tag",
            "structural_tag must hold lists that are not empty: structures, of objects with begin, schema and end, and "
            "triggers, of texts",
        )
    if not all(isinstance(trigger, str) and trigger for trigger in triggers):
        raise _wrong("structural_tag", "one whose triggers are texts", triggers)
    for each in structures:
        if not isinstance(each, dict) or not isinstance(each.get("schema"), dict):
            raise _wrong("structural_tag", "one whose structures have a schema, an object", each)
        begin, end = each.get("begin"), each.get("end")
        if not isinstance(begin, str) or not isinstance(end, str):
            raise _wrong("structural_tag", "one whose structures have begin and end, texts", each)
        if not begin.startswith(tuple(triggers)):
            raise _wrong("structural_tag", "one whose structures begin with a trigger", begin)


def _half_character(text: str) -> bool:
    return re.search("[\ud800-\udfff]", text) is not None
