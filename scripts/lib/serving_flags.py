"""The command line of scripts/bench_serving.py: vLLM's flags, checked before anything is measured."""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

from lib.serving_metrics import METRICS

PROMPTS_A_PLACE, LEAST_PROMPTS = 4, 16
"""--num-prompts, if it is not given: for each request of --max-concurrency, and at least."""
_CONCURRENCY = (1, 2, 4, 8, 16, 32, 64)
_REQUESTS = (64, 256)
_MOST_REQUESTS, _MOST_PROMPTS, _MOST_TOKENS = 65_536, 1_000_000, 10_000_000


def parse(arguments: list[str], description: str | None = None) -> argparse.Namespace:
    """The flags; those of a server behind `--` as server_flags. Exits with 2 for what cannot work."""
    own, server_flags = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, server_flags = arguments[:cut], arguments[cut + 1 :]
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="bench_serving.py", description=description, formatter_class=raw, allow_abbrev=False
    )
    _add_where(parser.add_argument_group("where"))
    _add_load(parser.add_argument_group("load"))
    _add_results(parser.add_argument_group("results"))
    given = parser.parse_args(own)
    given.server_flags, given.command = server_flags, arguments
    wrong = _wrong_together(given)
    if wrong:
        parser.error(wrong)
    if given.host_overhead == []:
        given.host_overhead = list(_REQUESTS)
    if given.host is not None or given.port is not None:
        given.base_url = f"http://{given.host or '127.0.0.1'}:{given.port or 8000}"
    return given


def _add_where(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--base-url", type=_url, help="of a server that runs, such as http://127.0.0.1:8000")
    group.add_argument("--host", help="instead of --base-url (default: 127.0.0.1, if --port is given)")
    group.add_argument(
        "--port", type=_whole(1, 65_535), help="instead of --base-url (default: 8000, if --host is given)"
    )
    group.add_argument("--endpoint", type=_endpoint, default="/v1/completions", help="default: %(default)s")
    group.add_argument(
        "--model", help="its name there (default: its first), or what an own server is to load"
    )
    group.add_argument(
        "--ready-timeout",
        type=_positive,
        default=1800.0,
        help="seconds for an own server to start (default: 1800)",
    )
    group.add_argument(
        "--host-overhead",
        type=_whole(1, _MOST_REQUESTS),
        nargs="*",
        metavar="REQUESTS",
        help="time what a decode step costs the host, without a server (default: 64 256 requests)",
    )


def _add_load(group: argparse._ArgumentGroup) -> None:
    tokens = _whole(1, _MOST_TOKENS)
    group.add_argument(
        "--max-concurrency",
        type=_whole(1, _MOST_REQUESTS),
        nargs="+",
        default=list(_CONCURRENCY),
        metavar="N",
        help="requests at a time, a run for each (default: 1 2 4 8 16 32 64)",
    )
    group.add_argument(
        "--request-rate", type=_rate, default=math.inf, help="requests/s (default: inf, all at once)"
    )
    group.add_argument(
        "--burstiness", type=_positive, default=1.0, help="1: Poisson process, below: in bursts (default: 1)"
    )
    group.add_argument(
        "--num-prompts",
        type=_whole(1, _MOST_PROMPTS),
        help=f"of a run (default: {PROMPTS_A_PLACE} for each of --max-concurrency, at least {LEAST_PROMPTS})",
    )
    group.add_argument("--random-input-len", type=tokens, default=1024, help="default: %(default)s")
    group.add_argument("--random-output-len", type=tokens, default=128, help="default: %(default)s")
    group.add_argument(
        "--random-prefix-len",
        type=_whole(0, _MOST_TOKENS),
        default=0,
        help="tokens all prompts of a run begin with",
    )
    group.add_argument(
        "--vocab-size",
        type=_whole(1, 2**31 - 1),
        help="default: of the model's config.json, if it can be read",
    )
    group.add_argument("--temperature", type=_at_least_0, default=0.0, help="default: 0, greedy")
    group.add_argument("--ignore-eos", action="store_true", help="each output has its full length")
    group.add_argument(
        "--seed", type=_whole(0, 2**63 - 1), default=0, help="of prompts and arrivals (default: 0)"
    )


def _add_results(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--percentile-metrics",
        type=_metrics,
        default=list(METRICS),
        help=f"which latencies are printed (default: {','.join(METRICS)})",
    )
    group.add_argument(
        "--metric-percentiles", type=_percentiles, default=[99.0], help="such as 50,90,99 (default: 99)"
    )
    group.add_argument("--save-result", action="store_true", help="write JSON, a Markdown table and a plot")
    group.add_argument("--result-dir", type=Path, help="default: the current directory")
    group.add_argument(
        "--result-filename", type=_json_name, help="default: serving.json or host-overhead.json"
    )


def _wrong_together(given: argparse.Namespace) -> str | None:
    """Which flags exclude one another; None if they can all be followed."""
    runs_there = any(each is not None for each in (given.base_url, given.host, given.port))
    if given.base_url is not None and (given.host is not None or given.port is not None):
        return "--base-url says it all; leave --host and --port out"
    if runs_there and given.server_flags:
        return "flags behind -- are for a server of its own; leave out where one runs (--base-url, --host, --port)"
    if given.host_overhead is not None and (runs_there or given.server_flags or given.model):
        return "--host-overhead needs no server: leave out --base-url, --host, --port, --model and flags behind --"
    if not given.save_result and (given.result_dir is not None or given.result_filename is not None):
        return "--result-dir and --result-filename do nothing without --save-result"
    return None


def _whole(least: int, most: int) -> Callable[[str], int]:
    def convert(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if not least <= value <= most:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, but is {text!r}"
            )
        return value

    return convert


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _positive(text: str) -> float:
    if not 0 < _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number above 0, but is {text!r}")
    return float(text)


def _rate(text: str) -> float:
    if not _number(text) > 0:
        raise argparse.ArgumentTypeError(f"must be requests per second above 0, or inf, but is {text!r}")
    return float(text)


def _at_least_0(text: str) -> float:
    if not 0 <= _number(text) < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of at least 0, but is {text!r}")
    return float(text)


def _metrics(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in METRICS:
            raise argparse.ArgumentTypeError(f"{name!r} is unknown; use some of {','.join(METRICS)}")
    return names


def _percentiles(text: str) -> list[float]:
    values = [_number(part) for part in text.split(",")]
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"must be numbers from 0 to 100 such as 50,99, but is {text!r}")
    return values


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise argparse.ArgumentTypeError(f"must begin with http:// or https://, but is {text!r}")
    return text.rstrip("/").removesuffix("/v1")


def _endpoint(text: str) -> str:
    if not text.startswith("/") or text.endswith("/chat/completions"):
        raise argparse.ArgumentTypeError(
            f"must be a path that takes token ids, such as /v1/completions, but is {text!r}"
        )
    return text


def _json_name(text: str) -> str:
    if Path(text).name != text or not text.endswith(".json"):
        raise argparse.ArgumentTypeError(
            f"must be a file name that ends with .json, but is {text!r}; its folder is --result-dir"
        )
    return text
