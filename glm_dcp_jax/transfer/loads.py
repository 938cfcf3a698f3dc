"""The consumer's side: one Load for each request that brings a cache, read by worker threads into host memory.

A load's life, as the engine's thread sees it:

    expected   the request has come; its key is kept alive by heartbeats
    begun      it has pages: a worker opens the key and reads piece after piece
    ended      all is there and the producer has confirmed that its lease held; or it has failed; or it was cancelled

Nothing here touches a page: pieces are events that the engine's thread takes and unpacks, if it still wants them.
"""

import secrets
import threading
import time
import zlib
from dataclasses import dataclass, field
from hashlib import sha256
from typing import Any

import numpy as np

from glm_dcp_jax.transfer.packing import PARTS, Part
from glm_dcp_jax.transfer.pieces import Piece
from glm_dcp_jax.transfer.references import Reference

PIECES_AHEAD = 2
"""Pieces of a load that may wait to be unpacked."""


class LoadFailed(Exception):
    """Why a cache did not arrive; `kind` is the producer's word, the transport's, or ours."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass
class Times:
    """When a load came how far, in seconds of time.monotonic(); 0 for not yet. asking, fetching: spent in all, the
    packing of a piece beside the fetching of the one before it."""

    expected: float = 0.0
    begun: float = 0.0
    opened: float = 0.0
    fetched: float = 0.0
    confirmed: float = 0.0
    asking: float = 0.0
    fetching: float = 0.0

    @property
    def phases(self) -> dict[str, float]:
        """Seconds of a load that has ended well. wait: for pages. open: connection, handshake, key. read: all pieces.
        confirm: that the lease held. Of read, pack and fetch are what the two sides were busy with."""
        return {
            "wait": self.begun - self.expected,
            "open": self.opened - self.begun,
            "read": self.fetched - self.opened,
            "confirm": self.confirmed - self.fetched,
            "pack": self.asking,
            "fetch": self.fetching,
        }


@dataclass(eq=False)
class Load:
    """A request's cache on its way. digest: of the prompt's tokens. start, end: of the tokens that are read.

    consumer: a secret that makes the key ours once it is opened. attempt: of opening it, from 1. failure: known before
    it began.
    """

    request_id: str
    reference: Reference
    digest: bytes
    start: int = 0
    end: int = 0
    consumer: str = field(default_factory=lambda: secrets.token_hex(16))
    times: Times = field(default_factory=Times)
    failure: LoadFailed | None = None
    attempt: int = 0
    received_bytes: int = 0
    runs: int = 0
    _cancelled: threading.Event = field(default_factory=threading.Event)
    _room: threading.Semaphore = field(default_factory=lambda: threading.Semaphore(PIECES_AHEAD))

    @property
    def begun(self) -> bool:
        """Whether a worker has it, or had."""
        return self.times.begun > 0

    def cancel(self) -> None:
        """Nobody wants it any more; the worker ends soon."""
        self._cancelled.set()

    def is_cancelled(self) -> bool:
        """Whether nobody wants it any more."""
        return self._cancelled.is_set()

    def unpacked(self) -> None:
        """One more piece may come."""
        self._room.release()

    def wait_for_room(self, deadline: float) -> None:
        """Until a piece may come. Raises LoadFailed."""
        while not self._room.acquire(timeout=0.05):
            if self.is_cancelled():
                raise LoadFailed("cancelled", "nobody wants it any more")
            if time.monotonic() >= deadline:
                raise LoadFailed("timeout", "the pieces before it were not unpacked in time")


@dataclass(frozen=True)
class Landed:
    """A piece in host memory, checked. given: by part, and by producer rank [n, row_bytes] uint8."""

    load: Load
    piece: Piece
    given: dict[Part, list[np.ndarray]]


@dataclass(frozen=True)
class Ended:
    """The last word of a load: failure None means that all of it is there. Cancelled loads say nothing."""

    load: Load
    failure: LoadFailed | None


def token_digest(token_ids: list[int]) -> bytes:
    """What both sides know a prompt by: sha256 of its tokens as int32."""
    return sha256(np.asarray(token_ids, np.int32).tobytes()).digest()


def check_promise(piece: Piece, ticket: dict[str, Any], row_bytes: dict[Part, int]) -> None:
    """Raise LoadFailed for a ticket of other arrays than the plan has, before there is any memory for them."""
    shapes = [(count, row_bytes[part]) for part in PARTS for count in piece.rows(part) if count]
    promised = [ticket.get("rows"), ticket.get("row_bytes")]
    if promised != [[count for count, _ in shapes], [size for _, size in shapes]]:
        raise LoadFailed(
            "corrupt", f"the producer offers other arrays than {shapes[:8]}: {str(promised)[:200]}"
        )


def checked(
    piece: Piece, arrays: list[np.ndarray], crcs: Any, row_bytes: dict[Part, int]
) -> dict[Part, list[np.ndarray]]:
    """The arrays of a ticket by part and producer rank. Raises LoadFailed for any that is not what was packed."""
    if not isinstance(crcs, list) or len(crcs) != len(arrays):
        raise LoadFailed("corrupt", "the producer sent other checksums than arrays")
    waiting = list(zip(arrays, crcs, strict=True))
    given: dict[Part, list[np.ndarray]] = {}
    for part in PARTS:
        given[part] = []
        for count in piece.rows(part):
            if not count:
                given[part].append(np.empty((0, row_bytes[part]), np.uint8))
                continue
            if not waiting:
                raise LoadFailed("corrupt", "the producer sent fewer arrays than the plan has")
            array, crc = waiting.pop(0)
            if array.shape != (count, row_bytes[part]):
                raise LoadFailed(
                    "corrupt", f"{part} came as {list(array.shape)}, not as {[count, row_bytes[part]]}"
                )
            if zlib.crc32(array.data) != crc:
                raise LoadFailed("corrupt", f"{part} came with a wrong checksum")
            given[part].append(array)
    if waiting:
        raise LoadFailed("corrupt", "the producer sent more arrays than the plan has")
    return given
