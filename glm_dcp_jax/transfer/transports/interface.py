"""What a transport does: it moves published arrays of rows from a producer's devices into a consumer's host memory.

A transport neither knows what the rows mean nor decides who may have them: which rows, for whom, how long and whether
they arrived whole (CRC, lease) is the control protocol's business. It promises that what `fetch` returns is the
caller's own, that nothing is ever written into it afterwards, and that deadlines are kept whatever the peer does.
"""

import secrets
import time
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import jax
import numpy as np

from glm_dcp_jax.transfer.peer import never

Ticket = dict[str, Any]
"""What a consumer needs to fetch, as JSON: {"id": 32 hex digits, "rows": [n_i], "row_bytes": [b_i], "padded_rows":
[N_i], ...}, and the transport's own fields."""

TransportErrorKind = Literal[
    "lost", "timeout", "unknown_ticket", "corrupt", "unsupported", "cancelled", "busy"
]


class TransportError(Exception):
    """A fetch (or a publication) that failed; `kind` says how.

    lost: the producer or the connection is gone. timeout: the deadline passed. unknown_ticket: never published,
    retired, or, where a ticket can be used only once, used. corrupt: what came is not what the ticket says.
    unsupported: these two sides cannot do it. cancelled: by the caller. busy: there is no room to publish it before
    others are retired.
    """

    def __init__(self, kind: TransportErrorKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Transport(Protocol):
    """One object per process and side; all methods may be called from any thread."""

    name: str

    def publish(self, arrays: Sequence[jax.Array], rows: Sequence[int]) -> Ticket:
        """Producer: let consumers fetch the first rows[i] rows of each array until `retire`. Waits for arrays alone.

        arrays: each [N_i, b_i] uint8 on one device; neither donated nor deleted before `retire`.
        Raises ValueError for arrays that are not like this, TransportError if there is no room.
        """
        ...

    def retire(self, ticket_id: str) -> None:
        """Producer: nobody may begin to fetch it any more, and its memory is given back; idempotent."""
        ...

    def fetch(
        self, ticket: Ticket, deadline: float, cancelled: Callable[[], bool] = never
    ) -> list[np.ndarray]:
        """Consumer: the published rows as fresh, writable uint8 arrays [n_i, b_i]. Blocks.

        deadline: absolute time.monotonic() seconds. cancelled: asked at least 10 times a second. Raises TransportError.
        """
        ...

    def usage(self) -> dict[str, int]:
        """What is held: `tickets` published, their `bytes`, and `quarantined_bytes`: given up, but perhaps in use."""
        ...

    def close(self) -> None:
        """Give everything back; idempotent."""
        ...


def new_ticket(arrays: Sequence[jax.Array], rows: Sequence[int], **own: Any) -> Ticket:
    """A ticket of a random id for what `publish` was given; `own`: the transport's own fields.

    Raises ValueError for anything but arrays [N, b] uint8 on one device each, with 0 <= rows <= N.
    """
    if len(arrays) != len(rows):
        raise ValueError(f"{len(arrays)} arrays but {len(rows)} numbers of rows; give one number per array")
    for array, count in zip(arrays, rows, strict=True):
        if array.ndim != 2 or array.dtype != np.uint8:
            raise ValueError(
                f"an array {array.dtype}{list(array.shape)}; a transport moves uint8 [N, row_bytes]"
            )
        if len(array.sharding.device_set) != 1:
            raise ValueError("an array on several devices; publish one array per device")
        if not 0 <= count <= array.shape[0]:
            raise ValueError(f"{count} rows of an array that has {array.shape[0]}")
    return {
        "id": secrets.token_hex(16),
        "rows": [int(count) for count in rows],
        "row_bytes": [array.shape[1] for array in arrays],
        "padded_rows": [array.shape[0] for array in arrays],
        **own,
    }


def check_ticket(ticket: Ticket, transport: str) -> list[tuple[int, int]]:
    """The shapes [n_i, b_i] that a ticket promises. Raises TransportError "corrupt" if it is not one of ours."""
    shapes: list[Any] = [ticket.get(field) for field in ("rows", "padded_rows", "row_bytes")]
    sound = (
        ticket.get("transport") == transport
        and isinstance(ticket.get("id"), str)
        and all(isinstance(field, list) for field in shapes)
        and all(type(size) is int and size >= 0 for field in shapes for size in field)
        and len({len(field) for field in shapes}) == 1
        and all(count <= padded for count, padded, _ in zip(*shapes, strict=True))
    )
    if not sound:
        raise TransportError("corrupt", f"not a ticket of transport {transport}: {str(ticket)[:200]}")
    return list(zip(ticket["rows"], ticket["row_bytes"], strict=True))


def check_time(deadline: float, cancelled: Callable[[], bool], what: str) -> None:
    """Raises TransportError "cancelled" or "timeout" if the caller has given up or the deadline has passed."""
    if cancelled():
        raise TransportError("cancelled", f"{what}: given up by the caller")
    if time.monotonic() >= deadline:
        raise TransportError("timeout", f"{what}: not there in time")
