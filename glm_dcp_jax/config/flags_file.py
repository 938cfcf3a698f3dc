"""--config FILE: a YAML file of flags, which becomes words of the command line. What is typed there wins."""

import argparse
import json
import re
import reprlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.flags import JSON_FLAGS, SIZE_LISTS, explain_unknown, option_of
from glm_dcp_jax.config.json_file import parse_json, parse_unique_json
from glm_dcp_jax.config.refused import is_so_anyway

OPTION = "--config"
HELP = "YAML file of flags; those of the command line win (docs/operations.md)"
_SCALARS = (str, int, float)
_MOST_BYTES = 2**20
_SHOWN = 100
_KINDS: dict[Any, str] = {int: "a whole number", float: "a number"}


def json_list(text: str) -> tuple[str, ...]:
    """A flag's value: a JSON list of strings, as vLLM takes it, or a list of the file."""
    try:
        value = parse_json(text)
    except ValueError:
        value = None
    if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
        raise argparse.ArgumentTypeError(
            f"""must be a JSON list of strings such as '["*"]', but is {text!r}"""
        )
    return tuple(value)


def split_off(words: Sequence[str]) -> tuple[Path | None, list[str]]:
    """The file that a command line names, and its other words. Raises ConfigError for none, and for two."""
    rest: list[str] = []
    files: list[str] = []
    waiting = iter(words)
    for word in waiting:
        name, equals, value = word.partition("=")
        if name != OPTION:
            rest.append(word)
            continue
        found = value if equals else next(waiting, "")
        if not found or found.startswith("--"):
            raise ConfigError(f"{OPTION} needs the name of a YAML file of flags")
        files.append(found)
    if len(files) > 1:
        raise ConfigError(f"{OPTION} is given twice, {files[0]} and {files[1]}; put all flags into one file")
    return (Path(files[0]) if files else None), rest


def words_of(
    path: Path,
    typed: Sequence[str],
    parsers: Sequence[argparse.ArgumentParser],
    explain: Callable[[str, set[str]], str] = explain_unknown,
    so_anyway: Callable[[str, object], bool] = is_so_anyway,
) -> list[str]:
    """The file's flags as words for `parsers`, without those that are among the words that were typed.

    explain: what to say of a setting that is none of those that the parsers know. so_anyway: whether such a setting
    asks for what is so without it. Raises ConfigError that names the file and every key with which something is wrong.
    """
    actions = {
        option: action for parser in parsers for option, action in parser._option_string_actions.items()
    }
    taken = {id(action) for word in typed if (action := actions.get(_option_in(word))) is not None}
    known = {option[2:].replace("-", "_") for option in actions if option.startswith("--")}
    seen: dict[int, str] = {}
    words: list[str] = []
    wrong: list[str] = []

    def add(key: Any, value: Any) -> None:
        name = str(key).lstrip("-").replace("-", "_")
        action = actions.get(option_of(name)) or actions.get("-" + name)
        if action is None:
            off = isinstance(value, bool) and name.startswith("no_")
            if so_anyway(name, value) or (off and so_anyway(name.removeprefix("no_"), not value)):
                return
            raise ConfigError(explain(name, known))
        if action.dest == "config" or action.default is argparse.SUPPRESS:
            raise ConfigError("is for the command line only")
        if id(action) in seen:
            raise ConfigError(f"{seen[id(action)]} has set that already; keep one of them")
        seen[id(action)] = str(key)
        if isinstance(action, argparse.BooleanOptionalAction) and isinstance(value, bool):
            value ^= option_of(name).startswith("--no-")
        said = list(_words(action, value))  # wrong values are wrong though others win
        words.extend([] if id(action) in taken else said)

    for key, value in _read(path).items():
        try:
            add(key, value)
        except ConfigError as error:
            wrong.append(f"{path}: {key}: {error}")
    if wrong:
        raise ConfigError("\n".join(wrong))
    return words


def _read(path: Path) -> dict[Any, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_MOST_BYTES + 1)
        if len(text) > _MOST_BYTES:
            raise OSError(f"it has more than {_MOST_BYTES} bytes, as no file of flags has")
        content = yaml.load(text.decode(), _Loader)
    except FileNotFoundError:
        raise ConfigError(f"{OPTION} {path} does not exist") from None
    except RecursionError:
        raise ConfigError(f"{OPTION} {path} is nested too deeply") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{OPTION} {path} cannot be read: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ConfigError(f"{OPTION} {path} is not valid YAML: {said}") from None
    if content is None:
        return {}
    if not isinstance(content, dict):
        kind = type(content).__name__
        raise ConfigError(f"{OPTION} {path} must hold flags, as `port: 8000`, one a line, but holds a {kind}")
    return content


class _Loader(yaml.SafeLoader):
    """What JSON has; no key twice, as one of them would be ignored; no aliases, as values could hold themselves.

    A flag's value is the text that is there: 010, 1:30 and 1.10 mean what they mean on the command line. Within objects
    numbers are JSON's.
    """

    def get_single_node(self) -> yaml.Node | None:
        """The content, in which numbers and dates that are flags' values, or in a list of them, are text."""
        root = super().get_single_node()
        for _, value in root.value if isinstance(root, yaml.MappingNode) else ():
            for node in value.value if isinstance(value, yaml.SequenceNode) else (value,):
                if isinstance(node, yaml.ScalarNode) and node.tag in (_INT, _FLOAT):
                    node.tag = _TEXT
        return root

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """The next value."""
        if self.check_event(yaml.AliasEvent):
            event = self.peek_event()
            raise yaml.composer.ComposerError(
                None, None, f"*{event.anchor}: write the value out, aliases are not taken", event.start_mark
            )
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """A mapping's content."""
        seen = set()
        for key_node, _ in node.value:
            if key_node.tag == _TAG + "merge":
                raise yaml.constructor.ConstructorError(
                    None, None, "<<: write the keys out, others are not merged in", key_node.start_mark
                )
            key = (key_node.tag, key_node.value if isinstance(key_node.value, str) else id(key_node))
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key_node.value!r} is there twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_TAG = "tag:yaml.org,2002:"
_TEXT, _INT, _FLOAT = _TAG + "str", _TAG + "int", _TAG + "float"
_NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?")


def _number(loader: _Loader, node: yaml.ScalarNode) -> int | float:
    """JSON's numbers. YAML's others are read in more than one way: 010 is 8 or 10, 1:30 is 90 or text."""
    if not _NUMBER.fullmatch(node.value):
        raise yaml.constructor.ConstructorError(
            None,
            None,
            f"{node.value!r} is no number as JSON has them; write it so, or in quotes",
            node.start_mark,
        )
    number = json.loads(node.value)
    assert isinstance(number, (int, float))
    return number


_Loader.yaml_constructors = {
    tag: made
    for tag, made in yaml.SafeLoader.yaml_constructors.items()
    if tag is None or tag.removeprefix(_TAG) in ("null", "bool", "str", "seq", "map")
}
_Loader.add_constructor(_TAG + "timestamp", yaml.SafeLoader.construct_yaml_str)
for _kind in (_INT, _FLOAT):
    _Loader.add_constructor(_kind, _number)
_Loader.add_implicit_resolver(_FLOAT, re.compile(_NUMBER.pattern + r"\Z"), list("-0123456789"))


def _option_in(word: str) -> str:
    """The option that a typed word sets: `--hf-overrides.dtype=float32` sets --hf-overrides."""
    name = word.partition("=")[0]
    return name.partition(".")[0] if name.startswith("-") else name


def _words(action: argparse.Action, value: Any) -> Iterator[str]:
    option = action.option_strings[0]
    if action.nargs == 0 or isinstance(action, argparse.BooleanOptionalAction):
        if not isinstance(value, bool):
            raise ConfigError(f"must be true or false, but is {_shown(value)}")
        off = next((name for name in action.option_strings if name.startswith("--no-")), None)
        if value or (off and isinstance(action, argparse.BooleanOptionalAction)):
            yield option if value else str(off)
    elif action.nargs == "+":
        many = value if isinstance(value, list) else [value]
        if not many:
            raise ConfigError("the list is empty; leave the key out")
        yield option
        yield from (_text(action, entry) for entry in many)
    else:
        yield f"{option}={_text(action, _flattened(action, value))}"


def _flattened(action: argparse.Action, value: Any) -> Any:
    """Objects and lists as they are typed, where a flag takes them."""
    if isinstance(value, Mapping) and action.dest in JSON_FLAGS:
        return json.dumps(value)
    if isinstance(value, list) and action.dest in SIZE_LISTS:
        return ",".join(map(str, value))
    if isinstance(value, list) and action.type is json_list:
        return json.dumps(value)
    return value


def _text(action: argparse.Action, value: Any) -> str:
    """As it is typed. Raises ConfigError for what the flag does not take."""
    if value is None:
        raise ConfigError("has no value; give one, or leave the key out")
    if isinstance(value, bool) or not isinstance(value, _SCALARS):
        quotes = "; in quotes it is text" if isinstance(value, bool) else ""
        raise ConfigError(f"takes one value, but got {_shown(value)}{quotes}")
    text = str(value)
    if action.dest in JSON_FLAGS:
        try:
            parse_unique_json(text)
        except ValueError as error:
            raise ConfigError(f"is not valid JSON: {error}") from None
    try:
        converted = action.type(text) if callable(action.type) else text
    except argparse.ArgumentTypeError as error:
        raise ConfigError(str(error)) from None
    except (TypeError, ValueError):
        kind = _KINDS.get(action.type, "another kind of value")
        raise ConfigError(f"must be {kind}, but is {_shown(value)}") from None
    if action.choices is not None and converted not in action.choices:
        raise ConfigError(f"must be one of {', '.join(map(str, action.choices))}, but is {_shown(value)}")
    return text


def _shown(value: Any) -> str:
    """Short, whatever it is: aliases make large values of small files."""
    if value is None or isinstance(value, (bool, *_SCALARS)):
        text = json.dumps(value, ensure_ascii=False)
        return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
    return reprlib.repr(value)
