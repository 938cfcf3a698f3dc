"""The command line of `python -m glm_dcp_jax.chat`."""

import argparse
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import urlsplit

import httpx

from glm_dcp_jax._version import __version__
from glm_dcp_jax.config import ConfigError

_SAMPLING = (
    ("temperature", float, "0 is greedy"),
    ("top_p", float, "share of probability that is sampled from"),
    ("top_k", int, "how many tokens are sampled from; 0: all"),
    ("max_tokens", int, "longest answer, in tokens"),
    ("seed", int, "the same seed and words give the same answer"),
)
"""What goes to the server as it is, which says what it does not take."""


@dataclass(frozen=True)
class Options:
    """A command line, understood. base_url: without /v1. model: None takes the server's first."""

    base_url: str
    model: str | None
    api_key: str | None
    system: str | None
    sampling: Mapping[str, Any]


def parse(argv: Sequence[str]) -> Options:
    """Read a command line. Raises ConfigError for what cannot be; --help and --version exit."""
    given = vars(_parser().parse_args(argv))
    sampling = {name: given[name] for name, _, _ in _SAMPLING if given[name] is not None}
    api_key = given["api_key"] or os.environ.get("VLLM_API_KEY") or None
    if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
        raise ConfigError("--api-key must be ASCII text, as that is all HTTP headers can hold")
    return Options(_base_url(given["base_url"]), given["model"], api_key, given["system"], sampling)


def _base_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        host = httpx.URL(text).host  # which refuses names that nothing could look up
        is_url = parts.scheme in ("http", "https") and bool(host.encode("idna")) and parts.port != 0
    except (ValueError, httpx.InvalidURL):
        is_url = False
    if not is_url or not text.isprintable() or " " in text:
        raise ConfigError(f"--base-url must be a URL such as http://127.0.0.1:8000, but is {text!r}")
    if parts.query or parts.fragment:
        raise ConfigError(f"--base-url {text!r} must end before its ? or #, as in http://127.0.0.1:8000")
    return text.rstrip("/?#").removesuffix("/v1")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m glm_dcp_jax.chat",
        description="Chat with a running server in the terminal. What is piped in is one message, and its answer alone "
        "is printed. In the terminal: /reset forgets the conversation, /system TEXT sets its system message, /quit or "
        "Ctrl-D ends, Ctrl-C stops an answer.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument(
        "--base-url",
        metavar="URL",
        default="http://127.0.0.1:8000",
        help="where the server is, with or without /v1 (default: %(default)s)",
    )
    parser.add_argument("--model", help="its name at the server (default: the server's first)")
    parser.add_argument("--api-key", metavar="KEY", help="key that the server wants (or VLLM_API_KEY)")
    parser.add_argument("--system", metavar="TEXT", help="system message that conversations begin with")
    sampling = parser.add_argument_group("sampling (default: as the server has it)")
    for name, kind, what in _SAMPLING:
        sampling.add_argument(
            "--" + name.replace("_", "-"), type=kind, metavar=kind.__name__.upper(), help=what
        )
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (--help lists the flags)")
