#!/usr/bin/env python
"""How many tasks of a file a server gets right, through its HTTP API, greedily.

    .venv/bin/python scripts/eval_task.py [--model DIR] [--tasks FILE] [--limit N] [-- SERVER FLAGS]
    .venv/bin/python scripts/eval_task.py --base-url http://127.0.0.1:8000 ...

The first form starts a server of its own, of the built-in model unless --model says otherwise, on a free port of this
machine. The table has the share of right texts of each kind of task (strict match: the last number of the text, or all
of it); where the server drafts, also how many tokens a round gave.

A task file has a JSON object a line: {"prompt": text or token ids, "answer": text, "max_tokens": integer, "stop": text,
"kind": text}, all but prompt and answer optional.

Exit code: 0; 1 if a task was not answered or the server failed; 2 for flags that cannot work; 130 after an interrupt.
"""

import argparse
import asyncio
import contextlib
import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from lib.sweep_tasks import Answers, BadTasks, Task, load_tasks, strict_match
from lib.task_flags import exit_code, parse_with_server_flags, positive, task_parser

TASKS = "demo.jsonl"


def parse(arguments: list[str]) -> argparse.Namespace:
    """The flags; those of the server behind `--` as server_flags. Exits with 2 for what cannot work."""
    parser = task_parser("eval_task.py", __doc__, TASKS, concurrency=8)
    parser.add_argument(
        "--base-url", metavar="URL", help="ask a server that runs, in place of one of its own"
    )
    parser.add_argument("--limit", type=positive, help="only the first so many tasks")
    given = parse_with_server_flags(parser, arguments)
    if given.base_url is not None and (given.model or given.server_flags):
        parser.error("--base-url is a server that runs already: leave --model and the flags behind -- away")
    return given


def known_tasks(file: Path, limit: int | None) -> list[Task]:
    """Those that have an answer. Raises BadTasks if there are none."""
    tasks = [task for task in load_tasks(file) if task.answer is not None][:limit]
    if not tasks:
        raise BadTasks(f"{file} has no task with an answer")
    return tasks


@contextlib.contextmanager
def _server(given: argparse.Namespace) -> Iterator[tuple[str, Callable[[], None]]]:
    """Where to send requests, and what to call to see that a server of its own is still there."""
    from lib.own_server import own_server

    if given.base_url is not None:
        yield given.base_url.rstrip("/"), lambda: None
        return
    with own_server([*([given.model] if given.model else []), *given.server_flags]) as server:
        print("the server starts", file=sys.stderr, flush=True)
        server.wait_until_ready(given.ready_timeout)
        yield server.url, server.require_alive


def rows_of(tasks: Sequence[Task], answers: Answers) -> list[dict[str, Any]]:
    """A row for each kind, in the order of their names, and one for all."""
    rows = []
    for kind in [*sorted({task.kind for task in tasks}), None]:
        places = [at for at, task in enumerate(tasks) if kind in (None, task.kind)]
        texts = [answers.texts[at] for at in places]
        match = strict_match([tasks[at] for at in places], Answers(texts))
        rows.append({"kind": "all" if kind is None else kind, "tasks": len(places), "strict_match": match})
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [["Kind", "Tasks", "Strict match"], ["---", "---:", "---:"]]
    lines += [[row["kind"], str(row["tasks"]), f"{row['strict_match']:.4f}"] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def evaluate(given: argparse.Namespace, tasks: Sequence[Task]) -> int:
    """Asks, prints, saves; the exit code."""
    from lib.own_server import ServerFailed
    from lib.serving_client import RequestFailed
    from lib.sweep_client import accepted_length, ask_all

    try:
        with _server(given) as (url, require_alive):
            began = time.monotonic()
            answers = asyncio.run(ask_all(url, tasks, given.concurrency, "tasks"))
            seconds = time.monotonic() - began
            require_alive()
            length = asyncio.run(accepted_length(url))
    except (ServerFailed, RequestFailed) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    rows = rows_of(tasks, answers)
    print(table(rows))
    if length is not None:
        print(f"\nTokens a round of drafts gave: {length:.3f}")
    if given.save_result is not None:
        command = shlex.join([".venv/bin/python", "scripts/eval_task.py", *given.command])
        content = {"command": command, "seconds": round(seconds, 1), "accepted_length": length, "kinds": rows}
        given.save_result.write_text(json.dumps(content | {"texts": answers.texts}, indent=1) + "\n")
    if answers.error is None:
        return 0
    print(
        f"error: {answers.texts.count(None)} tasks were not answered; the first: {answers.error}",
        file=sys.stderr,
    )
    return 1


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    given = parse(sys.argv[1:] if arguments is None else arguments)
    return exit_code(lambda: evaluate(given, known_tasks(given.tasks, given.limit)))


if __name__ == "__main__":
    sys.exit(main())
