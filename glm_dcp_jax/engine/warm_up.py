"""Compiling before serving: two programs at a time, with a progress bar, and it can be told to stop."""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from queue import Empty, SimpleQueue

from glm_dcp_jax.progress import progress

_THREADS = 2

Compilation = Callable[[], object]
"""Compiles one program, and keeps it."""


def compile_all(compilations: Sequence[Compilation], stopped: Callable[[], bool]) -> bool:
    """Run them all. False if `stopped` ended that early. Raises what one of them raised."""
    done = _in_background(compilations, stopped)
    for _ in progress("Compiling steps", unit="step", steps=compilations):
        failure = _next_of(done, stopped)
        if stopped():
            return False
        if failure is not None:
            raise failure
    return True


def _in_background(
    compilations: Sequence[Compilation], stopped: Callable[[], bool]
) -> "SimpleQueue[Exception | None]":
    """Start to compile; the queue gets one entry for each that is done, the exception of one that failed.

    In daemon threads: a process that is told to stop does not wait for a compilation.
    """
    waiting: Iterator[Compilation] = iter(compilations)
    done: SimpleQueue[Exception | None] = SimpleQueue()

    def work() -> None:
        while not stopped() and (compilation := next(waiting, None)) is not None:
            try:
                compilation()
                done.put(None)
            except Exception as error:
                done.put(error)

    for _ in range(_THREADS):
        threading.Thread(target=work, name="compile", daemon=True).start()
    return done


def _next_of(done: "SimpleQueue[Exception | None]", stopped: Callable[[], bool]) -> Exception | None:
    """The queue's next entry; None at once when `stopped`."""
    while not stopped():
        with contextlib.suppress(Empty):
            return done.get(timeout=0.1)
    return None
