"""Connections that wait for their next use, kept by transports whose fetches have one connection each."""

import threading
import time
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

IDLE_SECONDS = 30.0
MOST_PER_PEER = 4

C = TypeVar("C")


class IdleConnections(Generic[C]):
    """Connections by peer, the latest used first; those that waited too long are dropped when others come or go."""

    def __init__(self, drop: Callable[[C], None]) -> None:
        self._drop = drop
        self._guard = threading.Lock()
        self._idle: dict[Hashable, list[tuple[float, C]]] = {}
        self._closed = False

    def take(self, peer: Hashable) -> C | None:
        """A connection to this peer, the caller's from now on; None if none waits."""
        self._drop_old()
        with self._guard:
            waiting = self._idle.get(peer)
            return waiting.pop()[1] if waiting else None

    def give(self, peer: Hashable, connection: C) -> None:
        """Let a connection in good order wait for its next use."""
        self._drop_old()
        with self._guard:
            waiting = self._idle.setdefault(peer, [])
            keep = not self._closed and len(waiting) < MOST_PER_PEER
            if keep:
                waiting.append((time.monotonic(), connection))
        if not keep:
            self._drop(connection)

    def close(self) -> None:
        """Drop all, and from now on whatever is given."""
        self._closed = True
        self._drop_old(0.0)

    def _drop_old(self, seconds: float = IDLE_SECONDS) -> None:
        before = time.monotonic() - seconds
        with self._guard:
            old = [used for waiting in self._idle.values() for used in waiting if used[0] <= before]
            for peer, waiting in list(self._idle.items()):
                self._idle[peer] = [used for used in waiting if used[0] > before]
                if not self._idle[peer]:
                    del self._idle[peer]
        for _, connection in old:
            self._drop(connection)
