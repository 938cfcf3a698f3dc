#!/usr/bin/env python
"""Prefill/decode pairs of many layouts over one task file, each compared with one plain server (TP1).

    .venv/bin/python scripts/pd_sweep.py [--model DIR] [--tasks FILE] [--all] [-- FLAGS OF ALL SERVERS]
    .venv/bin/python scripts/pd_sweep.py --config "P TP4/DCP4 -> D TP2/DCP2" --config "P TP2/BLOCK16 -> D TP4/DCP2"

For each pair it starts a prefill server, a decode server and their router, and asks all tasks through the router,
greedily. The table says of each pair whether it did what it should (PASS), which share of its texts is the plain
server's, and, where the task file has answers, which share is right (strict match: the last number of the text, or all
of it). A pair fails where a request was not answered, where it was answered without a hand-over, and where fewer texts
than --least-identical are the plain server's.

A task file has a JSON object a line: {"prompt": text or token ids, "answer": text, "max_tokens": integer, "stop": text,
"kind": text}, all but the prompt optional.

Exit code: 0; 1 if a pair failed; 2 for flags that cannot work; 130 after an interrupt.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lib.sweep_pairs import MORE, SEVEN, ServerPair
from lib.sweep_tasks import Answers, Task, identical, load_tasks, strict_match
from lib.task_flags import exit_code, parse_with_server_flags, task_parser

_TASKS = Path(__file__).parent / "tasks" / "pd_sweep.jsonl"
_PAIR = (sys.executable, "-m", "glm_dcp_jax.serve.pair")


class SweepError(Exception):
    """Why there is nothing to compare: for the person at the terminal."""


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags; those of all servers behind `--` as server_flags. Exits with 2 for what cannot work."""
    parser = task_parser("pd_sweep.py", __doc__, _TASKS.name, concurrency=4)
    parser.add_argument(
        "--config",
        action="append",
        type=_pair,
        metavar="PAIR",
        help='such as "P TP4/DCP4 -> D TP2/DCP2", of TP, DCP, BLOCK, INTERLEAVE and SHARDS; repeatable (default: seven '
        "pairs of TP 2 and 4)",
    )
    parser.add_argument("--all", action="store_true", help="the seven, and others that differ in more")
    parser.add_argument("--connector", choices=("tcp", "jax", "nixl"), default="tcp", help="default: tcp")
    parser.add_argument(
        "--least-identical",
        type=_share,
        default=0.9,
        metavar="SHARE",
        help="of the plain server's texts that a pair must give to pass; near ties make fewer alike in bfloat16 than "
        "in float32 (default: %(default)s)",
    )
    given = parse_with_server_flags(parser, arguments)
    if given.config and given.all:
        parser.error("--config and --all: give one of them")
    given.pairs = given.config or (SEVEN + MORE if given.all else SEVEN)
    return given


def _pair(text: str) -> ServerPair:
    try:
        return ServerPair.parse(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _share(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= float(text) <= 1:
            return float(text)
    raise argparse.ArgumentTypeError(f"must be a number from 0 to 1, but is {text!r}")


def plain_answers(given: argparse.Namespace, tasks: Sequence[Task]) -> Answers:
    """What one server on one device says. Raises SweepError unless it answers everything."""
    flags = [*_model(given), "-tp", "1", *given.server_flags]
    answers, _ = served(given, tasks, flags, "one server")
    if answers.error is not None:
        raise SweepError(f"the plain server did not answer all tasks: {answers.error}")
    return answers


def pair_answers(
    given: argparse.Namespace, tasks: Sequence[Task], pair: ServerPair
) -> tuple[Answers, dict[str, int]]:
    """What a pair says; and how many requests its decode server did alone, by reason. Raises SweepError."""
    transfer = json.dumps({"kv_connector": given.connector})
    roles = [f"--prefill={shlex.join(pair.prefill)}", f"--decode={shlex.join(pair.decode)}"]
    flags = [*_model(given), *roles, "--kv-transfer-config", transfer, *given.server_flags]
    return served(given, tasks, flags, pair.name, _PAIR)


def _model(given: argparse.Namespace) -> list[str]:
    return [given.model] if given.model else []


def served(
    given: argparse.Namespace,
    tasks: Sequence[Task],
    flags: list[str],
    name: str,
    router: Sequence[str] | None = None,
) -> tuple[Answers, dict[str, int]]:
    """The answers of a server that is started for it; or those of a pair, by the command that starts its router, and
    how many of them came without a hand-over. Raises SweepError."""
    from lib.own_server import ServerFailed, own_server
    from lib.serving_client import RequestFailed
    from lib.sweep_client import ask_all, computed_alone

    try:
        with own_server(flags, router) as server:
            print(f"{name}: starting", file=sys.stderr, flush=True)
            server.wait_until_ready(given.ready_timeout)
            answers = asyncio.run(ask_all(server.url, tasks, given.concurrency, name))
            server.require_alive()
            alone = asyncio.run(computed_alone(server.url)) if router else {}
    except (ServerFailed, RequestFailed) as error:
        raise SweepError(str(error)) from None
    return answers, alone


def row_of(
    given: argparse.Namespace, tasks: Sequence[Task], plain: Answers, pair: ServerPair
) -> dict[str, Any]:
    """One line of the table; status PASS, or what is wrong."""
    try:
        answers, alone = pair_answers(given, tasks, pair)
    except SweepError as error:
        return {
            "configuration": pair.name,
            "status": f"FAIL: {error}",
            "identical": None,
            "strict_match": None,
        }
    share, missing = identical(answers, plain), answers.texts.count(None)
    status = "PASS"
    if missing:
        status = f"FAIL: {missing} of {len(tasks)} tasks were not answered; the first: {answers.error}"
    elif alone:
        status = "FAIL: the decode server did it alone: " + ", ".join(
            f"{n} {why}" for why, n in alone.items()
        )
    elif share < given.least_identical:
        status = "FAIL: too few texts are the plain server's"
    row = {"configuration": pair.name, "status": status, "identical": share}
    return row | {"strict_match": strict_match(tasks, answers), "texts": answers.texts}


def table(rows: Sequence[dict[str, Any]], plain_match: float | None) -> str:
    """Markdown. The column of strict matches is there where answers are known, and then the plain server's line too."""
    heads = ["Configuration", "Status", "Identical"] + ["Strict match"] * (plain_match is not None)
    lines = [heads, ["---"] * len(heads)]
    if plain_match is not None:
        lines.append(["one server, TP1", "", "", f"{plain_match:.4f}"])
    for row in rows:
        short = row["status"].splitlines()[0]
        cells = [row["configuration"], short, _shown(row["identical"])]
        lines.append(cells + [_shown(row["strict_match"])] * (plain_match is not None))
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _shown(share: float | None) -> str:
    return "" if share is None else f"{share:.4f}"


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    given = parse(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: _swept(given))


def _swept(given: argparse.Namespace) -> int:
    try:
        return sweep(given, load_tasks(given.tasks))
    except SweepError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def sweep(given: argparse.Namespace, tasks: Sequence[Task]) -> int:
    """All pairs, one after the other; what there is so far is saved after each."""
    plain = plain_answers(given, tasks)
    plain_match = strict_match(tasks, plain)
    rows: list[dict[str, Any]] = []
    for pair in given.pairs:
        rows.append(row_of(given, tasks, plain, pair))
        print(f"{pair.name}: {rows[-1]['status']}", file=sys.stderr, flush=True)
        if given.save_result is not None:
            command = shlex.join([".venv/bin/python", "scripts/pd_sweep.py", *given.command])
            content = {"command": command, "tasks": len(tasks), "plain": plain.texts, "pairs": rows}
            given.save_result.write_text(json.dumps(content, indent=1) + "\n")
    print(table(rows, plain_match))
    return 0 if all(row["status"] == "PASS" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
