"""A producer and a consumer without engines. What a token has is known bytes, so whatever arrives can be checked."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from glm_dcp_jax.transfer.consumer import Consumer
from glm_dcp_jax.transfer.fingerprint import PROTOCOL, Fingerprint
from glm_dcp_jax.transfer.loads import Ended, Landed, Load, LoadFailed, token_digest
from glm_dcp_jax.transfer.offers import Held
from glm_dcp_jax.transfer.packing import Part
from glm_dcp_jax.transfer.pieces import Geometry
from glm_dcp_jax.transfer.producer import Producer
from glm_dcp_jax.transfer.references import Reference
from glm_dcp_jax.transfer.transports import make_transport

LENGTH, PIECE = 60, 16
ROW_BYTES: dict[Part, int] = {"records": 24, "keys": 8}
ROWS = {
    part: np.random.default_rng(size).integers(0, 256, (LENGTH, size)).astype(np.uint8)
    for part, size in ROW_BYTES.items()
}
PROMPT = list(range(LENGTH))
SECONDS = 30.0
HANDSHAKE, TRANSFER = 1.0, 2.5
"""Seconds that somebody impatient waits."""

PRODUCER = Fingerprint(
    protocol=PROTOCOL,
    connector="tcp",
    model="a model",
    record="a record",
    layers=3,
    full_layers=1,
    mtp=False,
    tp=2,
    dcp=2,
    block_size=4,
    interleave=1,
    index_shards=1,
    piece_tokens=PIECE,
)
CONSUMER = replace(PRODUCER, tp=1, dcp=1, block_size=8)


@dataclass
class Giver:
    """A Producer whose pages hold ROWS. freed: requests whose pages have come back, of so many that were offered.

    before_pack: called when a piece is to be packed, for tests that need time then.
    """

    lease: float = 4 * SECONDS
    fingerprint: Fingerprint = PRODUCER
    secret: bytes = b""
    freed: list[str] = field(default_factory=list)
    offered: int = 0
    before_pack: Callable[[], Any] = lambda: None

    def __post_init__(self) -> None:
        self.geometry: Geometry = self.fingerprint.geometry
        self._naming = threading.Lock()
        self.transport = make_transport("tcp", host="127.0.0.1", secret=self.secret, options={})
        self.producer = Producer(
            self.fingerprint,
            "an engine",
            self.transport,
            self.pack,
            "127.0.0.1",
            0,
            self.secret,
            self.lease,
        )

    def offer(self) -> dict[str, Any]:
        """All of ROWS, in pages 1, 2, ..., for a request with a name of its own."""
        with self._naming:
            self.offered += 1
            name = str(self.offered)
        pages = tuple(range(1, 1 + self.geometry.layout.pages_for(LENGTH)))
        return self.producer.offer(
            Held(name, LENGTH, token_digest(PROMPT), pages, lambda: self.freed.append(name))
        )

    def pack(self, part: Part, slots: np.ndarray, generation: int) -> list[jax.Array]:
        """Rows of the tokens that are in these slots."""
        self.before_pack()
        placement = self.geometry.placement(part)
        packed = []
        for rank, of_rank in enumerate(slots):
            positions = placement.position(rank % placement.world, of_rank - placement.block_size)
            inside = (of_rank >= 0) & (positions >= 0) & (positions < LENGTH)
            rows = np.where(inside[:, None], ROWS[part][np.where(inside, positions, 0)], 0)
            packed.append(jax.device_put(rows.astype(np.uint8)))
        return packed

    def wait_idle(self, seconds: float = SECONDS) -> None:
        """Raise AssertionError unless nothing is held or published soon, and all pages have come back, once."""
        wait_for(lambda: not self.producer.held and not self.transport.usage()["tickets"], seconds)
        wait_for(lambda: len(self.freed) >= self.offered, seconds)
        assert sorted(self.freed, key=int) == [str(number + 1) for number in range(self.offered)]

    def close(self) -> None:
        """Ends it."""
        self.producer.close()
        self.transport.close()


class Taker:
    """A Consumer, and what has arrived for it."""

    def __init__(
        self,
        fingerprint: Fingerprint = CONSUMER,
        lease: float = 30.0,
        handshake: float = SECONDS / 2,
        transfer: float = SECONDS / 2,
        secret: bytes = b"",
    ) -> None:
        self.geometry: Geometry = fingerprint.geometry
        self.transport = make_transport("tcp", host="127.0.0.1", secret=secret, options={})
        self._woken = threading.Event()
        self.consumer = Consumer(
            fingerprint,
            lambda part, mtp: ROW_BYTES[part],
            self.transport,
            secret,
            lease,
            handshake,
            transfer,
            4,
            self._woken.set,
        )

    def expect(self, params: dict[str, Any], prompt: list[int] = PROMPT) -> Load:
        """A request has come."""
        load = Load("r", Reference.of_params(params), token_digest(prompt))
        self.consumer.expect(load)
        return load

    def begin(self, load: Load, start: int = 0, end: int = LENGTH - 1) -> None:
        """It has pages."""
        self.consumer.begin(load, start, end)

    def finish(self, load: Load, start: int = 0, end: int = LENGTH - 1) -> LoadFailed | None:
        """Take what comes for the one load under way. Returns why it failed; if it did not, ROWS have arrived."""
        arrived = {part: np.zeros_like(rows) for part, rows in ROWS.items()}
        times = {part: np.zeros(LENGTH, int) for part in ROWS}
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            self._woken.wait(0.1)
            self._woken.clear()
            for event in self.consumer.events():
                assert event.load is load
                if isinstance(event, Ended):
                    assert event.failure is not None or (start, end) == self._checked(arrived, times)
                    return event.failure
                self._unpack(event, arrived, times)
                load.unpacked()
        raise AssertionError("the load has not ended")

    def read(self, params: dict[str, Any], prompt: list[int] = PROMPT) -> LoadFailed | None:
        """A request has come, has pages, and ends."""
        load = self.expect(params, prompt)
        self.begin(load)
        return self.finish(load)

    def close(self) -> None:
        """Ends it."""
        self.consumer.close()
        self.transport.close()

    def _unpack(self, landed: Landed, arrived: dict[Part, np.ndarray], times: dict[Part, np.ndarray]) -> None:
        pages = list(range(self.geometry.layout.pages_for(LENGTH)))
        for part, given in landed.given.items():
            slots, rows = landed.piece.to_unpack(part, pages, given, ROW_BYTES[part])
            assert len(slots) == 1, "one rank: slots are positions"
            real = slots[0] >= 0
            arrived[part][slots[0][real]] = rows[0][real]
            times[part][slots[0][real]] += 1

    def _checked(self, arrived: dict[Part, np.ndarray], times: dict[Part, np.ndarray]) -> tuple[int, int]:
        """The tokens that are there; AssertionError if any of them is not what it was, or came not at all or twice."""
        found = np.flatnonzero(times["records"])
        start, end = int(found[0]), int(found[-1]) + 1
        for part, rows in ROWS.items():
            assert (times[part][start:end] == 1).all() and times[part].sum() == end - start
            assert (arrived[part][start:end] == rows[start:end]).all()
        return start, end


def wait_for(condition: Callable[[], bool], seconds: float = SECONDS) -> None:
    """Raise AssertionError unless it is so in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it is not so in time"
        time.sleep(0.01)


def failing(taker: Taker, params: dict[str, Any], kind: str, prompt: list[int] = PROMPT) -> None:
    """Raise AssertionError unless the load ends like this."""
    failure = taker.read(params, prompt)
    assert failure is not None and failure.kind == kind, failure
