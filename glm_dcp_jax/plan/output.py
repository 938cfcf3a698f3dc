"""What a command prints as its answer, where that can be printed."""

import contextlib
import errno
import io
import os
import signal
import sys

CLOSED = 128 + signal.SIGPIPE
"""The exit code of a program that writes into a pipe which nobody reads any more, as shells show it."""

_CANNOT = "error: standard output cannot be written"


def put_out(text: str) -> int:
    """Print a command's answer, with escapes for what the output's encoding lacks. Returns its exit code: 0; CLOSED,
    silently, if the reader has gone; 1 if it cannot be written, which stderr explains."""
    if sys.stdout is None:  # closed before the program began
        print(f"{_CANNOT}: {os.strerror(errno.EBADF)}", file=sys.stderr)
        return 1
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        print(text, flush=True)
    except BrokenPipeError:
        _forget()
        return CLOSED
    except OSError as error:
        _forget()
        reason = os.strerror(error.errno or errno.EIO)
        print(f"{_CANNOT}: {reason}", file=sys.stderr)
        return 1
    return 0


def _forget() -> None:
    """Python would try again at its end, and complain, unless what is left goes nowhere."""
    with contextlib.suppress(OSError, io.UnsupportedOperation):
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
