"""Chat templates: a checkpoint's jinja, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class ChatTemplateError(ValueError):
    """A template that does not parse, or that could not make a prompt of these messages."""


class ChatTemplate:
    """A compiled template. Raises ChatTemplateError when the source is not valid jinja."""

    def __init__(self, source: str) -> None:
        try:
            self._template = _ENVIRONMENT.from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the chat template does not parse, line {error.lineno}: {error.message}"
            ) from None

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        """The prompt for these messages. Raises ChatTemplateError when the template fails or refuses them."""
        try:
            return self._template.render(messages=messages, **variables)
        except ChatTemplateError:
            raise
        except Exception as error:  # a template may fail in any way python can
            kind = type(error).__name__
            raise ChatTemplateError(
                f"the chat template failed on these messages ({kind}): {error}"
            ) from error


def _raise_exception(message: str) -> NoReturn:
    raise ChatTemplateError(f"the chat template refuses these messages: {message}")


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """jinja's own tojson escapes <, > and & for HTML, which models were not trained on."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
