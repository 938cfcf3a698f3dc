"""One of a pair's processes."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_TETHER = "glm_dcp_jax.serve.pair.tether"
_LAST_LINES_SECONDS = 2.0


class Child:
    """A module run as a process, whose output goes to stderr, each line behind the process's name.

    It gets no signals from the terminal, so that who started it can end a pair in order; it is killed with that one.
    """

    def __init__(self, name: str, module: str, arguments: Sequence[str], more: dict[str, str]) -> None:
        """more: environment variables besides those that there are. Call it in the main thread, which lives longest."""
        self.name = name
        self._process = subprocess.Popen(
            [sys.executable, "-m", _TETHER, str(os.getpid()), module, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=os.environ | {"PYTHONUNBUFFERED": "1"} | more,
            start_new_session=True,
        )
        self._forwarding = threading.Thread(target=self._forward, name=f"log of {name}", daemon=True)
        self._forwarding.start()

    @property
    def code(self) -> int | None:
        """Its exit code as a shell has it, 128 and the signal's number for one that was killed; None while it runs."""
        code = self._process.poll()
        return 128 - code if code is not None and code < 0 else code

    def stop(self) -> None:
        """Ask it to end."""
        self._process.terminate()

    def kill(self) -> None:
        """End it and all that it has started, now; what it has said last is shown."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._forwarding.join(_LAST_LINES_SECONDS)

    def _forward(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            # One write a line, so that those of several processes do not mix.
            sys.stderr.write(f"[{self.name}] {line.rstrip()}\n")
            sys.stderr.flush()
