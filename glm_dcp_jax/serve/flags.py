"""The command line of `python -m glm_dcp_jax.serve`: the engine's flags and the server's own, in vLLM's names."""

import argparse
import json
import os
import re
import reprlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from glm_dcp_jax._version import __version__
from glm_dcp_jax.config import FLAGS, ConfigError, EngineConfig, Flag, engine_config, flags_file
from glm_dcp_jax.config.flags import (
    DEMO_DEVICES,
    JSON_FLAGS,
    SIZE_LISTS,
    field_of,
    in_flags,
    option_of,
    section_of,
    value_type,
)
from glm_dcp_jax.config.json_file import parse_json
from glm_dcp_jax.engine.chat_template import read_template
from glm_dcp_jax.serve import foreign_flags
from glm_dcp_jax.serve.own_flags import SAME_NAME, add_own_flags, same_named
from glm_dcp_jax.serve.settings import ServerSettings

DEMO_NAME = "glm-dcp-demo"

LENGTHS = (
    "max_model_len",
    "max_num_batched_tokens",
    "kv_cache_memory_bytes",
    "dcp_exchange_memory",
    "dcp_context_memory",
)
"""Flags that take 4k or 2G, as vLLM's do, and -1 or auto for their default."""
_MULTIPLES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}
_ENGINE_GROUPS = {
    "engine": "engine: the model and its weights",
    "parallel": "engine: devices, and what goes between them",
    "cache": "engine: the cache",
    "scheduler": "engine: what a step holds, and who waits",
    "processes": "engine: several processes",
}
"""Parts of the configuration as --help calls them."""
_SPELLED = {
    name: option_of(name)
    for name in (*(flag.name for flag in FLAGS), "api_key", "served_model_name", *SAME_NAME)
    if name != "dtype"  # config.json has a field of this name; the flag's values are checked by the parser
}


@dataclass(frozen=True)
class Command:
    """A command line, understood. demo: no model was named, so config.model is still to be filled in."""

    config: EngineConfig
    settings: ServerSettings
    demo: bool


def parse(argv: Sequence[str], has_gpu: bool) -> Command:
    """Read a command line. Raises ConfigError for anything that cannot work; --help and --version exit."""
    parser = make_parser()
    words = foreign_flags.without_what_is_so([with_dashes(argument) for argument in argv])
    file, words = flags_file.split_off(words)
    arguments = _with_objects(words)
    foreign_flags.require_known(parser, arguments)
    if file is not None:
        from_file = words_of_file(file, words, [parser])
        if parser.parse_known_args(arguments)[0].MODEL is not None:
            from_file = [word for word in from_file if not word.startswith("--model=")]
        arguments = [*arguments, *from_file]  # before MODEL, several values would take it for one of theirs
    given = vars(parser.parse_args(arguments))
    del given["config"]
    model = _model(given.pop("MODEL"), given.pop("model"))
    if given["tokenizer"] == "":
        raise ConfigError("--tokenizer is empty; name a directory or a tokenizer.json, or leave it out")
    names = given.pop("served_model_name")
    settings = ServerSettings(
        served_model_names=tuple(names or [model or DEMO_NAME]),
        api_keys=_api_keys(given.pop("api_key")),
        chat_template=_template(given.pop("chat_template")),
        **same_named(given),
    )
    if given["skip_tokenizer_init"]:
        settings.require_no_parser("--skip-tokenizer-init loads none")
        for name, value in (("tokenizer", given["tokenizer"]), ("chat_template", settings.chat_template)):
            if value is not None:
                raise ConfigError(
                    f"{option_of(name)} says nothing with --skip-tokenizer-init; leave one of them out"
                )
    del given["enable_auto_tool_choice"]
    if model is None and not has_gpu:
        _spread_demo(given)
    return Command(engine_config(model or DEMO_NAME, **given), settings, demo=model is None)


def words_of_file(file: Path, typed: Sequence[str], parsers: Sequence[argparse.ArgumentParser]) -> list[str]:
    """As flags_file.words_of; what is not known is explained as on the command line."""
    return flags_file.words_of(
        file,
        typed,
        parsers,
        lambda name, known: foreign_flags.explain(foreign_flags.spelled(name), known),
        lambda name, value: foreign_flags.is_so(foreign_flags.full_name(name), value),
    )


def make_parser() -> argparse.ArgumentParser:
    """The flags, in the groups that --help shows."""
    parser = _Parser(
        prog="python -m glm_dcp_jax.serve",
        usage="%(prog)s [MODEL] [flags]",
        description="Serve a GLM-5.2 family checkpoint over OpenAI's API. With no MODEL, a built-in tiny model.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "MODEL", nargs="?", help="checkpoint directory, or a name in the local Hugging Face cache"
    )
    parser.add_argument("--version", action="version", version=__version__)
    add_own_flags(parser)
    groups = {section: parser.add_argument_group(title) for section, title in _ENGINE_GROUPS.items()}
    for flag in FLAGS:
        _add_engine_flag(groups[section_of(flag.name)], flag)
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (--help lists the flags)")


def _add_engine_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    options = [flag.option, *([flag.short] if flag.short else [])]
    kind = value_type(flag.name)
    if kind is bool:
        on = field_of(flag.name).default
        action = argparse.BooleanOptionalAction if on else "store_true"
        group.add_argument(
            *options, action=action, default=None, help=flag.help + (" (default: on)" if on else "")
        )
        return
    default = field_of(flag.name).default
    shown = f" (default: {default})" if isinstance(default, (int, float, str)) else ""
    convert = _length if flag.name in LENGTHS else kind
    group.add_argument(
        *options,
        type=convert,
        choices=flag.choices or None,
        metavar=None if flag.choices else _metavar(flag.name, kind),
        help=flag.help + shown,
    )


def _metavar(name: str, kind: type) -> str:
    """What --help shows for a value."""
    if name in JSON_FLAGS:
        return "JSON"
    if name in SIZE_LISTS:
        return "SIZES"
    return "LENGTH" if name in LENGTHS else kind.__name__.upper()


def _length(text: str) -> int | None:
    """A number, also as 4k (4000), 4K (4096) or 25.6k; vLLM's `auto` and -1 are our unset."""
    if text in ("auto", "-1"):
        return None
    found = re.fullmatch(r"([0-9]{1,18})([KMG]?)|([0-9]{1,18}(?:\.[0-9]{1,18})?)([kmg])", text)
    if not found:
        raise argparse.ArgumentTypeError(
            f"must be a number such as 4096, 4K (4096), 4k (4000) or 25.6k, or auto, but is {reprlib.repr(text)}"
        )
    number, multiple = found[1] or found[3], found[2] or found[4] or ""
    return round(float(number) * _MULTIPLES[multiple]) if found[3] else int(number) * _MULTIPLES[multiple]


def explain(error: ConfigError) -> str:
    """What was wrong, in the words of a command line: flags instead of settings, the server's own among them."""
    return in_flags(str(error), _SPELLED)


def with_dashes(argument: str) -> str:
    """`--max_model_len=8` is `--max-model-len=8`, as in vLLM; keys of an object keep their underscores."""
    if not argument.startswith("--"):
        return argument
    name, equals, value = argument.partition("=")
    flag, dot, key = name.partition(".")
    return flag.replace("_", "-") + dot + key + equals + value


def _with_objects(arguments: Sequence[str]) -> list[str]:
    """`--speculative-config.method mtp` and its like, which set one key of an object, as one argument of JSON each.

    Values that are JSON are taken as such, others as text, as in vLLM. Raises ConfigError for a key without a value,
    and for an object that is given both ways.
    """
    of_objects = [flag for flag in FLAGS if flag.name in JSON_FLAGS]
    spelled = {name: flag for flag in of_objects for name in (flag.option, flag.short) if name}
    objects: dict[str, dict[str, Any]] = {}
    rest: list[str] = []
    waiting = iter(arguments)
    for argument in waiting:
        name, equals, value = argument.partition("=")
        start, dot, key = name.partition(".")
        if not dot or start not in spelled:
            rest.append(argument)
            continue
        found = value if equals else next(waiting, None)
        if not key or found is None:
            raise ConfigError(f"{name} needs a key and a value, as {start}.key value")
        objects.setdefault(spelled[start].option, {})[key] = _json_or_text(found)
    whole = {spelled[name].option for name in (word.partition("=")[0] for word in rest) if name in spelled}
    for option in objects:
        if option in whole:
            raise ConfigError(f"{option} is given both as an object and key by key; use one way")
    return [*rest, *(f"{option}={json.dumps(content)}" for option, content in objects.items())]


def _json_or_text(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text


def _model(positional: str | None, flag: str | None) -> str | None:
    if positional is not None and flag is not None and positional != flag:
        raise ConfigError(
            f"two models are named, {positional} and {flag}; give one, as MODEL or with --model"
        )
    model = positional if positional is not None else flag
    if model == "":
        raise ConfigError(
            "the model's name is empty; name a checkpoint, or leave MODEL out for the built-in model"
        )
    return model


def _api_keys(given: list[str] | None) -> tuple[str, ...]:
    environment = os.environ.get("VLLM_API_KEY")
    return tuple(given or ([environment] if environment else []))


def _template(given: str | None) -> str | None:
    """A file's text, or the argument itself if it looks like jinja."""
    if given is None:
        return None
    try:
        is_file = Path(given).is_file()
    except OSError:  # a long template is no file name
        is_file = False
    if is_file:
        return read_template(Path(given))
    if "{" not in given:
        raise ConfigError(f"--chat-template {given} is neither a file nor a jinja template")
    return given


def _spread_demo(given: dict[str, Any]) -> None:
    """Without a GPU the built-in model shows what the engine is for: one cache over several (virtual) devices.

    Few and small steps, so that it answers within a minute of its first start.
    """
    tp = given["tensor_parallel_size"] or DEMO_DEVICES
    suggested = {
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": tp,
        "max_num_batched_tokens": 128,
        "precompile_token_paddings": "128",
        "max_num_seqs": 8,
        "precompile_bs_paddings": "1,8",
        "kv_cache_memory_bytes": 32 * 2**20,
    }
    given.update({name: value for name, value in suggested.items() if given[name] is None})
