"""A server of a script's own: a child process on this machine, ended with it."""

import contextlib
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import NoReturn

import httpx

COMMAND = (sys.executable, "-m", "glm_dcp_jax.serve")
HOST = "127.0.0.1"
_POLL_SECONDS = 0.2
_STOP_SECONDS = 20
_SHOWN_LINES = 15
_TERMINATED = 128 + signal.SIGTERM


class ServerFailed(RuntimeError):
    """The server ended, or did not become ready; the message has the end of its log."""


@dataclass(frozen=True)
class OwnServer:
    """A child process that serves at `url`."""

    url: str
    process: subprocess.Popen[bytes]
    log: Path

    def require_alive(self) -> None:
        """Raises ServerFailed if it has ended."""
        if self.process.poll() is not None:
            end = "\n".join(self.log.read_text(errors="replace").splitlines()[-_SHOWN_LINES:])
            raise ServerFailed(f"the server ended with {self.process.returncode}; the end of its log:\n{end}")

    def wait_until_ready(self, seconds: float) -> None:
        """Until /health says so. Raises ServerFailed if the server ends before, or takes longer than `seconds`."""
        end = time.monotonic() + seconds
        with httpx.Client(trust_env=False) as client:
            while not self._is_healthy(client):
                self.require_alive()
                if time.monotonic() > end:
                    raise ServerFailed(
                        f"the server was not ready within {seconds:.0f} s; give it more with --ready-timeout"
                    )
                time.sleep(_POLL_SECONDS)

    def _is_healthy(self, client: httpx.Client) -> bool:
        with contextlib.suppress(httpx.HTTPError):
            return client.get(f"{self.url}/health").status_code == 200
        return False


@contextlib.contextmanager
def own_server(flags: Sequence[str], command: Sequence[str] | None = None) -> Iterator[OwnServer]:
    """A server with these flags on a free port, as long as the context is open; also SIGTERM ends it. command:
    what starts it, if not COMMAND.

    It gets a session of its own: Ctrl+C reaches this process, which then ends it in order.
    """
    port = _free_port()
    with tempfile.NamedTemporaryFile(prefix="own-server-", suffix=".log") as log:
        before = signal.signal(signal.SIGTERM, _leave)
        process = subprocess.Popen(
            [*(command or COMMAND), "--host", HOST, "--port", str(port), *flags],
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            yield OwnServer(f"http://{HOST}:{port}", process, Path(log.name))
        finally:
            _end(process)
            signal.signal(signal.SIGTERM, before)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        return listener.getsockname()[1]


def _leave(number: int, frame: FrameType | None) -> NoReturn:
    sys.exit(_TERMINATED)


def _end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
