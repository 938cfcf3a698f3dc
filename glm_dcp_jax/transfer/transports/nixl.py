"""NVIDIA's NIXL: one-sided reads by UCX, over RDMA, shared memory or TCP, of a slab of the producer's host memory.

A published ticket is a copy in the producer's slab: its id, then the rows. The consumer reads the rows into its own
slab, then the id, and copies out; an id that is gone says that the rows may have changed under the read. What else is
done about what one-sided reads do, all of which was observed:

* A read that was given up can still be written much later, whatever is released or deregistered. So reads never land in
  memory that a caller owns, and the region of a read without an end is quarantined until it has one.
* A read of memory that was unmapped kills the producer, and one of memory that was only deregistered succeeds. So the
  slab is registered once and stays for the life of the process, and a retired ticket's region is used again only when
  the consumer has said that its reads are over, or after a grace.
* A stopped peer is waited for without end: deadlines are ours. A dead one is an error at once, and is forgotten.
* The library moves bytes in calls, or in a thread that takes a whole core: ours calls while there is something to move.
* The agent is not thread-safe by itself, and listens on every network unless UCX is told which: one lock, and loopback
  only where the host is loopback. Elsewhere set UCX_NET_DEVICES. It carries no proof of identity: a private network.
"""

import ipaddress
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer.peer import never
from glm_dcp_jax.transfer.transports.interface import (
    Ticket,
    TransportError,
    check_ticket,
    check_time,
    new_ticket,
)
from glm_dcp_jax.transfer.transports.nixl_agent import Agent
from glm_dcp_jax.transfer.transports.slab import ALIGNMENT, Region, Slab, aligned

_ID_BYTES = 32
_MOST_WAIT_SECONDS = 0.001
_READING_SECONDS = 0.0001
_IDLE_SECONDS = 0.001
_RECENT_SECONDS = 1.0


@dataclass
class _Published:
    region: Region
    began: int = 0
    ended: int = 0
    due: float = 0.0

    @property
    def over(self) -> bool:
        """Whether it was read, and by nobody now."""
        return 0 < self.began <= self.ended


@dataclass
class _Landing:
    """Where a fetch reads to."""

    ticket_id: str
    peer: str
    region: Region
    read: Any = None  # nixl_agent.Read: the latest
    noted: bool = False  # whether that read tells the peer of its end


class NixlTransport:
    """As Transport; a ticket can be fetched any number of times.

    slab_bytes: host memory for all that is published, and for all fetches in progress. grace_seconds: how long the
    region of a retired ticket that was not reported read is kept from reuse; longer than any fetch's deadline.
    """

    name = "nixl"

    def __init__(self, host: str, slab_bytes: int = 256 << 20, grace_seconds: float = 30.0) -> None:
        if slab_bytes < ALIGNMENT:
            raise ConfigError(
                f"option slab_bytes of transport nixl is {slab_bytes}; give at least {ALIGNMENT}"
            )
        if _is_loopback(host):
            os.environ.setdefault("UCX_NET_DEVICES", "lo")
        self._slab = Slab(slab_bytes)
        self._grace_seconds = grace_seconds
        self._agent = Agent(self._slab)
        self._address = {"agent": self._agent.name, "metadata": self._agent.metadata}
        self._guard = threading.Lock()
        self._published: dict[str, _Published] = {}
        self._retired: dict[str, _Published] = {}
        self._quarantine: list[_Landing] = []
        self._active = 0.0
        self._changed = threading.Event()
        self._closed = False
        threading.Thread(target=self._clean, name="transfer quarantine", daemon=True).start()

    def publish(self, arrays: Sequence[jax.Array], rows: Sequence[int]) -> Ticket:
        """As Transport.publish."""
        ticket = new_ticket(arrays, rows, transport=self.name, **self._address)
        places, size = _layout(list(zip(ticket["rows"], ticket["row_bytes"], strict=True)))
        for array in arrays:
            array.copy_to_host_async()
        try:
            region = self._slab.take(size, time.monotonic(), never, "a publication")
        except TransportError as error:
            # Whoever waited here would keep the consumer from saying what it has read: it asks again, later.
            raise TransportError("busy", str(error)) if error.kind == "timeout" else error from None
        try:
            for array, count, place in zip(arrays, rows, places, strict=True):
                self._view(region, place)[:] = np.asarray(array)[:count].reshape(-1)
        except BaseException:  # the program that makes an array has failed
            self._slab.give(region)
            raise
        self._view(region, slice(0, _ID_BYTES))[:] = np.frombuffer(ticket["id"].encode(), np.uint8)
        with self._guard:
            self._published[ticket["id"]] = _Published(region)
        self._changed.set()
        return ticket | {"address": self._slab.address + region.start}

    def retire(self, ticket_id: str) -> None:
        """As Transport.retire. Memory that may still be read is given back later: `usage` has it as quarantined."""
        self._listen()
        with self._guard:
            published = self._published.pop(ticket_id, None)
            if published is None:
                return
            self._view(published.region, slice(0, _ID_BYTES))[:] = 0
            published.due = time.monotonic() + self._grace_seconds
            self._retired[ticket_id] = published
        self._free_retired()
        self._changed.set()

    def fetch(
        self, ticket: Ticket, deadline: float, cancelled: Callable[[], bool] = never
    ) -> list[np.ndarray]:
        """As Transport.fetch."""
        shapes = check_ticket(ticket, self.name)
        ticket_id, peer, address = ticket["id"], str(ticket.get("agent")), ticket.get("address")
        what = f"ticket {ticket_id[:8]}... of {peer}"
        if type(address) is not int or not 0 < address < 1 << 63:
            raise TransportError("corrupt", f"{what}: its address is {address!r}")
        places, size = _layout(shapes)
        check_time(deadline, cancelled, what)
        self._agent.meet(peer, ticket.get("metadata"), what)
        landing = _Landing(ticket_id, peer, self._slab.take(size, deadline, cancelled, what))
        try:
            self._agent.say(peer, f"began {ticket_id}", what)
            if size > ALIGNMENT:
                self._read(landing, slice(ALIGNMENT, size), address, "", deadline, cancelled, what)
            seal = self._view(landing.region, slice(0, _ID_BYTES))
            seal[:] = 0
            end = f"ended {ticket_id}"
            self._read(landing, slice(0, _ID_BYTES), address, end, deadline, cancelled, what)
            if seal.tobytes() != ticket_id.encode():
                raise TransportError("unknown_ticket", f"{what}: not published, or retired")
            return [
                self._view(landing.region, place).reshape(shape).copy()
                for place, shape in zip(places, shapes, strict=True)
            ]
        finally:
            self._settle(landing)

    def usage(self) -> dict[str, int]:
        """As Transport.usage."""
        with self._guard:
            published = sum(one.region.size for one in self._published.values())
            retired = sum(one.region.size for one in self._retired.values())
            unfinished = sum(read.region.size for read in self._quarantine)
            return {
                "tickets": len(self._published),
                "bytes": published,
                "quarantined_bytes": retired + unfinished,
            }

    def close(self) -> None:
        """As Transport.close. The agent and its slab stay until the process ends."""
        for ticket_id in list(self._published):
            self.retire(ticket_id)
        self._closed = True
        self._changed.set()

    def _view(self, region: Region, place: slice) -> np.ndarray:
        return self._slab.bytes[region.start + place.start : region.start + place.stop]

    def _read(
        self,
        landing: _Landing,
        place: slice,
        address: int,
        note: str,
        deadline: float,
        cancelled: Callable[[], bool],
        what: str,
    ) -> None:
        """Read `place` of a published region into the same place of our own; `note` is sent when it is there."""
        source, target = address + place.start, self._slab.address + landing.region.start + place.start
        landing.noted = bool(note)
        landing.read = self._agent.read(landing.peer, source, target, place.stop - place.start, note, what)
        self._agent.poll(landing.read, what)
        pause = 0.00005
        while not landing.read.ended:
            check_time(deadline, cancelled, what)
            time.sleep(pause)
            pause = min(2 * pause, _MOST_WAIT_SECONDS)
            self._agent.poll(landing.read, what)

    def _settle(self, landing: _Landing) -> None:
        """Give the region back, unless something may still be written to it."""
        if landing.read is None or landing.read.ended:
            self._slab.give(landing.region)
        else:
            with self._guard:
                self._quarantine.append(landing)
        self._active = time.monotonic()
        self._changed.set()

    def _clean(self) -> None:
        """The background: ends of quarantined reads, what consumers say, graces."""
        while not self._closed or self._quarantine or self._retired:
            self._changed.wait(self._pause())
            self._changed.clear()
            self._end_quarantine()
            self._listen()
            self._free_retired()

    def _pause(self) -> float | None:
        """Seconds until the library must be called again: it moves bytes only in calls."""
        with self._guard:
            # A reader that has not been heard of for long is dead or slow: neither is worth a core.
            recent = time.monotonic() - self._active < _RECENT_SECONDS
            if recent and any(published.began > published.ended for published in self._published.values()):
                return _READING_SECONDS
            # Recent: what this side has said at the end of a fetch must leave it.
            return _IDLE_SECONDS if recent or self._published or self._retired or self._quarantine else None

    def _end_quarantine(self) -> None:
        for landing in list(self._quarantine):
            what = f"ticket {landing.ticket_id[:8]}... of {landing.peer}, given up"
            try:
                self._agent.poll(landing.read, what)
                if not landing.read.ended:
                    continue
                if not landing.noted:
                    self._agent.say(landing.peer, f"ended {landing.ticket_id}", what)
            except TransportError:
                pass  # the peer is gone, and with it all that could still be written
            with self._guard:
                self._quarantine.remove(landing)
            self._slab.give(landing.region)

    def _listen(self) -> None:
        """Take note of what consumers have begun and ended."""
        notes = self._agent.hear()
        with self._guard:
            for note in notes:
                word, _, ticket_id = note.partition(" ")
                published = self._published.get(ticket_id) or self._retired.get(ticket_id)
                if published is not None and word in ("began", "ended"):
                    setattr(published, word, getattr(published, word) + 1)
                    self._active = time.monotonic()

    def _free_retired(self) -> None:
        now = time.monotonic()
        with self._guard:
            free = [key for key, published in self._retired.items() if published.over or now >= published.due]
            regions = [self._retired.pop(key).region for key in free]
        for region in regions:
            self._slab.give(region)


def _layout(shapes: Sequence[tuple[int, int]]) -> tuple[list[slice], int]:
    """Where each array's bytes stand in a ticket's region, behind its id, and the region's size."""
    places, end = [], ALIGNMENT
    for count, size in shapes:
        places.append(slice(end, end + count * size))
        end += aligned(count * size)
    return places, end


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"host {host} cannot be resolved: {error}; give an address of this machine"
        ) from None
    return all(ipaddress.ip_address(str(address[4][0]).split("%")[0]).is_loopback for address in found)
