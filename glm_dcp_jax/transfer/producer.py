"""The producer's side: offers that consumers open, and pieces of them that it packs and publishes on demand.

A consumer's connection says, one request after the other:

    hello    digest                                    -> digest                 phase one: what must be equal
    layout   fingerprint                               -> fingerprint            phase two: everything, checked by both
    open     key, engine, consumer, digest, length, start  -> attempt, lease     takes the key for one load
    piece    key, attempt, start, end                  -> ticket, crcs           packs, and publishes with the transport
    taken    key, attempt, ticket                      ->                        its memory may be given back
    confirm  key, attempt                              ->                        the lease holds: what was read is right
    ack      key, attempt, readers, ok                 ->                        readers are done, or have failed
    beat     keys                                      -> lost                   the leases of these go on
    drop     key, consumer                             ->                        nobody will come for it

Each has a thread of its own; packing is only started there, on the devices' own time, between two steps of the engine.
"""

import logging
import threading
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer.fingerprint import PROTOCOL, Fingerprint, check_alike
from glm_dcp_jax.transfer.offers import Held, Offers, OfferStats, Refused
from glm_dcp_jax.transfer.packing import PARTS, Part, PoolsLost
from glm_dcp_jax.transfer.pieces import Piece
from glm_dcp_jax.transfer.pulse import KEYS_IN_A_BEAT
from glm_dcp_jax.transfer.references import Reference
from glm_dcp_jax.transfer.transports import Transport, TransportError
from glm_dcp_jax.transfer.wire import Listener, Peer

_log = logging.getLogger(__name__)

Pack = Callable[[Part, np.ndarray, int], list[jax.Array]]
"""Starts the packing of slots [tp, N] of pools of some generation; each rank's rows [N, row_bytes] uint8, on its own
device. Raises PoolsLost where they are of another."""
REAPER_SECONDS = 0.25
_MOST_KEYS = KEYS_IN_A_BEAT


@dataclass
class ProducerStats:
    """Counts since the start. sent_bytes: of rows. padding_bytes: packed besides them. offers: see OfferStats."""

    pieces: int = 0
    sent_bytes: int = 0
    padding_bytes: int = 0
    offers: OfferStats | None = None


@dataclass(eq=False)
class _Conversation:
    """What a connection has come to. consumer: its fingerprint, once both sides have checked it.

    tickets: published and not taken yet, with their keys.
    """

    consumer: Fingerprint | None = None
    starts: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    tickets: dict[str, str] = field(default_factory=dict)


class _Wrong(Exception):
    """A message that makes no sense."""


class Producer:
    """Offers caches to consumers, and serves them; from any thread."""

    def __init__(
        self,
        fingerprint: Fingerprint,
        engine_id: str,
        transport: Transport,
        pack: Pack,
        host: str,
        port: int,
        secret: bytes,
        lease: float,
    ) -> None:
        """host, port: where consumers find it. lease: seconds. Raises ConfigError if it cannot listen there."""
        self.fingerprint, self.engine_id = fingerprint, engine_id
        self._geometry = fingerprint.geometry
        self._transport, self._pack, self._lease = transport, pack, lease
        self._offers = Offers(lease)
        self._stats, self._lock = ProducerStats(), threading.Lock()
        self._conversations: set[_Conversation] = set()
        self._closed = threading.Event()
        self._listener = Listener(host, port, secret, self._serve, "kv-control")
        self._reaper = threading.Thread(target=self._reap, name="kv-reaper", daemon=True)
        self._reaper.start()
        _log.info("KV producer %s listens on %s:%d", engine_id, host, self._listener.port)

    def offer(self, held: Held) -> dict[str, Any]:
        """Hold a request's pages for one consumer. Returns the kv_transfer_params that it needs."""
        key = self._offers.add(held)
        reference = Reference(
            self.engine_id,
            held.request_id,
            self._listener.host,
            self._listener.port,
            key,
            held.length,
            self.fingerprint.connector,
            self._lease,
        )
        return reference.as_params(list(held.pages), self.fingerprint.tp, self.fingerprint.dcp)

    def drop_all(self) -> None:
        """The caches are gone, and nothing of them may be read any more."""
        self._offers.close()

    def release(self, reference: Reference) -> bool:
        """Nobody will come for it. Returns whether it was held, and nobody had come."""
        return reference.engine_id == self.engine_id and self._offers.drop(
            reference.key, "it was released", unopened=True
        )

    @property
    def held(self) -> int:
        """Offers whose pages are held."""
        return self._offers.stats().held

    def stats(self) -> ProducerStats:
        """The counts at this moment."""
        with self._lock:
            return ProducerStats(
                self._stats.pieces, self._stats.sent_bytes, self._stats.padding_bytes, self._offers.stats()
            )

    def drain(self, seconds: float) -> None:
        """Let consumers read what was promised them, for so long."""
        deadline = time.monotonic() + seconds
        while self.held and time.monotonic() < deadline:
            time.sleep(0.02)

    def close(self) -> None:
        """End all conversations, and give all pages back."""
        self._closed.set()
        self._listener.close()
        self._offers.close()
        self._reaper.join(1.0)

    def _reap(self) -> None:
        while not self._closed.wait(min(REAPER_SECONDS, self._lease / 4)):
            for request_id in self._offers.expire():
                _log.warning(
                    "request %s: nobody came for its cache within its lease",
                    request_id,
                    extra={"request_id": request_id},
                )
            self._retire_ended()

    def _retire_ended(self) -> None:
        """What was published of offers that have ended: a consumer that stands still keeps its connection for ever."""
        for conversation in list(self._conversations):
            for ticket, key in list(conversation.tickets.items()):
                if not self._offers.is_held(key):
                    conversation.tickets.pop(ticket, None)
                    self._transport.retire(ticket)

    # ---- conversations

    def _serve(self, peer: Peer) -> None:
        conversation = _Conversation()
        self._conversations.add(conversation)
        try:
            while True:
                message, _ = peer.receive(None)
                try:
                    answer = self._answer(conversation, message)
                except Refused as refused:
                    peer.refuse(refused.kind, str(refused))
                except TransportError as error:
                    peer.refuse("busy" if error.kind == "busy" else "transport", str(error))
                except ConfigError as error:
                    peer.refuse("unlike", str(error))
                except _Wrong as error:
                    peer.refuse("protocol", str(error))
                else:
                    peer.send(answer)
        finally:
            self._conversations.remove(conversation)
            for ticket in list(conversation.tickets):
                self._transport.retire(ticket)

    def _answer(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        does = {
            "hello": self._hello,
            "layout": self._layout,
            "open": self._open,
            "piece": self._piece,
            "taken": self._taken,
            "confirm": self._confirm,
            "ack": self._ack,
            "beat": self._beat,
            "drop": self._drop,
        }
        asked = message.get("do")
        handle = does.get(asked) if isinstance(asked, str) else None
        if handle is None:
            raise _Wrong(f"there is no request {message.get('do')!r:.100}; these are {', '.join(does)}")
        return handle(conversation, message)

    def _hello(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        return {"protocol": PROTOCOL, "digest": self.fingerprint.digest}

    def _layout(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        consumer = Fingerprint.from_object(message.get("fingerprint"))
        check_alike(self.fingerprint, consumer)
        _ = consumer.geometry  # raises for a layout that cannot be
        conversation.consumer = consumer
        return {"fingerprint": self.fingerprint.as_object()}

    def _open(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        consumer = _known(conversation)
        key, start, length = _text(message, "key"), _whole(message, "start"), _whole(message, "length")
        if _text(message, "engine") != self.engine_id:
            raise Refused("wrong_engine", f"this is engine {self.engine_id}; the one that is meant is gone")
        digest = _hex(message, "digest")
        if not start < length:
            raise _Wrong(f"there are no tokens from {start} to {length}")
        held = self._offers.held(key)
        if length > held.length:  # before any array of that length is made
            raise Refused("too_short", f"{held.length} tokens are held, not {length}")
        piece = Piece.of(self._geometry, consumer.geometry, start, length)
        readers: dict[int, frozenset[int]] = {}
        for plan in piece.plans.values():
            for rank, of_rank in plan.readers.items():
                readers[rank] = readers.get(rank, frozenset()) | of_rank
        opened = self._offers.open(key, _text(message, "consumer"), digest, readers)
        conversation.starts[key, opened.attempt] = start, length
        return {"attempt": opened.attempt, "lease": opened.lease}

    def _piece(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        consumer = _known(conversation)
        key, attempt = _text(message, "key"), _whole(message, "attempt")
        start, end = _whole(message, "start"), _whole(message, "end")
        first, last = conversation.starts.get((key, attempt), (0, 0))
        if not first <= start < end <= last or end - start > self.fingerprint.piece_tokens:
            raise _Wrong(
                f"tokens {start} to {end} are no piece of {first} to {last}; a piece has at most "
                f"{self.fingerprint.piece_tokens} tokens"
            )
        piece = Piece.of(self._geometry, consumer.geometry, start, end)
        arrays: list[jax.Array] = []
        rows: list[int] = []
        with self._offers.reading(key, attempt) as held:
            for part in PARTS:
                packed = self._packed(key, part, piece.slots_to_pack(part, held.pages), held.generation)
                counts = piece.rows(part)
                arrays += [array for array, count in zip(packed, counts, strict=True) if count]
                rows += [count for count in counts if count]
        crcs = [zlib.crc32(np.asarray(array)[:count].data) for array, count in zip(arrays, rows, strict=True)]
        ticket = self._transport.publish(arrays, rows)
        conversation.tickets[ticket["id"]] = key
        self._count(arrays, rows)
        return {"ticket": ticket, "crcs": crcs}

    def _packed(self, key: str, part: Part, slots: np.ndarray, generation: int) -> list[jax.Array]:
        try:
            return self._pack(part, slots, generation)
        except PoolsLost:
            self._offers.drop(key, "the producer lost its caches")
            raise Refused("dropped", "a failed step took the producer's caches with it") from None

    def _count(self, arrays: list[jax.Array], rows: list[int]) -> None:
        sent = sum(count * array.shape[1] for array, count in zip(arrays, rows, strict=True))
        with self._lock:
            self._stats.pieces += 1
            self._stats.sent_bytes += sent
            self._stats.padding_bytes += sum(array.nbytes for array in arrays) - sent

    def _taken(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        ticket = _text(message, "ticket")
        if conversation.tickets.pop(ticket, None) is None:  # taken back, if its lease has ended meanwhile
            self._offers.confirm(_text(message, "key"), _whole(message, "attempt"))
            raise _Wrong("this conversation published no such ticket")
        self._transport.retire(ticket)
        return {}

    def _confirm(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        self._offers.confirm(_text(message, "key"), _whole(message, "attempt"))
        return {}

    def _ack(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        readers, ok = _ranks(message.get("readers")), message.get("ok")
        if not isinstance(ok, bool) or readers is None:
            raise _Wrong("an ack has readers, a list of ranks, and ok, true or false")
        ended = self._offers.ack(_text(message, "key"), _whole(message, "attempt"), readers, ok)
        return {"ended": ended}

    def _beat(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        keys = message.get("keys")
        if (
            not isinstance(keys, list)
            or len(keys) > _MOST_KEYS
            or not all(isinstance(key, str) for key in keys)
        ):
            raise _Wrong(f"a beat has keys, a list of at most {_MOST_KEYS} of them")
        return {"lost": self._offers.beat(keys)}

    def _drop(self, conversation: _Conversation, message: dict[str, Any]) -> dict[str, Any]:
        key, consumer = _text(message, "key"), _text(message, "consumer")
        ended = self._offers.drop(key, "its consumer does not want it", unopened=True, consumer=consumer)
        return {"ended": ended}


def _known(conversation: _Conversation) -> Fingerprint:
    if conversation.consumer is None:
        raise _Wrong("say hello and tell your layout first")
    return conversation.consumer


def _text(message: dict[str, Any], name: str) -> str:
    value = message.get(name)
    if not isinstance(value, str) or not 0 < len(value) <= 256:
        raise _Wrong(f"{name} must be a text of 1 to 256 characters")
    return value


def _hex(message: dict[str, Any], name: str) -> bytes:
    try:
        return bytes.fromhex(_text(message, name))
    except ValueError:
        raise _Wrong(f"{name} must be hex digits") from None


def _whole(message: dict[str, Any], name: str) -> int:
    value = message.get(name)
    if type(value) is not int or not 0 <= value < 2**31:
        raise _Wrong(f"{name} must be an integer from 0 to {2**31 - 1}")
    return value


def _ranks(values: Any) -> list[int] | None:
    sound = isinstance(values, list) and len(values) <= 65_536 and all(type(value) is int for value in values)
    return values if sound else None
