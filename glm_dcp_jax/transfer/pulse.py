"""Heartbeats: a thread for every producer that holds anything for us tells it so, until nothing is left."""

import contextlib
import logging
import threading
import time
from collections.abc import Callable

from glm_dcp_jax.transfer.references import Reference
from glm_dcp_jax.transfer.wire import Peer, PeerError, connect

_log = logging.getLogger(__name__)
BEATS_IN_A_LEASE = 6
KEYS_IN_A_BEAT = 4096
"""More is no message that a producer takes."""
_LEAST = 0.05
"""Seconds between two beats, at least, whatever a lease is said to be."""


class Pulses:
    """One pulse for each producer's address, while there is anything to keep alive.

    lost: called with what a producer says that it does not hold any more. heard: with the address of one that answers.
    """

    def __init__(
        self,
        secret: bytes,
        lease: float,
        answer_seconds: float,
        lost: Callable[[Reference], None],
        heard: Callable[[tuple[str, int]], object] = lambda address: None,
    ) -> None:
        self._secret, self._lost, self._heard = secret, lost, heard
        self._period, self._answer_seconds = lease / BEATS_IN_A_LEASE, answer_seconds
        self._kept: dict[tuple[str, int], list[Reference]] = {}
        self._changed = threading.Condition()
        self._closed = False

    def add(self, reference: Reference) -> None:
        """Keep it alive from now on."""
        with self._changed:
            kept = self._kept.get(reference.address)
            if kept is not None:
                kept.append(reference)
                return
            self._kept[reference.address] = [reference]
        threading.Thread(target=self._run, args=(reference.address,), name="kv-pulse", daemon=True).start()

    def remove(self, reference: Reference) -> None:
        """Keep it alive no longer, unless it was added more often than it was removed."""
        with self._changed, contextlib.suppress(ValueError):
            self._kept.get(reference.address, []).remove(reference)
            self._changed.notify_all()

    def close(self) -> None:
        """Keep nothing alive."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def _run(self, address: tuple[str, int]) -> None:
        peer: Peer | None = None
        try:
            while references := self._due(address):
                peer = self._beat(address, peer, references)
        finally:
            if peer is not None:
                peer.close()

    def _due(self, address: tuple[str, int]) -> dict[str, Reference]:
        """What is to be kept alive, a period after the last time; empty when the thread is to end."""
        with self._changed:
            leases = [reference.lease for reference in self._kept[address] if reference.lease]
            due = time.monotonic() + max(
                min([self._period, *(lease / BEATS_IN_A_LEASE for lease in leases)]), _LEAST
            )
            while not self._closed and self._kept[address] and (left := due - time.monotonic()) > 0:
                self._changed.wait(left)
            kept = {} if self._closed else {reference.key: reference for reference in self._kept[address]}
            if not kept:
                del self._kept[address]
            return kept

    def _beat(
        self, address: tuple[str, int], peer: Peer | None, references: dict[str, Reference]
    ) -> Peer | None:
        """Returns the connection for the next time; None if it broke: then the next beat makes another."""
        deadline = time.monotonic() + self._answer_seconds
        try:
            if peer is None:
                peer = connect(*address, self._secret, deadline)
            keys, lost = list(references), []
            for at in range(0, len(keys), KEYS_IN_A_BEAT):
                some = keys[at : at + KEYS_IN_A_BEAT]
                answer = peer.request({"do": "beat", "keys": some}, deadline).get("lost")
                lost += answer if isinstance(answer, list) else []
        except PeerError as error:
            _log.warning("no heartbeat reaches the producer at %s:%d: %s", *address, error)
            if peer is not None:
                peer.close()
            return None
        self._heard(address)
        for key in lost:
            if isinstance(key, str) and key in references:
                self._lost(references[key])
        return peer
