"""Producer and consumer of caches without engines, put together as an engine does it."""

import threading
import time
from dataclasses import dataclass
from typing import Any

from lib.transfer_failures import TransferFailed
from lib.transfer_flags import transfer_settings
from lib.transfer_pools import BareCaches

from glm_dcp_jax.config.transfer import TransferConfig
from glm_dcp_jax.transfer.consumer import Consumer
from glm_dcp_jax.transfer.loads import Ended, Landed, Load, LoadFailed, token_digest
from glm_dcp_jax.transfer.offers import Held
from glm_dcp_jax.transfer.producer import Producer
from glm_dcp_jax.transfer.references import Reference
from glm_dcp_jax.transfer.transports import Transport, make_transport

_DIGEST = token_digest([])
"""Of a prompt that nobody computed."""


class PoolProducer:
    """Offers what caches hold, over one transport."""

    def __init__(self, caches: BareCaches, connector: str) -> None:
        self._caches = caches
        config = TransferConfig.from_object(transfer_settings(connector, caches.sizes.piece_bytes))
        self._transport = _transport(config)
        self._producer = Producer(
            caches.fingerprint(connector),
            "producer",
            self._transport,
            caches.access.pack,
            config.kv_ip,
            config.kv_port,
            config.secret,
            config.number("lease_seconds"),
        )

    def offer(self, tokens: int) -> dict[str, Any]:
        """Of the request's first tokens. Returns kv_transfer_params."""
        pages = tuple(map(int, self._caches.pages[: self._caches.caches.layout.pages_for(tokens)]))
        return self._producer.offer(Held("bench", tokens, _DIGEST, pages, lambda: None))

    def close(self) -> None:
        """Ends all conversations."""
        self._producer.close()
        self._transport.close()


@dataclass(frozen=True)
class Received:
    """Seconds of one transfer, from its begin until all is unpacked.

    handshakes, reading, behind: one after the other, they are all of it. pack, move, unpack: what producer, transport
    and consumer were busy, partly at the same time.
    """

    seconds: float
    handshakes: float
    reading: float
    behind: float
    pack: float
    move: float
    unpack: float
    bytes: int


class PoolConsumer:
    """Reads caches into its own, over one transport, and unpacks them as an engine does."""

    def __init__(self, caches: BareCaches, connector: str) -> None:
        self._caches = caches
        config = TransferConfig.from_object(transfer_settings(connector, caches.sizes.piece_bytes))
        self._transport = _transport(config)
        self._awake = threading.Event()
        self._consumer = Consumer(
            caches.fingerprint(connector),
            caches.caches.row_bytes,
            self._transport,
            config.secret,
            config.number("lease_seconds"),
            config.number("handshake_seconds"),
            config.number("transfer_seconds"),
            config.integer("loads"),
            self._awake.set,
        )

    def receive(self, params: dict[str, Any]) -> Received:
        """All of what is offered. Raises TransferFailed."""
        load = Load("bench", Reference.of_params(params), _DIGEST)
        self._consumer.expect(load)
        self._consumer.begin(load, 0, load.reference.num_tokens)
        unpacking = 0.0
        while True:
            self._awake.wait()
            self._awake.clear()
            for event in self._consumer.events():
                if isinstance(event, Landed):
                    unpacking += self._unpack(event)
                elif isinstance(event, Ended):
                    return self._received(load, event.failure, unpacking)

    def _unpack(self, landed: Landed) -> float:
        began = time.monotonic()
        for part, given in landed.given.items():
            row_bytes = self._caches.caches.row_bytes(part)
            self._caches.access.unpack(
                part, *landed.piece.to_unpack(part, self._caches.pages, given, row_bytes)
            )
        self._caches.wait()
        landed.load.unpacked()
        return time.monotonic() - began

    def _received(self, load: Load, failure: LoadFailed | None, unpacking: float) -> Received:
        if failure is not None:
            raise TransferFailed(f"the cache did not arrive ({failure.kind}): {failure}")
        ended, times, phases = time.monotonic(), load.times, load.times.phases
        return Received(
            seconds=ended - times.begun,
            handshakes=phases["open"] + phases["confirm"],
            reading=phases["read"],
            behind=ended - times.confirmed,
            pack=phases["pack"],
            move=phases["fetch"],
            unpack=unpacking,
            bytes=load.received_bytes,
        )

    def close(self) -> None:
        """Ends what goes on."""
        self._consumer.close()
        self._transport.close()


def _transport(config: TransferConfig) -> Transport:
    options = {"slab_bytes": config.integer("slab_bytes")} if config.kv_connector == "nixl" else {}
    return make_transport(config.kv_connector, host=config.kv_ip, secret=config.secret, options=options)
