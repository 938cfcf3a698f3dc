"""A process with one transport, driven by JSON lines, and the class by which a test drives it.

`python transport_peer.py NAME OPTIONS` makes the transport NAME with the JSON object OPTIONS and then does what it
reads on stdin; each call is answered on stdout by its number, in whatever order the calls end.
"""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import threading
import time
import zlib
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

HOST = "127.0.0.1"
SECRET = b"of the tests"
Shape = tuple[int, int, int]
"""Rows, padded rows, bytes of a row."""


def content(seed: int, index: int, shape: Shape) -> np.ndarray:
    """What array `index` of publication `seed` holds: [padded rows, row bytes] uint8."""
    _, padded, size = shape
    return np.random.default_rng([seed, index]).integers(0, 256, (padded, size), np.uint8)


def wait_until_stopped(pid: int) -> None:
    """Until all threads of a process that was sent SIGSTOP have stopped."""
    states = {""}
    while states != {"T"}:
        stats = [task.read_text() for task in Path(f"/proc/{pid}/task").glob("*/stat")]
        states = {stat.rpartition(")")[2].split()[0] for stat in stats}


class Served:
    """The methods that a PeerProcess can call."""

    def __init__(self, name: str, options: dict[str, Any]) -> None:
        from glm_dcp_jax.transfer.transports import make_transport

        self.transport = make_transport(name, host=HOST, secret=SECRET, options=options)
        self.kept: list[tuple[list[np.ndarray], list[int]]] = []

    def publish(self, shapes: list[Shape], seed: int) -> dict[str, Any]:
        import jax

        devices = jax.local_devices()
        arrays = [
            jax.device_put(content(seed, index, shape), devices[index % len(devices)])
            for index, shape in enumerate(shapes)
        ]
        return self.transport.publish(arrays, [rows for rows, _, _ in shapes])

    def retire(self, ticket_id: str) -> None:
        self.transport.retire(ticket_id)

    def fetch(
        self, ticket: dict, shapes: list[Shape], seed: int, seconds: float, give_up: float | None
    ) -> str:
        """`right`, `WRONG`, or the kind of the error."""
        from glm_dcp_jax.transfer.transports import TransportError

        start = time.monotonic()
        try:
            if give_up is None:
                arrays = self.transport.fetch(ticket, start + seconds)
            else:
                arrays = self.transport.fetch(
                    ticket, start + seconds, lambda: time.monotonic() > start + give_up
                )
        except TransportError as error:
            return error.kind
        wanted = [content(seed, index, shape)[: shape[0]] for index, shape in enumerate(shapes)]
        same = [
            got.shape == want.shape and got.dtype == np.uint8 and bool((got == want).all())
            for got, want in zip(arrays, wanted, strict=True)
        ]
        for array in arrays:
            array += 1  # the caller's own, to write to as it likes
        self.kept = [*self.kept[-3:], (arrays, [zlib.crc32(array) for array in arrays])]
        return "right" if all(same) else "WRONG"

    def untouched(self) -> bool:
        """Whether the last fetches' arrays are still as their caller left them."""
        return all([zlib.crc32(array) for array in arrays] == sums for arrays, sums in self.kept)

    def usage(self) -> dict[str, int]:
        return self.transport.usage()

    def footprint(self) -> dict[str, int]:
        """Resident KiB, file descriptors, threads."""
        status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
        return {
            "kib": int(status["VmRSS"].split()[0]),
            "files": len(os.listdir("/proc/self/fd")),
            "threads": int(status["Threads"]),
        }


class PeerProcess:
    """A Served in a process of its own; its methods can be called by name."""

    def __init__(self, name: str, options: dict[str, Any], environment: dict[str, str]) -> None:
        own = {
            "JAX_PLATFORMS": "cpu",
            "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
            "PJRT_NPROC": "8",
        }
        self.process = subprocess.Popen(
            [sys.executable, __file__, name, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | own | environment,
        )
        self._numbers = itertools.count()
        self._guard = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def begin(self, method: str, **arguments: Any) -> Future[Any]:
        """Start a call; the future gets its result, or a ConnectionError if the process ends."""
        future: Future[Any] = Future()
        with self._guard:
            number = next(self._numbers)
            self._waiting[number] = future
            assert self.process.stdin is not None
            print(json.dumps([number, method, arguments]), file=self.process.stdin, flush=True)
        return future

    def call(self, method: str, **arguments: Any) -> Any:
        return self.begin(method, **arguments).result(timeout=60)

    def publish(self, shapes: list[Shape], seed: int = 0) -> dict[str, Any]:
        return self.call("publish", shapes=shapes, seed=seed)

    def begin_fetch(
        self,
        ticket: dict,
        shapes: list[Shape],
        seed: int = 0,
        seconds: float = 30.0,
        give_up: float | None = None,
    ) -> Future[str]:
        return self.begin("fetch", ticket=ticket, shapes=shapes, seed=seed, seconds=seconds, give_up=give_up)

    def fetch(self, *arguments: Any, **named: Any) -> str:
        return self.begin_fetch(*arguments, **named).result(timeout=60)

    def stop(self) -> None:
        """Stop it with SIGSTOP, and wait until it has: its threads take their time."""
        self.process.send_signal(signal.SIGSTOP)
        wait_until_stopped(self.process.pid)

    def go_on(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        """kill -9, also of a process that is stopped or has ended."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            number, result, error = json.loads(line)
            future = self._waiting.pop(number)
            if error:
                future.set_exception(RuntimeError(error))
            else:
                future.set_result(result)
        for future in self._waiting.values():
            future.set_exception(ConnectionError("the process has ended"))


def _main(name: str, options: str) -> None:
    # Libraries may print: answers have a file of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    served = Served(name, json.loads(options))
    guard = threading.Lock()

    def answer(number: int, method: str, arguments: dict[str, Any]) -> None:
        result, error = None, ""
        try:
            result = getattr(served, method)(**arguments)
        except Exception as failure:
            error = f"{type(failure).__name__}: {failure}"
        with guard:
            print(json.dumps([number, result, error]), file=answers, flush=True)

    for line in sys.stdin:
        threading.Thread(target=answer, args=json.loads(line), daemon=True).start()
    served.transport.close()
    # Some libraries' threads do not survive an interpreter that is being taken apart under them.
    answers.flush()
    os._exit(0)


if __name__ == "__main__":
    _main(*sys.argv[1:])
