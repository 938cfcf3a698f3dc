"""The command line of `python -m glm_dcp_jax.serve.pair`."""

import argparse
import json
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from glm_dcp_jax._version import __version__
from glm_dcp_jax.config import ConfigError, flags_file
from glm_dcp_jax.config.json_file import parse_json
from glm_dcp_jax.serve import flags as server_flags
from glm_dcp_jax.serve.settings import LOG_LEVELS, ServerSettings

ROLES = ("prefill", "decode")
_KV = "--kv-transfer-config"
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}
_DEMO_LAYOUTS = {"prefill": ("-tp", "2", "-dcp", "1"), "decode": ("-tp", "4", "-dcp", "4")}
"""Of the built-in model without a GPU: two that differ, since that is what a pair can do."""
_LAYOUT_FLAGS = ("-tp", "--tensor-parallel-size", "-dcp", "--decode-context-parallel-size")


@dataclass(frozen=True)
class PairCommand:
    """A command line, understood. servers: of each role, the flags of its server, but for its address.

    devices: of a role, the GPUs that it sees; all there are for a role that is not there. host, port: of the router.
    shutdown_timeout: seconds that the slower server takes for what runs, once it is to stop.
    """

    servers: dict[str, list[str]]
    devices: dict[str, str]
    host: str
    port: int
    log_level: str
    shutdown_timeout: float


def parse(argv: Sequence[str], has_gpu: bool) -> PairCommand:
    """Read a command line. Raises ConfigError for anything that cannot work; --help and --version exit."""
    given, common = _parser().parse_known_args(_joined(argv))
    _check_file(common)
    transfer = _transfer_flags(given.kv_transfer_config)
    servers, settings = {}, list[ServerSettings]()
    for role in ROLES:
        own = _split(f"--{role}", getattr(given, role))
        level = [] if given.log_level is None else ["--log-level", given.log_level]
        flags = [*transfer, *common, *own, f"{_KV}.kv_role={_KV_ROLES[role]}", *level]
        servers[role], found = _checked(role, flags, has_gpu)
        settings.append(found)
    devices = {role: value for role in ROLES if (value := getattr(given, f"{role}_devices")) is not None}
    if not 0 <= given.port <= 65535:
        raise ConfigError(f"--port must be from 0 (any free one) to 65535, but is {given.port}")
    patience = max(each.shutdown_timeout for each in settings)
    return PairCommand(servers, devices, given.host, given.port, settings[0].log_level, patience)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m glm_dcp_jax.serve.pair",
        usage='%(prog)s [MODEL] [--prefill "FLAGS"] [--decode "FLAGS"] [--port PORT] [flags of both servers]',
        description="Start a prefill server, a decode server and their router on this machine, and end them together. "
        "All flags that are not listed here go to both servers, whose --help lists them. With no MODEL, a built-in "
        "tiny model.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    for role in ROLES:
        parser.add_argument(
            f"--{role}",
            metavar='"FLAGS"',
            default="",
            help=f"flags of the {role} server alone, in one argument",
        )
    for role in ROLES:
        parser.add_argument(
            f"--{role}-devices",
            metavar="LIST",
            help=f"GPUs that the {role} server sees, as CUDA_VISIBLE_DEVICES has them (default: all)",
        )
    parser.add_argument(
        _KV, metavar="JSON", default="{}", help="how caches travel; the roles are added (default: tcp)"
    )
    parser.add_argument(
        "--host", default="127.0.0.1", help="address the router listens on (default: this machine only)"
    )
    parser.add_argument(
        "--port", type=int, default=8100, help="the router's port; 0 takes a free one (default: %(default)s)"
    )
    parser.add_argument("--log-level", choices=LOG_LEVELS, help="least level shown (default: info)")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (--help lists the flags)")


def _joined(argv: Sequence[str]) -> list[str]:
    """`--prefill FLAGS` as one word: flags may look like an option of the pair's."""
    words: list[str] = []
    for word in map(server_flags.with_dashes, argv):
        if words and words[-1] in ("--prefill", "--decode"):
            words[-1] += f"={word}"
        else:
            words.append(word)
    return words


def _split(flag: str, text: str) -> list[str]:
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"{flag} {text!r} cannot be split into flags: {error}") from None
    for word in words:
        if word.partition("=")[0] in ("--host", "--port"):
            raise ConfigError(f"{flag} must not hold {word}: the pair chooses where its servers listen")
    return words


def _check_file(common: Sequence[str]) -> None:
    """Raise ConfigError for what a file of flags says and the pair decides: it would be ignored."""
    file, _ = flags_file.split_off(common)
    if file is None:
        return
    if file.exists() and not file.is_file():
        raise ConfigError(f"{file} is no regular file, which each server can read again; name one")
    for word in server_flags.words_of_file(file, (), [server_flags.make_parser()]):
        name = word.partition("=")[0]
        if name in ("--host", "--port", _KV):
            raise ConfigError(
                f"{file}: {name[2:]}: is the pair's own; give it on the command line, as {name}"
            )


def _transfer_flags(text: str) -> list[str]:
    """The keys of an object as flags, which others may then be added to. tcp unless it says something else."""
    try:
        content = parse_json(text)
    except ValueError as error:
        raise ConfigError(f"{_KV} is not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f'{_KV} must be a JSON object, as {{"kv_connector": "tcp"}}, but is {text}')
    return [f"{_KV}.{key}={json.dumps(value)}" for key, value in ({"kv_connector": "tcp"} | content).items()]


def _checked(role: str, flags: list[str], has_gpu: bool) -> tuple[list[str], ServerSettings]:
    """Flags that a server can start with, and its settings, as far as can be said without loading its model."""
    try:
        command = server_flags.parse(flags, has_gpu)
        if command.demo and not has_gpu and not any(_is_layout(flag) for flag in flags):
            flags = [*_DEMO_LAYOUTS[role], *flags]
            command = server_flags.parse(flags, has_gpu)
        transfer = command.config.transfer
        if transfer is not None and transfer.kv_connector == "inproc":
            raise ConfigError("kv_connector inproc joins engines of one process; use tcp, nixl or jax")
    except ConfigError as error:
        raise ConfigError(f"the {role} server: {server_flags.explain(error)}") from None
    return flags, command.settings


def _is_layout(flag: str) -> bool:
    return server_flags.with_dashes(flag).partition("=")[0] in _LAYOUT_FLAGS
