"""Authenticated TCP connections between two engines that know one secret. Plain sockets, no jax.

Before the first frame each side proves, by HMAC-SHA256 over both sides' fresh nonces, that it knows the secret; the
side that connected proves first, so that a stranger learns nothing from a listener. What follows is neither encrypted
nor signed: the wire belongs on loopback or in a private network.

Deadlines are absolute `time.monotonic()` seconds and are kept whatever the peer does: a stopped peer is a "timeout"
when due, a dead one is "lost" at once. After any error but RemoteError (or a turn that did not come in time) the
connection has ended, since half a frame may have travelled.
"""

import contextlib
import hmac
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer.peer import MAGIC, VERSION, Peer, PeerError, RemoteError

__all__ = ["Listener", "Peer", "PeerError", "RemoteError", "connect"]

logger = logging.getLogger(__name__)

AUTHENTICATION_SECONDS = 5.0
"""What a stranger may take to prove itself to a listener."""
MAX_CONNECTIONS = 256
"""Connections that one listener has at a time; further ones are closed at once."""

_HELLO = struct.Struct(">4sH32s")  # magic, version, the listener's nonce
_PROOF = struct.Struct(">4sH32s32s")  # magic, version, the caller's nonce and proof
_VERDICT = struct.Struct(">?32s")  # whether the caller is let in, and then the listener's own proof
_CLOSE_SECONDS = 5.0


def connect(host: str, port: int, secret: bytes, deadline: float) -> Peer:
    """Connect to a Listener that knows the same secret.

    Raises PeerError: lost (nothing listens there), timeout, auth, or protocol (something else listens there).
    """
    name = f"peer {host}:{port}"
    left = deadline - time.monotonic()
    if left <= 0:
        raise PeerError("timeout", f"{name}: no time left to connect")
    try:
        connection = socket.create_connection(_checked(host, port), timeout=left)
    except TimeoutError:
        raise PeerError("timeout", f"{name}: no connection in time") from None
    except (OSError, ValueError) as error:  # ValueError: no host can have such a name
        raise PeerError("lost", f"{name}: cannot connect: {error}") from None
    if connection.getsockname() == connection.getpeername():
        # Loopback's own trick: a port that nobody listens on, drawn as our own end's, connects to itself.
        connection.close()
        raise PeerError("lost", f"{name}: cannot connect: nothing listens there")
    peer = Peer(connection, name)
    try:
        _prove_to_listener(peer, secret, deadline)
    except PeerError:
        peer.close()
        raise
    return peer


def _proof(secret: bytes, role: bytes, *nonces: bytes) -> bytes:
    return hmac.digest(secret, b"glm_dcp_jax wire, " + role + b", " + b"".join(nonces), "sha256")


def _prove_to_listener(peer: Peer, secret: bytes, deadline: float) -> None:
    with peer.use():
        magic, version, theirs = _HELLO.unpack(peer.read(memoryview(bytearray(_HELLO.size)), deadline))
        if magic != MAGIC:
            raise peer.failed("protocol", "what listens there is not an engine of this kind")
        if version != VERSION:
            raise peer.failed("protocol", f"speaks version {version}, this engine {VERSION}; run one release")
        ours = os.urandom(32)
        proof = _PROOF.pack(MAGIC, VERSION, ours, _proof(secret, b"caller", theirs, ours))
        peer.write([memoryview(proof)], deadline)
        verdict = peer.read(memoryview(bytearray(_VERDICT.size)), deadline)
        welcome, answer = _VERDICT.unpack(verdict)
        if not welcome:
            raise peer.failed("auth", "refused our secret; give both engines the same one")
        if not hmac.compare_digest(answer, _proof(secret, b"listener", theirs, ours)):
            raise peer.failed("auth", "does not know our secret")


def _let_in(peer: Peer, secret: bytes) -> None:
    """The listener's half of the proof; raises PeerError for whoever is not let in."""
    deadline = time.monotonic() + AUTHENTICATION_SECONDS
    with peer.use():
        ours = os.urandom(32)
        peer.write([memoryview(_HELLO.pack(MAGIC, VERSION, ours))], deadline)
        magic, version, theirs, proof = _PROOF.unpack(peer.read(memoryview(bytearray(_PROOF.size)), deadline))
        if magic != MAGIC or version != VERSION:
            raise peer.failed("protocol", f"is not an engine of this kind, or not of version {VERSION}")
        welcome = hmac.compare_digest(proof, _proof(secret, b"caller", ours, theirs))
        answer = _proof(secret, b"listener", ours, theirs) if welcome else bytes(32)
        peer.write([memoryview(_VERDICT.pack(welcome, answer))], deadline)
        if not welcome:
            raise peer.failed("auth", "does not know our secret")


class Listener:
    """Accepts connections on host:port and runs `serve(peer)` for each in a thread of its own, all daemons.

    A PeerError is a normal end of `serve`; anything else is logged and ends that connection only. port 0 takes any free
    one; `port` is the one taken. Raises ConfigError if the address cannot be listened on.
    """

    def __init__(self, host: str, port: int, secret: bytes, serve: Callable[[Peer], None], name: str) -> None:
        self._secret = secret
        self._serve = serve
        self._name = name
        self._guard = threading.Lock()
        self._peers: dict[Peer, threading.Thread] = {}
        self._closed = False
        self._socket = _listen(host, port)
        self.host = host
        self.port: int = self._socket.getsockname()[1]
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop accepting, end all connections and wait for their threads, though not for ever; idempotent."""
        with self._guard:
            self._closed = True
            peers = dict(self._peers)
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # wakes accept
        for peer in peers:
            peer.close()
        due = time.monotonic() + _CLOSE_SECONDS
        for thread in [self._thread, *peers.values()]:
            if thread is not threading.current_thread():
                thread.join(max(0.0, due - time.monotonic()))
        self._socket.close()

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, address = self._socket.accept()
            except OSError as error:
                if not self._closed:
                    logger.warning("%s: cannot accept a connection: %s", self._name, error)
                    time.sleep(0.1)  # out of file descriptors, most likely: others must close theirs first
                continue
            self._start(connection, f"{self._name}: peer {address[0]}:{address[1]}")

    def _start(self, connection: socket.socket, name: str) -> None:
        try:
            peer = Peer(connection, name)
        except OSError:  # gone already
            connection.close()
            return
        thread = threading.Thread(
            target=self._run, args=(peer,), name=f"{self._name} connection", daemon=True
        )
        with self._guard:
            full = len(self._peers) >= MAX_CONNECTIONS
            if not full and not self._closed:
                try:
                    thread.start()
                    self._peers[peer] = thread
                    return
                except RuntimeError as error:  # no threads left: others must end first
                    logger.warning("%s: turned away: %s", name, error)
        if full:
            logger.warning("%s: turned away, there are %d connections already", name, MAX_CONNECTIONS)
        peer.close()

    def _run(self, peer: Peer) -> None:
        try:
            _let_in(peer, self._secret)
            self._serve(peer)
        except PeerError as error:
            level = logging.WARNING if error.kind in ("auth", "protocol") else logging.DEBUG
            logger.log(level, "%s", error)
        except Exception:
            logger.exception("%s: the connection ends on an error", peer.name)
        finally:
            peer.close()
            with self._guard:
                del self._peers[peer]


def _checked(host: str, port: int) -> tuple[str, int]:
    """The address itself: the resolver would take a port that is too large modulo 65,536."""
    if not 0 <= port < 1 << 16:
        raise OSError(f"port {port} is not one of 0 to 65535")
    return host, port


def _listen(host: str, port: int) -> socket.socket:
    try:
        found = socket.getaddrinfo(*_checked(host, port), type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        # A server that is started again takes its port back although old connections linger.
        return socket.create_server(address, family=family, backlog=128, reuse_port=False)
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"cannot listen on {host}:{port}: {error}; choose an address of this machine and a free port (0: any)"
        ) from None
