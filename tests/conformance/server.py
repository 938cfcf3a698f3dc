"""A real server of the built-in model, as users start it."""

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import NamedTuple

import httpx

START_SECONDS = 300


class Running(NamedTuple):
    """Where a server listens, and its process."""

    url: str
    pid: int


@contextlib.contextmanager
def served(*flags: str) -> Iterator[Running]:
    """A server with these flags, which must end cleanly."""
    command = [sys.executable, "-m", "glm_dcp_jax.serve", "--port", "0", *flags]
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
    )
    lines: list[str] = []
    listening = threading.Event()

    def read() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line)
            if "is ready at http" in line:
                listening.set()
        listening.set()

    threading.Thread(target=read, daemon=True).start()
    assert listening.wait(START_SECONDS) and process.poll() is None, "".join(lines)[-4000:]
    [url] = [line.split("is ready at ")[1].split("/v1")[0].strip() for line in lines if "is ready at" in line]
    try:
        yield Running(url, process.pid)
        assert process.poll() is None, "the server died:\n" + "".join(lines)[-4000:]
    finally:
        process.terminate()
        code = process.wait(timeout=60)
    assert code == 0, "".join(lines)[-4000:]
    assert not [line for line in lines if "Traceback" in line], "".join(lines)[-8000:]


def wait_until_idle(url: str, seconds: float = 60) -> dict[str, float]:
    """The metrics by name and labels, once nothing runs and nothing waits."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = metrics(url)
        if not any(
            value for name, value in found.items() if "num_requests_" in name and "by_reason" not in name
        ):
            return found
        time.sleep(0.2)
    raise AssertionError(f"requests are still there: {found}")


def metrics(url: str) -> dict[str, float]:
    """What /metrics says."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    return {
        name: float(value)
        for name, value in (line.rsplit(" ", 1) for line in lines if line[:1] not in ("#", ""))
    }
