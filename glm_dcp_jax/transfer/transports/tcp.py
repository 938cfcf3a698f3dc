"""The embedded default: rows over authenticated TCP connections of our own. No dependency; only real rows travel.

A fetch has one connection to itself. A closed socket can never be written to late, so a fetch that was given up leaves
nothing behind; the producer lets go of a ticket when its last reader has ended, at the latest at the reader's deadline.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

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
from glm_dcp_jax.transfer.transports.shelf import Shelf
from glm_dcp_jax.transfer.wire import Listener, Peer, PeerError, RemoteError, connect

MOST_SEND_SECONDS = 600.0
"""How long a producer goes on sending to a consumer that claims to have time."""

_KINDS: dict[str, TransportErrorKind] = {
    "lost": "lost",
    "timeout": "timeout",
    "auth": "unsupported",
    "protocol": "corrupt",
    "refused": "corrupt",
    "cancelled": "cancelled",
}


class TcpTransport:
    """As Transport; a ticket can be fetched any number of times.

    host, port: where this process listens, port 0 being any free one. advertise: the host that consumers are told.
    """

    name = "tcp"

    def __init__(self, host: str, secret: bytes, port: int = 0, advertise: str = "") -> None:
        self._secret = secret
        self._shelf = Shelf()
        self._idle: IdleConnections[Peer] = IdleConnections(Peer.close)
        self._listener = Listener(host, port, secret, self._serve, "transfer")
        # A process that is started again on the same port is another peer: what waits for the old one is dead.
        self._address = {
            "host": advertise or host,
            "port": self._listener.port,
            "start": secrets.token_hex(8),
        }

    def publish(self, arrays: Sequence[jax.Array], rows: Sequence[int]) -> Ticket:
        """As Transport.publish."""
        ticket = new_ticket(arrays, rows, transport=self.name, **self._address)
        self._shelf.put(ticket["id"], arrays, rows)
        return ticket

    def retire(self, ticket_id: str) -> None:
        """As Transport.retire."""
        self._shelf.retire(ticket_id)

    def fetch(
        self, ticket: Ticket, deadline: float, cancelled: Callable[[], bool] = never
    ) -> list[np.ndarray]:
        """As Transport.fetch."""
        shapes = check_ticket(ticket, self.name)
        check_time(deadline, cancelled, f"ticket {ticket['id'][:8]}...")
        host, port, start = str(ticket.get("host")), ticket.get("port"), str(ticket.get("start"))
        if not isinstance(port, int):
            raise TransportError("corrupt", f"a ticket of transport tcp with port {port!r}")
        address = host, port, start
        try:
            peer = self._idle.take(address) or connect(host, port, self._secret, deadline)
        except PeerError as error:
            raise TransportError(_KINDS[error.kind], str(error)) from None
        try:
            message = {"fetch": ticket["id"], "seconds": deadline - time.monotonic()}
            expected = sum(count * size for count, size in shapes)
            _, arrays = peer.exchange(message, deadline, expected, cancelled)
        except RemoteError as error:
            if error.remote_kind == "unknown_ticket":
                raise TransportError("unknown_ticket", str(error)) from None
            raise TransportError("corrupt", str(error)) from None
        except PeerError as error:
            raise TransportError(_KINDS[error.kind], str(error)) from None
        finally:
            if peer.ended:
                peer.close()
            else:
                self._idle.give(address, peer)
        if [array.size for array in arrays] != [count * size for count, size in shapes]:
            raise TransportError("corrupt", f"{peer.name}: sent other sizes than the ticket's {shapes}")
        return [array.reshape(shape) for array, shape in zip(arrays, shapes, strict=True)]

    def usage(self) -> dict[str, int]:
        """As Transport.usage."""
        return self._shelf.usage()

    def close(self) -> None:
        """As Transport.close."""
        self._listener.close()
        self._idle.close()
        self._shelf.clear()

    def _serve(self, peer: Peer) -> None:
        while True:
            message, _ = peer.receive(None)
            ticket_id, seconds = message.get("fetch"), message.get("seconds")
            if not isinstance(ticket_id, str) or not isinstance(seconds, int | float):
                peer.refuse("protocol", "a transfer connection takes only {'fetch': id, 'seconds': number}")
                continue
            deadline = time.monotonic() + min(float(seconds), MOST_SEND_SECONDS)
            try:
                self._send(peer, ticket_id, deadline)
            except TransportError as error:
                peer.refuse(error.kind, str(error), deadline)

    def _send(self, peer: Peer, ticket_id: str, deadline: float) -> None:
        with self._shelf.reading(ticket_id) as arrays:
            answer: dict[str, Any] = {"ticket": ticket_id}
            peer.send(answer, arrays, deadline)
