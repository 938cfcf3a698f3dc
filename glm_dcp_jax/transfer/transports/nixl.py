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
* The library's own progress thread takes a whole core: ours calls it, as often as there is something to move.
* The agent is not thread-safe by itself, and listens on every network unless UCX is told which: one lock, and loopback
  only where the host is loopback. Elsewhere set UCX_NET_DEVICES. It carries no proof of identity: a private network.
"""

import base64
import contextlib
import ipaddress
import logging
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
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
from glm_dcp_jax.transfer.transports.slab import ALIGNMENT, Region, Slab, aligned

_PACKAGES = ("nixl_cu12", "nixl_cu13")
PUBLISH_SECONDS = 30.0
"""How long a publication waits for room in the slab."""

_LIFELONG: list[Any] = []
"""Agents and slabs, which must outlive every transport."""
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
class _Read:
    ticket_id: str
    agent: str
    region: Region
    handle: Any = None  # of a read that has not ended


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
        self._agent_lock = threading.Lock()
        self._agent, self._failures = _make_agent(self._slab)
        self._address = {
            "agent": self._agent.name,
            "metadata": base64.b64encode(self._agent.get_agent_metadata()).decode(),
        }
        self._guard = threading.Lock()
        self._published: dict[str, _Published] = {}
        self._retired: dict[str, _Published] = {}
        self._quarantine: list[_Read] = []
        self._peers: set[str] = set()
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
        region = self._slab.take(size, time.monotonic() + PUBLISH_SECONDS, never, "a publication")
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
        ticket_id, agent, address = ticket["id"], str(ticket.get("agent")), ticket.get("address")
        name = f"ticket {ticket_id[:8]}... of {agent}"
        if type(address) is not int or not 0 < address < 1 << 63:
            raise TransportError("corrupt", f"{name}: its address is {address!r}")
        places, size = _layout(shapes)
        check_time(deadline, cancelled, name)
        self._meet(agent, ticket.get("metadata"), f"began {ticket_id}", name)
        read = _Read(ticket_id, agent, self._slab.take(size, deadline, cancelled, name))
        try:
            if size > ALIGNMENT:
                self._read(read, slice(ALIGNMENT, size), address, "", deadline, cancelled, name)
            seal = self._view(read.region, slice(0, _ID_BYTES))
            seal[:] = 0
            self._read(read, slice(0, _ID_BYTES), address, f"ended {ticket_id}", deadline, cancelled, name)
            if seal.tobytes() != ticket_id.encode():
                raise TransportError("unknown_ticket", f"{name}: not published, or retired")
            return [
                self._view(read.region, place).reshape(shape).copy()
                for place, shape in zip(places, shapes, strict=True)
            ]
        finally:
            self._settle(read)

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

    @contextlib.contextmanager
    def _library(self, name: str, agent: str) -> Iterator[None]:
        """One call at a time; its failures as TransportErrors. A peer that was lost is met anew if it ever returns."""
        with self._agent_lock:
            try:
                yield
            except self._failures as error:
                wrong = ("NotFound", "InvalidParam", "Mismatch", "NotAllowed", "NotSupported")
                if any(word in type(error).__name__ for word in wrong):
                    raise TransportError("corrupt", f"{name}: {error}") from None
                self._peers.discard(agent)
                with contextlib.suppress(*self._failures):
                    self._agent.remove_remote_agent(agent)
                raise TransportError("lost", f"{name}: {error}") from None

    def _meet(self, agent: str, metadata: Any, note: str, name: str) -> None:
        """Learn where a peer is, once, and send it a note."""
        try:
            known = base64.b64decode(metadata, validate=True)
        except (TypeError, ValueError):
            raise TransportError("corrupt", f"{name}: its metadata cannot be read") from None
        with self._library(name, agent):
            if agent not in self._peers:
                self._peers.add(self._agent.add_remote_agent(known).decode())
            if agent not in self._peers:
                raise TransportError("corrupt", f"{name}: its metadata is of another agent")
            self._agent.send_notif(agent, note.encode())

    def _read(
        self,
        read: _Read,
        place: slice,
        address: int,
        note: str,
        deadline: float,
        cancelled: Callable[[], bool],
        name: str,
    ) -> None:
        """Read `place` of a published region into the same place of our own; `note` is sent when it is there."""
        size, start = place.stop - place.start, self._slab.address + read.region.start
        with self._library(name, read.agent):
            ours = self._agent.get_xfer_descs([(start + place.start, size, 0)], "DRAM")
            theirs = self._agent.get_xfer_descs([(address + place.start, size, 0)], "DRAM")
            read.handle = self._agent.initialize_xfer("READ", ours, theirs, read.agent, note.encode())
        state, pause = self._advance(read, self._agent.transfer, name), 0.00005
        while state == "PROC":
            check_time(deadline, cancelled, name)
            time.sleep(pause)
            pause = min(2 * pause, _MOST_WAIT_SECONDS)
            state = self._advance(read, self._agent.check_xfer_state, name)
        if state != "DONE":
            raise TransportError("lost", f"{name}: the read ended as {state}")

    def _advance(self, read: _Read, step: Callable[[Any], str], name: str) -> str:
        """The state of a read after `step`. One that has ended, well or not, is released; no other ever is."""
        try:
            with self._library(name, read.agent):
                state = step(read.handle)
        except TransportError:
            self._release(read)
            raise
        if state != "PROC":
            self._release(read)
        return state

    def _release(self, read: _Read) -> None:
        with self._agent_lock, contextlib.suppress(*self._failures):
            self._agent.release_xfer_handle(read.handle)
        read.handle = None

    def _settle(self, read: _Read) -> None:
        """Give the region back, unless something may still be written to it."""
        self._active = time.monotonic()
        self._changed.set()
        if read.handle is None:
            self._slab.give(read.region)
            return
        with self._guard:
            self._quarantine.append(read)

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
        for read in list(self._quarantine):
            name = f"ticket {read.ticket_id[:8]}... of {read.agent}, given up"
            try:
                if self._advance(read, self._agent.check_xfer_state, name) == "PROC":
                    continue
                with self._library(name, read.agent):
                    self._agent.send_notif(read.agent, f"ended {read.ticket_id}".encode())
            except TransportError:
                pass  # the peer is gone, and with it all that could still be written
            with self._guard:
                self._quarantine.remove(read)
            self._slab.give(read.region)

    def _listen(self) -> None:
        """Note what consumers have begun and ended."""
        with self._agent_lock:
            notes = self._agent.get_new_notifs()
        with self._guard:
            for note in (note for heard in notes.values() for note in heard):
                word, _, ticket_id = note.decode(errors="replace").partition(" ")
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


def installed() -> str | None:
    """The NIXL package that is installed here, if any. Either does, with and without a GPU."""
    return next((package for package in _PACKAGES if find_spec(package)), None)


def _make_agent(slab: Slab) -> tuple[Any, tuple[type[Exception], ...]]:
    """An agent of a random name that has registered the slab, and the library's errors."""
    package = installed()
    if package is None:
        raise ConfigError(
            "transport nixl needs NIXL, which is not installed; run `pip install --no-deps nixl-cu12==1.5.1` "
            "(without --no-deps it would bring torch, which is not needed), or use transport tcp"
        )
    try:
        api, bindings = import_module(f"{package}._api"), import_module(f"{package}._bindings")
    except ImportError as error:
        raise ConfigError(f"NIXL is installed but cannot be loaded: {error}; use transport tcp") from None
    failures = tuple(
        kind for kind in vars(bindings).values() if isinstance(kind, type) and issubclass(kind, Exception)
    )
    if "NIXL_LOG_LEVEL" not in os.environ:
        logging.getLogger("nixl").setLevel(logging.WARNING)  # it logs to stdout
    try:
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = api.nixl_agent(f"glm-{secrets.token_hex(8)}", config)
        agent.register_memory([(slab.address, slab.bytes.size, 0, "")], "DRAM")
    except failures as error:
        raise ConfigError(f"NIXL cannot start with UCX here: {error}; use transport tcp") from None
    _LIFELONG.append((agent, slab))
    return agent, failures


def _is_loopback(host: str) -> bool:
    try:
        found = socket.getaddrinfo(host, None)
    except OSError as error:
        raise ConfigError(
            f"host {host} cannot be resolved: {error}; give an address of this machine"
        ) from None
    return all(ipaddress.ip_address(str(address[4][0]).split("%")[0]).is_loopback for address in found)
