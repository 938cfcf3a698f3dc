"""Producer and consumer in one process: a table that all transports of this process share."""

from collections.abc import Callable, Sequence

import jax
import numpy as np

from glm_dcp_jax.transfer.peer import never
from glm_dcp_jax.transfer.transports.interface import Ticket, check_ticket, check_time, new_ticket
from glm_dcp_jax.transfer.transports.shelf import Shelf

_published: dict[str, Shelf] = {}
"""Ticket id -> the shelf of the transport that published it."""


class InprocTransport:
    """As Transport; a ticket can be fetched any number of times, by any transport of this process."""

    name = "inproc"

    def __init__(self) -> None:
        self._shelf = Shelf()

    def publish(self, arrays: Sequence[jax.Array], rows: Sequence[int]) -> Ticket:
        """As Transport.publish."""
        ticket = new_ticket(arrays, rows, transport=self.name)
        self._shelf.put(ticket["id"], arrays, rows)
        _published[ticket["id"]] = self._shelf
        return ticket

    def retire(self, ticket_id: str) -> None:
        """As Transport.retire."""
        self._shelf.retire(ticket_id)
        if _published.get(ticket_id) is self._shelf:
            _published.pop(ticket_id, None)

    def fetch(
        self, ticket: Ticket, deadline: float, cancelled: Callable[[], bool] = never
    ) -> list[np.ndarray]:
        """As Transport.fetch."""
        check_ticket(ticket, self.name)
        fetched = []
        with _published.get(ticket["id"], self._shelf).reading(ticket["id"]) as arrays:
            for array in arrays:
                check_time(deadline, cancelled, f"ticket {ticket['id'][:8]}...")
                fetched.append(array.copy())
        return fetched

    def usage(self) -> dict[str, int]:
        """As Transport.usage."""
        return self._shelf.usage()

    def close(self) -> None:
        """As Transport.close."""
        for ticket_id in [ticket_id for ticket_id, shelf in _published.items() if shelf is self._shelf]:
            self.retire(ticket_id)
