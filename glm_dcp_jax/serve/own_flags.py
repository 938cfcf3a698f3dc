"""The server's own flags, in the groups that --help shows; the engine's are in glm_dcp_jax.config.flags."""

import argparse
from collections.abc import Mapping
from typing import Any

from glm_dcp_jax.config.flags_file import HELP, OPTION, json_list
from glm_dcp_jax.engine.sampling_params import MAX_LOGPROBS
from glm_dcp_jax.serve.metric_table import DEFAULT_PREFIX
from glm_dcp_jax.serve.parsing.parsers import CHOICES
from glm_dcp_jax.serve.settings import LOG_FORMATS, LOG_LEVELS, ServerSettings

SAME_NAME = (
    "host",
    "port",
    "reasoning_parser",
    "tool_call_parser",
    "max_logprobs",
    "log_level",
    "log_format",
    "enable_log_requests",
    "disable_uvicorn_access_log",
    "disable_log_stats",
    "shutdown_timeout",
    "sse_keep_alive_interval",
    "allowed_origins",
    "allow_credentials",
    "allowed_methods",
    "allowed_headers",
    "root_path",
    "profiler_dir",
    "metrics_prefix",
)
"""Flags whose values are settings of the same name."""


def add_own_flags(parser: argparse.ArgumentParser) -> None:
    """All of them, in groups."""
    _add_server(parser.add_argument_group("server"))
    _add_browsers(parser.add_argument_group("browsers and proxies"))
    _add_logs(parser.add_argument_group("logs, metrics and profiles"))


def same_named(given: dict[str, Any]) -> Mapping[str, Any]:
    """Takes out of parsed arguments what are settings as they stand."""
    return {name: given.pop(name) for name in SAME_NAME}


def _default(name: str) -> Any:
    return ServerSettings.__dataclass_fields__[name].default


def _add_server(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--model", help="the same as MODEL")
    group.add_argument(OPTION, metavar="FILE", help=HELP)
    group.add_argument(
        "--host", default=_default("host"), help="address to listen on (default: this machine only)"
    )
    group.add_argument("--port", type=int, default=8000, help="port; 0 takes a free one (default: 8000)")
    group.add_argument(
        "--api-key", action="extend", nargs="+", help="key clients must send; repeatable (or VLLM_API_KEY)"
    )
    group.add_argument(
        "--served-model-name", nargs="+", help="names the API gives the model (default: MODEL)"
    )
    group.add_argument("--chat-template", help="a jinja file, or the template itself, instead of the model's")
    group.add_argument(
        "--reasoning-parser",
        choices=CHOICES,
        default="auto",
        help="whose reasoning is told from content; auto: GLM's, if the tokenizer has its tags (default: auto)",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=CHOICES,
        default="auto",
        help="whose tool calls are read; auto: GLM's, if the tokenizer has its tags (default: auto)",
    )
    group.add_argument(
        "--enable-auto-tool-choice",
        action="store_true",
        help="changes nothing: tools may be called wherever there is a tool call parser",
    )
    group.add_argument(
        "--max-logprobs",
        type=int,
        default=_default("max_logprobs"),
        help=f"most logprobs a token, from 0 to {MAX_LOGPROBS} (default: {_default('max_logprobs')})",
    )
    group.add_argument(
        "--shutdown-timeout",
        type=float,
        metavar="S",
        default=_default("shutdown_timeout"),
        help="seconds that running requests may go on after SIGINT or SIGTERM, and caches be read by other engines; 0: "
        f"none; a second signal ends all at once (default: {_default('shutdown_timeout'):g})",
    )


def _add_browsers(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--sse-keep-alive-interval",
        type=float,
        metavar="S",
        default=_default("sse_keep_alive_interval"),
        help="seconds without an event after which a stream gets a comment, so that no proxy closes it; 0: never "
        "(default: 0)",
    )
    for name, what in (
        ("allowed_origins", """origins whose pages may use the server, '["*"]' for all (default: none)"""),
        ("allowed_methods", "methods that these may use (default: all)"),
        ("allowed_headers", "request headers that these may send (default: all)"),
    ):
        group.add_argument(
            "--" + name.replace("_", "-"),
            type=json_list,
            metavar="JSON",
            default=_default(name),
            help=f"JSON list of {what}",
        )
    group.add_argument(
        "--allow-credentials",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="let these pages send cookies and the like; needs origins by name",
    )
    group.add_argument(
        "--root-path",
        metavar="PATH",
        default=_default("root_path"),
        help="path under which a proxy shows the server, as /glm (default: none)",
    )


def _add_logs(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info", help="least level shown (default: info)"
    )
    group.add_argument(
        "--log-format",
        choices=LOG_FORMATS,
        default="text",
        help="lines for people, or one JSON object a line (default: text)",
    )
    group.add_argument(
        "--enable-log-requests",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="log each request's id, length and parameters, never its prompt",
    )
    group.add_argument(
        "--disable-uvicorn-access-log",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no line for each HTTP request",
    )
    group.add_argument(
        "--disable-log-stats",
        action=argparse.BooleanOptionalAction,
        default=False,
        help="no line of throughput every 10 seconds in which there is work",
    )
    group.add_argument(
        "--profiler-dir",
        metavar="DIR",
        help="where /start_profile and /stop_profile leave traces (default: there are no such endpoints)",
    )
    group.add_argument(
        "--metrics-prefix",
        default=DEFAULT_PREFIX,
        help=f"before the names of metrics that vLLM has too (default: {DEFAULT_PREFIX})",
    )
