"""One connection of `wire`: frames of a JSON object and raw buffers, with deadlines. Plain sockets, no jax.

A frame is a header (magic, version, buffer count, length of the JSON), the buffers' sizes, the JSON and the buffers.
"""

import contextlib
import json
import select
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

FRAME_SECONDS = 120.0
"""What a frame that has begun may take where its caller sets no deadline."""
MAX_JSON_BYTES = 1 << 20
MAX_BUFFERS = 4096
MAGIC = b"GDJx"
VERSION = 1

_HEADER = struct.Struct(">4sHHI")  # magic, version, buffers, JSON bytes
_MOST_PARTS = 512  # the kernel takes at most 1,024 parts in one sendmsg
_CANCEL_POLL_SECONDS = 0.05

PeerErrorKind = Literal["lost", "timeout", "auth", "protocol", "refused", "cancelled"]


class PeerError(Exception):
    """A connection or a request that failed; `kind` says how.

    lost: the peer or the connection is gone, or was never there. timeout: the deadline passed. auth: the secrets
    differ. protocol: what came is not ours, or more than was expected. refused: RemoteError. cancelled: by the caller.
    """

    def __init__(self, kind: PeerErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class RemoteError(PeerError):
    """The peer answered that it will not or cannot, in a kind and words of its own. The connection goes on."""

    def __init__(self, remote_kind: str, message: str) -> None:
        super().__init__("refused", message)
        self.remote_kind = remote_kind


def never() -> bool:
    """Never cancelled."""
    return False


class Peer:
    """One authenticated connection, made by `connect` or a Listener.

    Threads may share it: frames do not mix, requests take turns, and `close` wakes whoever waits.
    """

    def __init__(self, connection: socket.socket, name: str) -> None:
        self.name = name
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A host that vanishes without a word is noticed after 30 + 3 x 10 seconds.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        self._socket = connection
        self._guard = threading.Lock()
        self._users = 0
        self._ended = False
        self._sending = threading.Lock()
        self._exchanging = threading.Lock()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def ended(self) -> bool:
        """Whether the connection has been closed or has failed."""
        return self._ended

    def send(
        self,
        message: dict[str, Any],
        buffers: Sequence[memoryview | np.ndarray] = (),
        deadline: float | None = None,
        cancelled: Callable[[], bool] = never,
    ) -> None:
        """Send one frame. buffers: contiguous or not, of any shape and dtype; their bytes travel.

        Raises PeerError; ValueError for a message or a number of buffers that no receiver takes.
        """
        text = json.dumps(message).encode()
        if len(text) > MAX_JSON_BYTES:
            raise ValueError(f"a message of {len(text)} bytes; at most {MAX_JSON_BYTES}: send it in parts")
        if len(buffers) > MAX_BUFFERS:
            raise ValueError(f"a message with {len(buffers)} buffers; at most {MAX_BUFFERS}")
        parts = [_bytes(buffer) for buffer in buffers]
        header = _HEADER.pack(MAGIC, VERSION, len(parts), len(text))
        sizes = struct.pack(f">{len(parts)}Q", *(part.nbytes for part in parts))
        due = _due(deadline)
        if not self._sending.acquire(timeout=max(0.0, due - time.monotonic())):
            raise PeerError("timeout", f"{self.name}: another message was still being sent")
        try:
            with self.use():
                self.write([memoryview(header + sizes + text), *parts], due, cancelled)
        finally:
            self._sending.release()

    def receive(
        self, deadline: float | None, most_bytes: int = 0, cancelled: Callable[[], bool] = never
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """The next frame: its message, and its buffers as fresh uint8 arrays [n_i].

        deadline: None waits for ever for a frame to begin. most_bytes: what all buffers together may have: a frame
        that announces more is a protocol error before anything is allocated. cancelled: asked 20 times a second.

        Raises PeerError.
        """
        with self.use():
            header = memoryview(bytearray(_HEADER.size))
            self.read(header[:1], deadline, cancelled)
            due = _due(deadline)
            self.read(header[1:], due, cancelled)
            magic, version, count, length = _HEADER.unpack(header)
            if magic != MAGIC or version != VERSION:
                raise self.failed("protocol", "sent something that is not a frame")
            if length > MAX_JSON_BYTES or count > MAX_BUFFERS:
                raise self.failed("protocol", f"announced {length} bytes of JSON and {count} buffers")
            table = self.read(memoryview(bytearray(8 * count)), due, cancelled)
            sizes = struct.unpack(f">{count}Q", table)
            if sum(sizes) > most_bytes:
                raise self.failed(
                    "protocol", f"announced {sum(sizes)} bytes where {most_bytes} were expected"
                )
            message = self._message(self.read(memoryview(bytearray(length)), due, cancelled))
            arrays = [np.empty(size, np.uint8) for size in sizes]
            for array in arrays:
                self.read(array.data, due, cancelled)
            return message, arrays

    def exchange(
        self,
        message: dict[str, Any],
        deadline: float,
        most_bytes: int = 0,
        cancelled: Callable[[], bool] = never,
    ) -> tuple[dict[str, Any], list[np.ndarray]]:
        """Send a message and receive the answer to it, as `receive` does.

        Raises RemoteError if the answer is {"error": {"kind": ..., "message": ...}}, PeerError otherwise.
        """
        if not self._exchanging.acquire(timeout=max(0.0, deadline - time.monotonic())):
            raise PeerError("timeout", f"{self.name}: another request was still waiting for its answer")
        try:
            self.send(message, deadline=deadline, cancelled=cancelled)
            answer, arrays = self.receive(deadline, most_bytes, cancelled)
        finally:
            self._exchanging.release()
        error = answer.get("error")
        if isinstance(error, dict):
            raise RemoteError(str(error.get("kind")), f"{self.name}: {error.get('message')}")
        return answer, arrays

    def request(self, message: dict[str, Any], deadline: float) -> dict[str, Any]:
        """`exchange` where the answer has no buffers."""
        return self.exchange(message, deadline)[0]

    def refuse(self, kind: str, message: str, deadline: float | None = None) -> None:
        """Answer a request so that the other side's `request` raises RemoteError(kind, message)."""
        self.send({"error": {"kind": kind, "message": message}}, deadline=deadline)

    def close(self) -> None:
        """End the connection; idempotent, and from any thread. Whoever waits on it gets a PeerError "lost"."""
        with self._guard:
            self._ended = True
            with contextlib.suppress(OSError):  # the peer was first, or this is the second call
                self._socket.shutdown(socket.SHUT_RDWR)
            self._release()

    @contextlib.contextmanager
    def use(self) -> Iterator[None]:
        """Keep the file descriptor while a thread is in a call: a number closed under it could be another's by then."""
        with self._guard:
            if self._ended:
                raise PeerError("lost", f"{self.name}: the connection has ended")
            self._users += 1
        try:
            yield
        except (
            BaseException
        ):  # also of an interrupt or of no memory: what is left of the frame cannot be found again
            self.close()
            raise
        finally:
            with self._guard:
                self._users -= 1
                self._release()

    def _release(self) -> None:
        if self._ended and not self._users:
            self._socket.close()

    def failed(self, kind: PeerErrorKind, what: str) -> PeerError:
        """End the connection, and return the error to raise."""
        self.close()
        return PeerError(kind, f"{self.name}: {what}")

    def _message(self, text: memoryview) -> dict[str, Any]:
        try:
            message = json.loads(bytes(text))
        except (ValueError, RecursionError):
            raise self.failed("protocol", "sent a frame whose JSON cannot be read") from None
        if not isinstance(message, dict):
            raise self.failed("protocol", "sent JSON that is not an object")
        return message

    def read(
        self, view: memoryview, deadline: float | None, cancelled: Callable[[], bool] = never
    ) -> memoryview:
        """Receive raw bytes, outside any frame, until `view` is full, and return it; only within `use`."""
        have = 0
        while have < view.nbytes:
            self._left(deadline, cancelled)  # also of a peer that never lets the socket run dry
            try:
                got = self._socket.recv_into(view[have:])
            except (BlockingIOError, InterruptedError):
                self._wait(select.POLLIN, deadline, cancelled)
                continue
            except OSError as error:
                raise self.failed("lost", f"the connection was lost: {error}") from None
            if not got:
                raise self.failed("lost", "the other side closed the connection")
            have += got
        return view

    def write(self, parts: list[memoryview], deadline: float, cancelled: Callable[[], bool] = never) -> None:
        """Send raw bytes, outside any frame; only within `use`."""
        parts = [part for part in parts if part.nbytes]
        while parts:
            self._left(deadline, cancelled)
            try:
                sent = self._socket.sendmsg(parts[:_MOST_PARTS], [], socket.MSG_NOSIGNAL)
            except (BlockingIOError, InterruptedError):
                self._wait(select.POLLOUT, deadline, cancelled)
                continue
            except OSError as error:
                raise self.failed("lost", f"the connection was lost: {error}") from None
            done = 0
            while done < len(parts) and sent >= parts[done].nbytes:
                sent -= parts[done].nbytes
                done += 1
            parts = parts[done:]
            if sent:
                parts[0] = parts[0][sent:]

    def _left(self, deadline: float | None, cancelled: Callable[[], bool]) -> float | None:
        """Seconds until the deadline; raises if there are none, or the caller has given up."""
        if cancelled():
            raise self.failed("cancelled", "given up by the caller")
        left = None if deadline is None else deadline - time.monotonic()
        if left is not None and left <= 0:
            raise self.failed("timeout", "nothing came in time")
        return left

    def _wait(self, event: int, deadline: float | None, cancelled: Callable[[], bool]) -> None:
        """Until the socket is ready, or broken, which the next call on it will say."""
        poller = select.poll()
        poller.register(self._socket.fileno(), event)
        ready = False
        while not ready:
            left = self._left(deadline, cancelled)
            if cancelled is not never:
                left = _CANCEL_POLL_SECONDS if left is None else min(left, _CANCEL_POLL_SECONDS)
            # Rounded up: a wait of 0.4 ms as 0 would spin.
            ready = bool(poller.poll(None if left is None else int(left * 1000) + 1))


def _due(deadline: float | None) -> float:
    return time.monotonic() + FRAME_SECONDS if deadline is None else deadline


def _bytes(buffer: memoryview | np.ndarray) -> memoryview:
    array = np.ascontiguousarray(buffer)
    return array.reshape(-1).view(np.uint8).data if array.size else memoryview(b"")
