"""Ctrl-C and SIGTERM at any moment: while modules are imported, programs are compiled, or threads of orbax's save.

KeyboardInterrupt would not do: whoever is under way may swallow it or make another error of it, asyncio puts a handler
of its own in place of Python's, and threads that go on writing complain of what is gone. So the handler itself tidies
up and ends the process.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

INTERRUPTED = 130
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_to_tidy: list[Callable[[], None]] = []


def end_at_once() -> None:
    """From now on these signals end the process: with code 130, in one line, and nothing is left."""
    for each in _SIGNALS:
        signal.signal(each, _end)


@contextmanager
def tidied_by(tidy: Callable[[], None]) -> Iterator[None]:
    """What a signal has to undo while the block runs."""
    _to_tidy.append(tidy)
    try:
        yield
    finally:
        _to_tidy.remove(tidy)


def come_too_late() -> None:
    """From now on they do nothing: all is made, and the process ends by itself in a moment.

    Ignored, since Python takes handlers away while it ends, and then a signal would make a failure of it.
    """
    for each in _SIGNALS:
        if signal.getsignal(each) is _end:
            signal.signal(each, signal.SIG_IGN)


def _end(number: int, frame: FrameType | None) -> None:
    for each in _SIGNALS:
        signal.signal(each, signal.SIG_IGN)  # a second one would interrupt the tidying
    for tidy in _to_tidy:
        tidy()
    # Not print: the signal may have come while that holds its lock. A bar may stand in the line.
    os.write(2, b"\n" * bool(_to_tidy) + b"interrupted: nothing is left of it\n")
    os._exit(INTERRUPTED)
