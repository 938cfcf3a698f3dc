#!/usr/bin/env python
"""One server after another over the same tasks, each with another layout, path, format, or with drafts.

    .venv/bin/python scripts/layout_sweep.py [--limit 100] [--only WORD ...] [-- FLAGS OF ALL SERVERS]

Every server computes in float32, so that texts can be compared. Layouts, decode paths and drafts must not change a
text while records are float32: such a row is PASS where all texts are the first server's. What other record formats
change is said, and no failure. The table also has the share of right texts (strict match) and the seconds it took.

Exit code: 0; 1 if a server failed or a text changed that must not; 2 for wrong flags; 130 after an interrupt.
"""

import argparse
import asyncio
import json
import shlex
import sys
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from eval_task import TASKS, known_tasks
from lib.sweep_tasks import Answers, Task, identical, strict_match
from lib.task_flags import exit_code, parse_with_server_flags, positive, task_parser

_COMMON = ("--dtype", "float32", "--max-num-seqs", "8")
_DRAFTS = ("--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 3}))


class Setting(NamedTuple):
    """A server of the sweep. exact: whether its texts must be the first server's."""

    axis: str
    name: str
    flags: tuple[str, ...]
    exact: bool = True


def _over_ranks(*flags: str) -> tuple[str, ...]:
    return ("-tp", "4", "-dcp", "4", *flags)


SETTINGS = (
    Setting("first", "TP1, float32 records", ("-tp", "1")),
    Setting("DCP", "TP2/DCP2", ("-tp", "2", "-dcp", "2")),
    Setting("DCP", "TP4/DCP1", ("-tp", "4")),
    Setting("DCP", "TP4/DCP4", _over_ranks()),
    Setting("DCP", "TP8/DCP8", ("-tp", "8", "-dcp", "8")),
    Setting("path", "TP4/DCP4, queries", _over_ranks("--dcp-decode-path", "queries")),
    Setting("path", "TP4/DCP4, records", _over_ranks("--dcp-decode-path", "records")),
    Setting("path", "TP4/DCP4, bulk", _over_ranks("--dcp-decode-path", "bulk")),
    Setting("drafts", "TP1, MTP3", ("-tp", "1", *_DRAFTS)),
    Setting("drafts", "TP4/DCP4, MTP3", _over_ranks(*_DRAFTS)),
    *(
        Setting("records", f"TP4/DCP4, {name}", _over_ranks("--kv-cache-dtype", name), exact=False)
        for name in ("bfloat16", "fp8_ds_mla", "nvfp4_ds_mla")
    ),
)


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags; those of all servers behind `--` as server_flags. Exits with 2 for what cannot work."""
    parser = task_parser("layout_sweep.py", __doc__, TASKS, concurrency=8)
    parser.add_argument("--limit", type=positive, help="only the first so many tasks")
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="WORD",
        help="only servers whose name or axis has one of these words, behind the first one",
    )
    given = parse_with_server_flags(parser, arguments)
    first, *others = SETTINGS
    words = [word.lower() for word in given.only]
    kept = [
        one for one in others if not words or any(word in f"{one.axis} {one.name}".lower() for word in words)
    ]
    if not kept:
        parser.error(f"--only: no server has {' or '.join(given.only)} in its name")
    given.settings = [first, *kept]
    return given


def served(
    given: argparse.Namespace, tasks: Sequence[Task], setting: Setting
) -> tuple[Answers, dict[str, Any]]:
    """Its answers; and seconds, and tokens a round of drafts gave. Raises ServerFailed or RequestFailed."""
    from lib.own_server import own_server
    from lib.sweep_client import accepted_length, ask_all

    model = [given.model] if given.model else []
    with own_server([*model, *_COMMON, *setting.flags, *given.server_flags]) as server:
        print(f"{setting.name}: starting", file=sys.stderr, flush=True)
        server.wait_until_ready(given.ready_timeout)
        began = time.monotonic()
        answers = asyncio.run(ask_all(server.url, tasks, given.concurrency, setting.name))
        seconds = time.monotonic() - began
        server.require_alive()
        length = asyncio.run(accepted_length(server.url))
    return answers, {"seconds": round(seconds, 1), "accepted_length": length}


def sweep(given: argparse.Namespace, tasks: Sequence[Task]) -> int:
    """All servers, one after the other; what there is so far is saved after each. The exit code."""
    from lib.own_server import ServerFailed
    from lib.serving_client import RequestFailed

    rows: list[dict[str, Any]] = []
    first: Answers | None = None
    for setting in given.settings:
        try:
            answers, measured = served(given, tasks, setting)
        except (ServerFailed, RequestFailed) as error:
            if first is None:
                print(f"error: {error}", file=sys.stderr)
                return 1
            answers, measured = Answers([None] * len(tasks), str(error)), {}
        first = first or answers
        rows.append(_row(setting, tasks, answers, first) | measured)
        print(f"{setting.name}: {rows[-1]['status']}", file=sys.stderr, flush=True)
        if given.save_result is not None:
            command = shlex.join([".venv/bin/python", "scripts/layout_sweep.py", *given.command])
            content = {"command": command, "tasks": len(tasks), "servers": rows}
            given.save_result.write_text(json.dumps(content, indent=1) + "\n")
    print(table(rows))
    return 0 if all(not row["status"].startswith("FAIL") for row in rows) else 1


def _row(setting: Setting, tasks: Sequence[Task], answers: Answers, first: Answers) -> dict[str, Any]:
    share = identical(answers, first)
    status = "PASS" if setting.exact else "differs" if share < 1 else "the same"
    if answers.error is not None:
        status = f"FAIL: {answers.texts.count(None)} tasks were not answered; the first: {answers.error}"
    elif setting.exact and share < 1:
        status = "FAIL: texts changed"
    match = strict_match(tasks, answers)
    return {
        "server": setting.name,
        "status": status,
        "identical": share,
        "strict_match": match,
        "texts": answers.texts,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        ["Server", "Status", "Identical", "Strict match", "Tokens a round", "Seconds"],
        ["---", "---", "---:", "---:", "---:", "---:"],
    ]
    for row in rows:
        length, seconds = row.get("accepted_length"), row.get("seconds")
        lines.append(
            [
                row["server"],
                row["status"].splitlines()[0],
                f"{row['identical']:.2f}",
                f"{row['strict_match']:.2f}",
                "" if length is None else f"{length:.2f}",
                "" if seconds is None else f"{seconds:.0f}",
            ]
        )
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    given = parse(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: sweep(given, known_tasks(given.tasks, given.limit)))


if __name__ == "__main__":
    sys.exit(main())
