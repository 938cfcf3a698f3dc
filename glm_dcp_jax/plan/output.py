"""What a command prints as its answer, where that can be printed."""

import contextlib
import errno
import io
import os
import signal
import sys

CLOSED = 128 + signal.SIGPIPE
"""The exit code of a program that writes into a pipe which nobody reads any more, as shells show it."""


def put_out(text: str) -> int:
    """Print a command's answer. Returns its exit code: 0; CLOSED, silently, if the reader has gone; 1 if it cannot be
    written, which stderr explains."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _forget()
        return CLOSED
    except OSError as error:
        _forget()
        reason = os.strerror(error.errno or errno.EIO)
        print(f"error: standard output cannot be written: {reason}", file=sys.stderr)
        return 1
    return 0


def _forget() -> None:
    """Python would try again at its end, and complain, unless what is left goes nowhere."""
    with contextlib.suppress(OSError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
