"""Published arrays in host memory, for transports whose producer hands them out itself (tcp, inproc)."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from glm_dcp_jax.transfer.transports.interface import TransportError


@dataclass
class _Held:
    arrays: list[np.ndarray]
    bytes: int
    readers: int = 0
    retired: bool = False


class Shelf:
    """Ticket id -> arrays. A retired ticket's arrays live on for those who are reading them, and no longer."""

    def __init__(self) -> None:
        self._guard = threading.Lock()
        self._held: dict[str, _Held] = {}

    def put(self, ticket_id: str, arrays: Sequence[jax.Array], rows: Sequence[int]) -> None:
        """Copy the first rows[i] rows of each array to the host, under an id that was not used before."""
        for array in arrays:
            array.copy_to_host_async()
        # On a CPU device these are views. Everywhere they keep the padding too: slicing on the device would compile.
        copies = [np.asarray(array)[:count] for array, count in zip(arrays, rows, strict=True)]
        with self._guard:
            self._held[ticket_id] = _Held(copies, sum(array.nbytes for array in arrays))

    @contextlib.contextmanager
    def reading(self, ticket_id: str) -> Iterator[list[np.ndarray]]:
        """The arrays of a ticket, whole until the end of the block. Raises TransportError "unknown_ticket"."""
        with self._guard:
            held = self._held.get(ticket_id)
            if held is None or held.retired:
                raise TransportError("unknown_ticket", f"no ticket {ticket_id[:8]}... is published here")
            held.readers += 1
        try:
            yield held.arrays
        finally:
            with self._guard:
                held.readers -= 1
                self._drop_unused(ticket_id, held)

    def retire(self, ticket_id: str) -> None:
        """Nobody may begin to read it any more; idempotent."""
        with self._guard:
            held = self._held.get(ticket_id)
            if held is not None:
                held.retired = True
                self._drop_unused(ticket_id, held)

    def clear(self) -> None:
        """Retire all."""
        for ticket_id in list(self._held):
            self.retire(ticket_id)

    def usage(self) -> dict[str, int]:
        """As Transport.usage."""
        with self._guard:
            live = [held for held in self._held.values() if not held.retired]
            late = [held for held in self._held.values() if held.retired]
        return {
            "tickets": len(live),
            "bytes": sum(held.bytes for held in live),
            "quarantined_bytes": sum(held.bytes for held in late),
        }

    def _drop_unused(self, ticket_id: str, held: _Held) -> None:
        if held.retired and not held.readers:
            self._held.pop(ticket_id, None)
