"""Chat templates: a checkpoint's jinja, run in a sandbox."""

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cache, cached_property
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.meta
import jinja2.nodes
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from glm_dcp_jax.config import ConfigError

_LONGEST_RANGE = 10_000


class ChatTemplateError(ValueError):
    """A template that does not parse, or that could not make a prompt of these messages."""


def read_template(file: Path) -> str:
    """The text of a template's file. Raises ConfigError that names it, when it cannot be read or is not UTF-8."""
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"the chat template {file} is not UTF-8 text: {error}") from None
    except OSError as error:
        raise ConfigError(f"the chat template {file} cannot be read: {error.strerror}") from None


@cache
def glm_template() -> str:
    """The jinja source of a template in GLM-5.2's form, for checkpoints of the family that come without one."""
    return resources.files(__package__).joinpath("glm_chat_template.jinja").read_text(encoding="utf-8")


class ChatTemplate:
    """A compiled template. Raises ChatTemplateError when the source is not valid jinja."""

    def __init__(self, source: str) -> None:
        self._source = source
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

    def reads(self, variable: str) -> bool:
        """Whether it looks at a variable at all."""
        return variable in self._variables

    def knows(self, value: str) -> bool:
        """Whether a string stands in its code, so that it may be compared with a variable."""
        return value in self._strings

    @cached_property
    def _variables(self) -> set[str]:
        return jinja2.meta.find_undeclared_variables(_ENVIRONMENT.parse(self._source))

    @cached_property
    def _strings(self) -> frozenset[str]:
        tree = _ENVIRONMENT.parse(self._source)
        constants = (constant.value for constant in tree.find_all(jinja2.nodes.Const))
        return frozenset(value for value in constants if isinstance(value, str))


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


def _range(*bounds: int) -> range:
    """jinja's own allows ten times as many, and loops within loops then take minutes."""
    numbers = range(*bounds)
    if len(numbers) > _LONGEST_RANGE:
        raise OverflowError(f"a range may hold at most {_LONGEST_RANGE} numbers")
    return numbers


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["range"] = _range
    environment.globals["strftime_now"] = _strftime_now
    return environment


_ENVIRONMENT = _environment()
