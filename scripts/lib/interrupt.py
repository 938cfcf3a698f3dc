"""Ctrl+C in scripts that spend minutes inside XLA, where Python would answer only afterwards, with a traceback."""

import os
import signal
import sys
import threading

INTERRUPTED = 130


def exit_on_interrupt(name: str) -> None:
    """From now on SIGINT ends the process at once, whatever it does: one line on stderr, exit code 130."""
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.signal(signal.SIGINT, lambda *_: None)  # Python's own handler writes to the pipe first
    signal.set_wakeup_fd(told)

    def wait() -> None:
        os.read(heard, 1)
        os.write(sys.stderr.fileno(), f"{name}: interrupted\n".encode())
        os._exit(INTERRUPTED)

    threading.Thread(target=wait, daemon=True).start()
