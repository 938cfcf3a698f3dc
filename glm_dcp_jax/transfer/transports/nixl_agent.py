"""NIXL's agent of this process: its peers, its reads, and its notes to peers; one call of the library at a time."""

import base64
import contextlib
import logging
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer.transports.interface import TransportError
from glm_dcp_jax.transfer.transports.slab import Slab

_PACKAGES = ("nixl_cu12", "nixl_cu13")
_WRONG = ("NotFound", "InvalidParam", "Mismatch", "NotSupported")
"""The library's errors that are the request's fault; the others are the peer's end."""

_LIFELONG: list[Any] = []
"""Agents and slabs, which must outlive every transport."""


class Read:
    """A one-sided read: `state` is PROC until it has ended, and nothing is written any more once it has."""

    def __init__(self, peer: str, handle: Any) -> None:
        self.peer = peer
        self.handle = handle
        self.begun = False
        self.state = "PROC"

    @property
    def ended(self) -> bool:
        """Whether what it reads into is nobody's but its owner's again."""
        return self.state != "PROC"


class Agent:
    """An agent of a random name that has registered a slab. May be used by any thread.

    Its methods raise TransportError "corrupt" for what a peer does not have, and "lost" when the peer has ended; `what`
    begins the message. Raises ConfigError if NIXL is not installed or cannot start.
    """

    def __init__(self, slab: Slab) -> None:
        self._lock = threading.Lock()
        self._library, self._failures = _start(slab)
        self.name: str = self._library.name
        self.metadata = base64.b64encode(self._library.get_agent_metadata()).decode()
        """What peers need to reach this agent, base64."""
        self._peers: set[str] = set()
        self._lost: set[str] = set()
        self._reads: Counter[str] = Counter()  # of each peer, without an end yet

    def meet(self, peer: str, metadata: Any, what: str) -> None:
        """Learn where a peer is, unless it is known."""
        try:
            known = base64.b64decode(metadata, validate=True)
        except (TypeError, ValueError):
            raise TransportError("corrupt", f"{what}: its metadata cannot be read") from None
        with self._call(peer, what):
            if peer in self._lost:
                raise TransportError("lost", f"{what}: the producer was lost")
            if peer not in self._peers:
                self._peers.add(self._library.add_remote_agent(known).decode())
            if peer not in self._peers:
                raise TransportError("corrupt", f"{what}: its metadata is of another agent")

    def say(self, peer: str, note: str, what: str) -> None:
        """Send a note to a peer that is known."""
        with self._call(peer, what):
            self._library.send_notif(peer, note.encode())

    def hear(self) -> list[str]:
        """The notes that have come since. This also moves the bytes of others' reads along."""
        with self._lock, contextlib.suppress(*self._failures):
            heard = self._library.get_new_notifs()
            return [note.decode(errors="replace") for notes in heard.values() for note in notes]
        return []

    def read(self, peer: str, source: int, target: int, size: int, note: str, what: str) -> Read:
        """A read of `size` bytes at a peer's address `source` to our own address `target`. The first `poll` begins it.

        note: sent to the peer once they are here; none if empty.
        """
        with self._call(peer, what):
            ours = self._library.get_xfer_descs([(target, size, 0)], "DRAM")
            theirs = self._library.get_xfer_descs([(source, size, 0)], "DRAM")
            handle = self._library.initialize_xfer("READ", ours, theirs, peer, note.encode())
            self._reads[peer] += 1
            return Read(peer, handle)

    def poll(self, read: Read, what: str) -> None:
        """Begin a read or move it along, and note in it when it has ended. Raises TransportError if it ended badly."""
        if not read.ended:
            step = self._library.check_xfer_state if read.begun else self._library.transfer
            read.begun = True
            self._step(read, step, what)
        if read.state != "DONE" and read.ended:
            raise TransportError("lost", f"{what}: the read ended as {read.state}")

    def _step(self, read: Read, step: Callable[[Any], str], what: str) -> None:
        """One that has ended, well or not, is released; no other ever is."""
        state = "PROC"  # so it stays if this thread is interrupted
        try:
            with self._call(read.peer, what):
                state = step(read.handle)
        except TransportError:
            state = "ERR"
            raise
        finally:
            if state != "PROC":
                self._release(read)
            read.state = state

    def _release(self, read: Read) -> None:
        with self._lock:
            with contextlib.suppress(*self._failures):
                self._library.release_xfer_handle(read.handle)
            self._reads[read.peer] -= 1
            self._forget_if_lost(read.peer)

    @contextlib.contextmanager
    def _call(self, peer: str, what: str) -> Iterator[None]:
        with self._lock:
            try:
                yield
            except self._failures as error:
                if any(word in type(error).__name__ for word in _WRONG):
                    raise TransportError("corrupt", f"{what}: {error}") from None
                self._lost.add(peer)
                self._forget_if_lost(peer)
                raise TransportError("lost", f"{what}: {error}") from None

    def _forget_if_lost(self, peer: str) -> None:
        """So that it is met anew if it returns; not before its last read has ended, since of a peer that was forgotten
        the library would not say whether it still writes."""
        if peer in self._lost and not self._reads[peer]:
            with contextlib.suppress(*self._failures):
                self._library.remove_remote_agent(peer)
            self._lost.discard(peer)
            self._peers.discard(peer)
            del self._reads[peer]


def installed() -> str | None:
    """The NIXL package that is installed here, if any. Either does, with and without a GPU."""
    return next((package for package in _PACKAGES if find_spec(package)), None)


def _start(slab: Slab) -> tuple[Any, tuple[type[Exception], ...]]:
    """The library's agent, and its errors."""
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
    refusals: tuple[type[Exception], ...] = (*failures, RuntimeError)
    try:
        # The library's own progress thread takes a whole core; `hear` and `poll` do the same when called.
        config = api.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
        agent = api.nixl_agent(f"glm-{secrets.token_hex(8)}", config)
        agent.register_memory([(slab.address, slab.bytes.size, 0, "")], "DRAM")
    except refusals as error:
        raise ConfigError(f"NIXL cannot start with UCX here: {error}; use transport tcp") from None
    _LIFELONG.append((agent, slab))
    return agent, failures
