"""jax.experimental.transfer, wrapped against what it does when used plainly.

The library moves device arrays between processes over TCP, staged in host memory on both sides. What is done about its
traps, all of which were observed:

* Without transport addresses a pull from another process kills the producer: they are always given, on our own host.
* Default buffers take gigabytes of host memory: ours are small.
* Nothing compares shapes, dtypes or shardings; a mismatch of equal bytes is silently wrong. So only whole uint8 arrays
  on single devices travel, and the consumer asks for exactly what the ticket, made by the producer, says.
* A uuid can be pulled once; a second pull hangs. A ticket that was fetched here is refused here; fetched by another
  process, it is a timeout.
* A pull of something unknown, or of a stopped producer, hangs for ever. The deadline is ours. Poisoning the connection
  ends the pull, and every other on it, so each fetch has a connection to itself.
* Where nobody listens the library goes on trying: whether somebody does is asked first.
* A pull that is poisoned while the producer is stopped, or has just gone on, costs the producer staging buffers for
  good: one that was often stopped serves nobody any more. So a pull that was given up is left alone until it ends, or
  the producer has shown for a while, by answering another one on the same connection, that it has nothing to send;
  what arrives meanwhile is the library's, and is dropped.
* What is never pulled stays in memory for ever: `retire` overwrites its uuid with an empty list, which also turns a
  late pull into an error. That empty entry expires, which is noticed only while somebody publishes: a heartbeat.

What is left: a consumer that is killed while its producer is stopped costs buffers as above, as many as
its pulls would have used; one that is stopped during a pull may hold all buffers until it is gone.

It carries no proof of identity, and four zero bytes sent to its port abort the process: loopback or a private network.
"""

import datetime
import secrets
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import transfer
from jax.sharding import SingleDeviceSharding

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer.peer import never
from glm_dcp_jax.transfer.transports.idle import IdleConnections
from glm_dcp_jax.transfer.transports.interface import (
    Ticket,
    TransportError,
    TransportErrorKind,
    check_ticket,
    check_time,
    new_ticket,
)

SOCKETS = 4
PARALLEL_COPIES = 16
COPY_BYTES = 4 << 20
"""Bytes of one of the library's staging buffers; it reserves about 3 x PARALLEL_COPIES of them."""
MOST_PUBLISHED_BYTES = PARALLEL_COPIES * COPY_BYTES
"""A publication of more is made alone."""
TOMBSTONE_SECONDS = 60.0
"""How long a pull of a retired ticket fails at once; later it waits for its deadline."""
QUARANTINE_SECONDS = 60.0
"""How long a pull that was given up is left to a producer that does not answer."""
FLOW_SECONDS = 5.0
"""How long one is left to a producer that does."""
HEARTBEAT_SECONDS = 0.5
_HEARTBEAT_UUID = 1 << 63  # tickets have 63 bits; it has an empty list, so that a pull of it fails at once
_SPENT_REMEMBERED = 4096
_MOST_WAIT_SECONDS = 0.002
_QUARANTINE_POLL_SECONDS = 0.05

_MEANINGS: tuple[tuple[str, TransportErrorKind], ...] = (
    ("out of range 0", "unknown_ticket"),  # the empty list that `retire` leaves
    ("already been fetched", "unknown_ticket"),
    ("Pull expired", "unknown_ticket"),
    ("slicing", "corrupt"),
    ("out of range", "corrupt"),
    ("deleted before transfers completed", "corrupt"),
)
"""The library's words for what else than a lost peer can happen to a pull."""


@dataclass(eq=False)
class _GivenUp:
    connection: Any
    pulled: list[jax.Array]
    probe: list[jax.Array]
    until: float

    @property
    def over(self) -> bool:
        """Whether it has arrived or failed, or has been waited for long enough."""
        if self.probe and _ready(self.probe):  # the producer runs, and will soon have sent what it has at all
            self.until = min(self.until, time.monotonic() + FLOW_SECONDS)
            self.probe = []
        return _ready(self.pulled) or time.monotonic() > self.until


class JaxTransport:
    """As Transport; a ticket can be fetched once. D's arrays pass through its first local device.

    host, port: where this process listens, port 0 being any free one. advertise: the host that consumers are told.
    """

    name = "jax"

    def __init__(self, host: str, port: int = 0, advertise: str = "") -> None:
        self._device = jax.local_devices()[0]
        self._server = _serve(host, port, self._device)
        self._address = f"{_bracketed(advertise or host)}:{self._server.address().rpartition(':')[2]}"
        self._start = secrets.token_hex(8)
        self._idle: IdleConnections[Any] = IdleConnections(lambda connection: connection._poison_connection())
        self._guard = threading.Condition()
        self._published: dict[str, tuple[int, int]] = {}  # ticket id -> uuid, bytes
        self._spent: OrderedDict[str, None] = OrderedDict()
        self._quarantine: list[_GivenUp] = []
        self._closed = threading.Event()
        threading.Thread(target=self._beat, name="transfer heartbeat", daemon=True).start()

    def publish(self, arrays: Sequence[jax.Array], rows: Sequence[int]) -> Ticket:
        """As Transport.publish."""
        uuid = secrets.randbits(63)
        ticket = new_ticket(
            arrays, rows, transport=self.name, address=self._address, start=self._start, uuid=uuid
        )
        moved = [array for array, count in zip(arrays, rows, strict=True) if count and array.size]
        size = sum(array.nbytes for array in moved)
        with self._guard:
            if not self._has_room(size):
                # Whoever waited here would keep the consumer from saying what it has read: it asks again, later.
                raise TransportError(
                    "busy",
                    f"no room for {size} bytes: {self._held()} are published, of at most {MOST_PUBLISHED_BYTES}",
                )
            self._published[ticket["id"]] = uuid, size
            self._server.await_pull(uuid, moved)
        return ticket

    def retire(self, ticket_id: str) -> None:
        """As Transport.retire. A pull that has begun keeps the arrays until it ends."""
        with self._guard:
            uuid, _ = self._published.pop(ticket_id, (None, 0))
            if uuid is None:
                return
            # The library takes local wall-clock time. A clock that is set meanwhile moves the end of a tombstone only.
            until = datetime.datetime.now() + datetime.timedelta(seconds=TOMBSTONE_SECONDS)
            self._server.await_pull(uuid, [], timeout=until)
            self._guard.notify_all()

    def fetch(
        self, ticket: Ticket, deadline: float, cancelled: Callable[[], bool] = never
    ) -> list[np.ndarray]:
        """As Transport.fetch. A ticket that the producer never had is a "timeout": the library does not say."""
        shapes = check_ticket(ticket, self.name)
        name = f"ticket {ticket['id'][:8]}... of {ticket.get('address')}"
        peer, uuid = (ticket.get("address"), ticket.get("start")), ticket.get("uuid")
        if not (
            isinstance(peer[0], str)
            and isinstance(peer[1], str)
            and type(uuid) is int
            and 0 <= uuid < 1 << 63
        ):
            raise TransportError("corrupt", f"{name}: its address or uuid cannot be")
        check_time(deadline, cancelled, name)
        self._spend(ticket["id"], name)
        padded = list(zip(ticket["padded_rows"], ticket["row_bytes"], strict=True))
        moved = [index for index, (count, size) in enumerate(shapes) if count and size]
        fetched = [np.empty(shape, np.uint8) for shape in shapes]
        if not moved:
            return fetched
        connection = self._idle.take(peer)
        if connection is None:
            _check_listener(peer[0], deadline, name)
            connection = self._server.connect(peer[0])
        pulled: list[jax.Array] = []
        try:
            pulled = connection.pull(uuid, [self._wanted(padded[index]) for index in moved])
            _wait(pulled, deadline, cancelled, name)
            for index, array in zip(moved, pulled, strict=True):
                fetched[index][:] = np.asarray(array)[: shapes[index][0]]
        except BaseException as error:
            self._give_up(connection, pulled)
            if isinstance(error, jax.errors.JaxRuntimeError):
                raise TransportError(_meaning(str(error)), f"{name}: {error}") from None
            raise
        self._idle.give(peer, connection)
        return fetched

    def usage(self) -> dict[str, int]:
        """As Transport.usage."""
        with self._guard:
            return {
                "tickets": len(self._published),
                "bytes": self._held(),
                "quarantined_bytes": sum(array.nbytes for one in self._quarantine for array in one.pulled),
            }

    def close(self) -> None:
        """As Transport.close. The library's own threads stay until the process ends."""
        for ticket_id in list(self._published):
            self.retire(ticket_id)
        self._idle.close()
        self._closed.set()

    def _held(self) -> int:
        return sum(size for _, size in self._published.values())

    def _has_room(self, size: int) -> bool:
        held = self._held()
        return not size or not held or held + size <= MOST_PUBLISHED_BYTES

    def _spend(self, ticket_id: str, name: str) -> None:
        with self._guard:
            if ticket_id in self._spent:
                raise TransportError("unknown_ticket", f"{name}: was fetched before, and can be only once")
            self._spent[ticket_id] = None
            if len(self._spent) > _SPENT_REMEMBERED:
                self._spent.popitem(last=False)

    def _wanted(self, shape: tuple[int, int]) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, np.uint8, sharding=SingleDeviceSharding(self._device))

    def _give_up(self, connection: Any, pulled: list[jax.Array]) -> None:
        if _ready(pulled):
            connection._poison_connection()
            return
        probe = connection.pull(_HEARTBEAT_UUID, [self._wanted((1, 1))])
        with self._guard:
            until = time.monotonic() + QUARANTINE_SECONDS
            self._quarantine.append(_GivenUp(connection, pulled, probe, until))

    def _beat(self) -> None:
        """The background: lets tombstones expire, and ends what was given up."""
        while True:
            closed = self._closed.wait(_QUARANTINE_POLL_SECONDS if self._quarantine else HEARTBEAT_SECONDS)
            with self._guard:
                self._server.await_pull(_HEARTBEAT_UUID, [])
                over = [one for one in self._quarantine if closed or one.over]
                self._quarantine = [one for one in self._quarantine if one not in over]
            for one in over:
                one.connection._poison_connection()
            if closed:
                return


def _serve(host: str, port: int, device: jax.Device) -> Any:
    """The library's server, on this host's address only. Raises ConfigError where it cannot listen."""
    try:
        if not 0 <= port < 1 << 16:
            raise OSError(f"port {port} is not one of 0 to 65535")
        address = _bracketed(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
        return transfer.start_transfer_server(
            device.client,
            f"{address}:{port}",
            [f"{address}:0"] * SOCKETS,
            max_num_parallel_copies=PARALLEL_COPIES,
            transfer_size=COPY_BYTES,
        )
    except (OSError, ValueError, jax.errors.JaxRuntimeError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose an address of this machine and a free port (0: any)"
        ) from None


def _check_listener(address: str, deadline: float, name: str) -> None:
    """Raises TransportError "lost" where nobody listens, "timeout" if there is no answer."""
    host, _, port = address.rpartition(":")
    try:
        left = max(0.001, deadline - time.monotonic())
        socket.create_connection((host.strip("[]"), int(port)), timeout=left).close()
    except TimeoutError:
        raise TransportError("timeout", f"{name}: no connection in time") from None
    except (OSError, ValueError) as error:
        raise TransportError("lost", f"{name}: cannot connect: {error}") from None


def _bracketed(host: str | int) -> str:
    return f"[{host}]" if ":" in str(host) else str(host)


def _ready(arrays: Sequence[jax.Array]) -> bool:
    """Whether all are there or have failed."""
    return all(array.is_ready() for array in arrays)  # type: ignore[attr-defined]


def _wait(pulled: Sequence[jax.Array], deadline: float, cancelled: Callable[[], bool], name: str) -> None:
    """Until all arrays are there or have failed. Polled, since the library's own wait knows no deadline."""
    pause = 0.0001
    while not _ready(pulled):
        check_time(deadline, cancelled, name)
        time.sleep(pause)
        pause = min(2 * pause, _MOST_WAIT_SECONDS)


def _meaning(words: str) -> TransportErrorKind:
    return next((kind for said, kind in _MEANINGS if said in words), "lost")
