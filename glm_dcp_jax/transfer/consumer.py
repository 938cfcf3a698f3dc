"""The threads that read caches from producers: workers, one load at a time each, and a pulse for every producer.

Every wait has a deadline of ours. What a worker has read is the engine's to take from `events`; a failure is said once,
when nothing of the load can be written any more.
"""

import contextlib
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer.daemon_pool import DaemonPool
from glm_dcp_jax.transfer.fingerprint import PROTOCOL, Fingerprint, check_alike
from glm_dcp_jax.transfer.loads import Ended, Landed, Load, LoadFailed, check_promise, checked
from glm_dcp_jax.transfer.packing import Part
from glm_dcp_jax.transfer.pieces import Piece, cut
from glm_dcp_jax.transfer.pulse import Pulses
from glm_dcp_jax.transfer.references import Reference
from glm_dcp_jax.transfer.transfer_stats import ConsumerStats
from glm_dcp_jax.transfer.transports import Transport, TransportError
from glm_dcp_jax.transfer.wire import Peer, PeerError, RemoteError, connect

_log = logging.getLogger(__name__)
_ATTEMPTS = 2
"""How often a key is opened: once more where a connection broke."""
_BROKEN = ("lost", "unknown_ticket")
"""Kinds of a connection that broke: a producer takes back what it had published on it."""
_NOT_OURS = ("unknown", "used", "expired", "wrong_engine", "other_prompt", "dropped", "stale_attempt")
"""What a producer refuses because the key is not, or no longer, ours: nothing of it is ours to give up."""
_LEAST_PAUSE, _MOST_PAUSE = 0.005, 0.1
_TALKERS = 8
_LAST_WORD_SECONDS = 2.0
"""What telling a producer how a load has ended may take: its lease says the same later."""
_CLOSE_SECONDS = 3.0
"""What the threads of each kind may take to end; they are daemons, so a process ends without them."""


class Consumer:
    """Reads caches for one engine. `events` are for the engine's thread; `wake` tells it that there are any."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        row_bytes: Callable[[Part, bool], int],
        transport: Transport,
        secret: bytes,
        lease: float,
        handshake_seconds: float,
        transfer_seconds: float,
        workers: int,
        wake: Callable[[], None],
    ) -> None:
        """row_bytes: of a part, with an MTP layer's behind it or not."""
        self.stats = ConsumerStats()
        self._fingerprint, self._row_bytes, self._transport = fingerprint, row_bytes, transport
        self._secret, self._wake = secret, wake
        self._handshake_seconds, self._transfer_seconds = handshake_seconds, transfer_seconds
        self._events: deque[Landed | Ended] = deque()
        self._loads: set[Load] = set()
        self._lock = threading.Lock()
        self._workers = DaemonPool(workers, "kv-load")
        self._askers = DaemonPool(workers, "kv-ask")
        self._talkers = DaemonPool(_TALKERS, "kv-last-word")
        self._silent: dict[tuple[str, int], float] = {}
        heard = lambda address: self._silent.pop(address, None)  # noqa: E731
        self._pulses = Pulses(secret, lease, handshake_seconds, self._lost, heard)

    def expect(self, load: Load) -> None:
        """A request has come whose cache is elsewhere: keep it there."""
        load.times.expected = time.monotonic()
        with self._lock:
            self._loads.add(load)
        self._pulses.add(load.reference)

    def begin(self, load: Load, start: int, end: int) -> None:
        """Read tokens start .. end - 1: the request has pages for them."""
        load.start, load.end, load.times.begun = start, end, time.monotonic()
        self._workers.submit(self._run, load)

    def cancel(self, load: Load) -> None:
        """The engine does not want it any more: the producer hears of it, and no event comes."""
        load.cancel()
        if not load.begun:
            self._forget(load)
            self.drop(load.reference)

    def drop(self, reference: Reference) -> None:
        """Tell a producer, some time soon, that nobody will come for this, unless another load still will."""
        message = {"do": "drop", "key": reference.key, "consumer": "nobody that has opened it"}
        self._tell(reference, message)

    def events(self) -> list[Landed | Ended]:
        """What has come since the last call, in order."""
        found = []
        with contextlib.suppress(IndexError):
            while True:
                found.append(self._events.popleft())
        return found

    @property
    def has_events(self) -> bool:
        """Whether there is anything to take."""
        return bool(self._events)

    @property
    def loads(self) -> int:
        """Loads that have not ended."""
        return len(self._loads)

    def close(self) -> None:
        """Give up everything that is on its way; in bounded time, whatever producers do."""
        with self._lock:
            loads = list(self._loads)
        for load in loads:
            self.cancel(load)
        self._pulses.close()
        self._workers.close(_CLOSE_SECONDS, finish_queued=False)
        self._askers.close(_CLOSE_SECONDS, finish_queued=False)
        self._talkers.close(_CLOSE_SECONDS, finish_queued=True)

    # ---- workers

    def _run(self, load: Load) -> None:
        failure = None
        try:
            self._read(load)
        except LoadFailed as error:
            failure = error
        except Exception as error:
            _log.exception("request %s: reading its cache failed", load.request_id)
            failure = LoadFailed("error", f"{type(error).__name__}: {error}")
        self._forget(load)
        self.stats.add(load, failure)
        if not load.is_cancelled():
            self._events.append(Ended(load, failure))
            self._wake()
        if failure is None:
            _log.info(
                "request %s: its cache came: tokens %d to %d, %.1f MB in %.0f ms",
                load.request_id,
                load.start,
                load.end,
                load.received_bytes / 1e6,
                1e3 * (load.times.confirmed - load.times.begun),
            )
        elif failure.kind not in _NOT_OURS:
            self._give_up(load)

    def _read(self, load: Load) -> None:
        deadline = time.monotonic() + self._transfer_seconds
        waiting = deque(cut(load.start, load.end, self._fingerprint.piece_tokens))
        for attempt in range(_ATTEMPTS):
            try:
                self._converse(load, waiting, deadline)
                return
            except LoadFailed as failure:
                if failure.kind not in _BROKEN or attempt + 1 == _ATTEMPTS or load.is_cancelled():
                    raise
                _log.warning("request %s: %s; trying once more", load.request_id, failure)

    def _converse(self, load: Load, waiting: "deque[tuple[int, int]]", deadline: float) -> None:
        """Open the key and read what is waiting, piece by piece; pieces that have landed stay."""
        if load.failure is not None:
            raise load.failure
        if load.is_cancelled():
            raise LoadFailed("cancelled", "nobody wants it any more")
        reference = load.reference
        if self._was_silent(reference, load.times.expected):
            raise LoadFailed("timeout", f"the producer at {reference.host}:{reference.port} does not answer")
        greeting = min(deadline, time.monotonic() + self._handshake_seconds)
        with self._failing(reference), connect(*reference.address, self._secret, greeting) as peer:
            producer = self._greet(peer, greeting)
            self._silent.pop(reference.address, None)
            load.attempt = self._open(peer, load, greeting)
            load.times.opened = time.monotonic()
            conversation = _Conversation(peer, producer, load, deadline)
            self._pieces(conversation, waiting)
            load.times.fetched = time.monotonic()
            conversation.say("confirm")
            load.times.confirmed = time.monotonic()
            self._acknowledge(peer, load)

    def _acknowledge(self, peer: Peer, load: Load) -> None:
        """What was read is right, whether or not the producer hears of it; nobody waits long for that."""
        message = {
            "do": "ack",
            "key": load.reference.key,
            "attempt": load.attempt,
            "readers": list(range(self._fingerprint.dcp)),
            "ok": True,
        }
        try:
            peer.request(message, time.monotonic() + _LAST_WORD_SECONDS)
        except PeerError:
            self._talkers.submit(self._say, load.reference, message)

    def _open(self, peer: Peer, load: Load, deadline: float) -> int:
        """Take the key for this load. Returns the attempt's number."""
        message = {
            "do": "open",
            "key": load.reference.key,
            "engine": load.reference.engine_id,
            "consumer": load.consumer,
            "digest": load.digest.hex(),
            "start": load.start,
            "length": load.end,
        }
        attempt = peer.request(message, deadline).get("attempt")
        if type(attempt) is not int:
            raise LoadFailed("protocol", "the producer gave no attempt's number")
        return attempt

    def _greet(self, peer: Peer, deadline: float) -> Fingerprint:
        """Both phases of the handshake. Raises ConfigError if the two engines do not fit together."""
        ours = self._fingerprint
        hello = peer.request({"do": "hello", "protocol": PROTOCOL, "digest": ours.digest}, deadline)
        if hello.get("protocol") != PROTOCOL:
            raise ConfigError(
                f"the producer speaks version {hello.get('protocol')!r:.20} of the protocol, this engine {PROTOCOL}; "
                "run one release"
            )
        theirs = peer.request({"do": "layout", "fingerprint": ours.as_object()}, deadline)
        producer = Fingerprint.from_object(theirs.get("fingerprint"))
        check_alike(producer, ours)
        return producer

    def _pieces(self, conversation: "_Conversation", waiting: "deque[tuple[int, int]]") -> None:
        """Fetch piece after piece; the producer packs the next one meanwhile."""
        load, deadline = conversation.load, conversation.deadline
        most = min(self._fingerprint.piece_tokens, conversation.producer.piece_tokens)
        smaller = [part for start, end in waiting for part in cut(start, end, most)]
        waiting.clear()
        waiting.extend(smaller)
        asked = self._askers.submit(conversation.ask, *waiting[0]) if waiting else None
        while asked is not None:
            answer = self._answer(conversation, asked, *waiting[0])
            start, end = waiting[0]
            asked = self._askers.submit(conversation.ask, *waiting[1]) if len(waiting) > 1 else None
            try:
                landed = self._fetch(conversation, answer, start, end)
            except BaseException:
                if asked is not None:
                    asked.cancel()
                raise
            load.wait_for_room(deadline)
            waiting.popleft()
            if load.is_cancelled():
                raise LoadFailed("cancelled", "nobody wants it any more")
            self._events.append(landed)
            self._wake()

    def _answer(
        self, conversation: "_Conversation", asked: "Future[dict[str, Any]]", start: int, end: int
    ) -> dict[str, Any]:
        """What a producer published; asked again as long as it has no room for it beside what others read."""
        pause = _LEAST_PAUSE
        while True:
            try:
                return asked.result()
            except RemoteError as error:
                if error.remote_kind != "busy":
                    raise
                if time.monotonic() + pause >= conversation.deadline:
                    raise LoadFailed("timeout", str(error)) from None
            time.sleep(pause)
            pause = min(2 * pause, _MOST_PAUSE)
            asked = self._askers.submit(conversation.ask, start, end)

    def _fetch(self, conversation: "_Conversation", answer: dict[str, Any], start: int, end: int) -> Landed:
        load, producer = conversation.load, conversation.producer
        ticket = answer.get("ticket")
        if not isinstance(ticket, dict):
            raise LoadFailed("corrupt", "the producer sent no ticket")
        piece = Piece.of(producer.geometry, self._fingerprint.geometry, start, end)
        row_bytes: dict[Part, int] = {
            "records": self._row_bytes("records", producer.mtp),
            "keys": self._row_bytes("keys", producer.mtp),
        }
        check_promise(piece, ticket, row_bytes)
        began = time.monotonic()
        arrays = self._transport.fetch(ticket, conversation.deadline, load.is_cancelled)
        load.times.fetching += time.monotonic() - began
        load.received_bytes += sum(array.nbytes for array in arrays)
        load.runs += piece.runs
        given = checked(piece, arrays, answer.get("crcs"), row_bytes)
        conversation.say("taken", ticket=str(ticket.get("id")))
        return Landed(load, piece, given)

    # ---- the rest

    @contextlib.contextmanager
    def _failing(self, reference: Reference) -> Iterator[None]:
        """Whatever goes wrong between two engines, as a LoadFailed."""
        try:
            yield
        except RemoteError as error:
            raise LoadFailed(error.remote_kind, str(error)) from None
        except PeerError as error:
            self._note_silence(reference, error)
            raise LoadFailed(error.kind, str(error)) from None
        except TransportError as error:
            raise LoadFailed(error.kind, str(error)) from None
        except ConfigError as error:
            raise LoadFailed("unlike", str(error)) from None

    def _was_silent(self, reference: Reference, since: float) -> bool:
        """Whether its producer has let a deadline pass since then: nobody need wait for the same again."""
        return self._silent.get(reference.address, 0.0) > since

    def _note_silence(self, reference: Reference, error: PeerError) -> None:
        if error.kind == "timeout":
            self._silent[reference.address] = time.monotonic()

    def _lost(self, reference: Reference) -> None:
        """A producer says that it does not hold this any more: do not even begin."""
        with self._lock:
            for load in self._loads:
                if load.reference == reference and not load.begun:
                    load.failure = LoadFailed("expired", "the producer holds its cache no more")

    def _forget(self, load: Load) -> None:
        with self._lock:
            self._loads.discard(load)
        self._pulses.remove(load.reference)

    def _give_up(self, load: Load) -> None:
        """The producer need not hold it for us any more."""
        message: dict[str, Any] = {"do": "drop", "key": load.reference.key, "consumer": load.consumer}
        if load.attempt:
            message = {
                "do": "ack",
                "key": load.reference.key,
                "attempt": load.attempt,
                "readers": [],
                "ok": False,
            }
        self._tell(load.reference, message)

    def _tell(self, reference: Reference, message: dict[str, Any]) -> None:
        """Have a producer told, by threads that wait for nobody else."""
        with self._lock:
            wanted = any(load.reference.key == reference.key for load in self._loads)
        # Two requests may bring one key: the end of the one must not be the other's.
        if message["do"] != "drop" or not wanted:
            self._talkers.submit(self._say, reference, message)

    def _say(self, reference: Reference, message: dict[str, Any]) -> None:
        """One message on a connection of its own; if it is not heard, the lease ends in time."""
        began = time.monotonic()
        deadline = began + _LAST_WORD_SECONDS
        try:
            if self._was_silent(reference, began - _LAST_WORD_SECONDS):
                raise PeerError("timeout", "it has just kept another one waiting")
            with connect(*reference.address, self._secret, deadline) as peer:
                peer.request(message, deadline)
        except PeerError as error:
            self._note_silence(reference, error)
            self.stats.count_unheard()
            _log.info("the producer at %s:%d did not hear us: %s", *reference.address, error)


class _Conversation:
    """One attempt of a load, on one connection."""

    def __init__(self, peer: Peer, producer: Fingerprint, load: Load, deadline: float) -> None:
        self.peer, self.producer, self.load, self.deadline = peer, producer, load, deadline

    def ask(self, start: int, end: int) -> dict[str, Any]:
        """Have a piece packed and published."""
        began = time.monotonic()
        try:
            message = {"do": "piece", "key": self.load.reference.key, "attempt": self.load.attempt}
            return self.peer.exchange(
                message | {"start": start, "end": end}, self.deadline, 0, self.load.is_cancelled
            )[0]
        finally:
            self.load.times.asking += time.monotonic() - began

    def say(self, do: str, **more: Any) -> None:
        """Something with an answer that says nothing."""
        message = {"do": do, "key": self.load.reference.key, "attempt": self.load.attempt, **more}
        self.peer.exchange(message, self.deadline, 0, self.load.is_cancelled)
