"""The command line of `python -m glm_dcp_jax.serve.router`."""

import argparse
from collections.abc import Sequence
from typing import NoReturn

from glm_dcp_jax._version import __version__
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.router.settings import POLICIES, RouterSettings, server_url
from glm_dcp_jax.serve.settings import LOG_LEVELS


def parse(argv: Sequence[str]) -> RouterSettings:
    """Read a command line. Raises ConfigError for anything that cannot work; --help and --version exit."""
    given = vars(make_parser().parse_args(argv))
    for name in ("prefill", "decode"):
        given[name] = tuple(server_url(text, f"--{name}") for text in given[name])
    return RouterSettings(**given)


def make_parser() -> argparse.ArgumentParser:
    """The flags, in the groups that --help shows."""
    parser = _Parser(
        prog="python -m glm_dcp_jax.serve.router",
        description="OpenAI's API over prefill and decode servers: a prefill server computes a prompt's cache, "
        "a decode server pulls it from there and answers.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=__version__)
    _add_servers(parser.add_argument_group("servers behind the router"))
    _add_deadlines(parser.add_argument_group("deadlines, in seconds"))
    _add_own(parser.add_argument_group("the router itself"))
    return parser


def _add_servers(group: argparse._ArgumentGroup) -> None:
    for name, what in (("prefill", "compute prompts"), ("decode", "generate")):
        group.add_argument(
            f"--{name}",
            action="extend",
            nargs="+",
            default=[],
            metavar="URL",
            help=f"servers that {what}, as http://host:port; repeatable",
        )
    group.add_argument(
        "--policy",
        choices=POLICIES,
        default=RouterSettings.policy,
        help="how a server is chosen: the fewest requests in flight, or in turn (default: %(default)s)",
    )
    group.add_argument(
        "--min-prefill-chars",
        type=int,
        metavar="N",
        default=RouterSettings.min_prefill_chars,
        help="shorter prompts are left to the decode server alone (default: 0, none)",
    )


def _add_deadlines(group: argparse._ArgumentGroup) -> None:
    for name, what in (
        ("prefill_timeout", "for the prefill, all tries together; then the decode server does all"),
        ("decode_timeout", "until a decode server's first byte, and between its bytes"),
        ("health_interval", "between two looks at a server's health"),
        (
            "shutdown_timeout",
            "for running requests after SIGINT or SIGTERM; a second signal ends them at once",
        ),
    ):
        default = getattr(RouterSettings, name)
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=float,
            metavar="S",
            default=default,
            help=f"{what} (default: {default:g})",
        )


def _add_own(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--host", default=RouterSettings.host, help="address to listen on (default: this machine only)"
    )
    group.add_argument(
        "--port",
        type=int,
        default=RouterSettings.port,
        help="port; 0 takes a free one (default: %(default)s)",
    )
    group.add_argument(
        "--log-level",
        choices=LOG_LEVELS,
        default=RouterSettings.log_level,
        help="least level shown (default: %(default)s)",
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message.removeprefix('argument ')} (--help lists the flags)")
