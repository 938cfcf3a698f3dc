"""What the scripts that ask servers tasks have in common on their command lines."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from lib.sweep_tasks import BadTasks

_TASKS = Path(__file__).parents[1] / "tasks"


def positive(text: str) -> int:
    """A flag's whole number from 1 on."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 on, but is {text!r}")
    return int(text)


def task_parser(prog: str, about: str, tasks: str, concurrency: int) -> argparse.ArgumentParser:
    """A parser that knows the flags of all of them. tasks: the default file, in scripts/tasks."""
    parser = argparse.ArgumentParser(
        prog=prog, description=about, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--model", help="a checkpoint's directory or name (default: the built-in model)")
    parser.add_argument(
        "--tasks", type=Path, default=_TASKS / tasks, help=f"default: {tasks} in scripts/tasks"
    )
    parser.add_argument(
        "--concurrency", type=positive, default=concurrency, help="requests at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--ready-timeout", type=positive, default=1800, help="seconds for a server to start (default: 1800)"
    )
    parser.add_argument("--save-result", type=Path, metavar="FILE", help="write all of it as JSON too")
    return parser


def parse_with_server_flags(parser: argparse.ArgumentParser, arguments: list[str]) -> argparse.Namespace:
    """The flags; those of servers behind `--` as server_flags, all words as command. Exits with 2 for wrong ones."""
    own, server_flags = arguments, []
    if "--" in arguments:
        cut = arguments.index("--")
        own, server_flags = arguments[:cut], arguments[cut + 1 :]
    given = parser.parse_args(own)
    if given.save_result is not None and not given.save_result.parent.is_dir():
        parser.error(f"--save-result: {given.save_result.parent} is no directory; make it first")
    given.server_flags, given.command = server_flags, arguments
    return given


def exit_code(run: Callable[[], int]) -> int:
    """That of a run; 2 for tasks that cannot be used, 130 after an interrupt."""
    try:
        return run()
    except BadTasks as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
