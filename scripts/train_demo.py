#!/usr/bin/env python
"""Train the built-in model from nothing, on the CPU: about two hours on two cores.

    .venv/bin/python scripts/train_demo.py [--work DIR] [--out DIR]

An interrupted training goes on where it was (at most two minutes are lost). The working directory has log.jsonl, a
line every few steps and the shares of held-out problems after each stage, and loss.png.

Exit code: 0; 2 for flags that cannot work; 130 after an interrupt, which loses nothing.
"""

import argparse
import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
_SHIPPED = _HERE.parent / "glm_dcp_jax" / "demo" / "model"
_ALLOCATOR = {
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TOP_PAD_": "1000000000",
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
}
"""glibc's: keep what a step frees for the next one. A step takes a fifth longer where the kernel gives it anew."""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """The flags. Exits with 2 for what cannot work."""
    parser = argparse.ArgumentParser(
        prog="train_demo.py",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--work",
        type=Path,
        default=Path("demo-training"),
        help="where the training keeps what it needs to go on, and its log (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, default=_SHIPPED, help="the checkpoint's directory (default: the package's)"
    )
    parser.add_argument(
        "--steps",
        type=_positive,
        help="of every stage, in place of its own: to see whether all works; such a model knows nothing",
    )
    return parser.parse_args(arguments)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be an integer from 1 on, but is {text!r}")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit code."""
    given = parse(arguments)
    os.environ["JAX_PLATFORMS"] = "cpu"
    if arguments is None and not os.environ.keys() >= _ALLOCATOR.keys():  # read when a process starts
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | _ALLOCATOR)
    from demo_training.plan import train

    try:
        train(given.work, given.out, given.steps)
    except KeyboardInterrupt:
        print("interrupted; start it again to go on", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
