"""A producer whose consumer stops, dies, talks nonsense or asks for what it has no right to; without engines."""

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from reading import CONSUMER, LENGTH, PIECE, PROMPT, Giver, Taker, wait_for

from glm_dcp_jax.transfer.fingerprint import PROTOCOL
from glm_dcp_jax.transfer.loads import token_digest
from glm_dcp_jax.transfer.wire import PeerError, RemoteError, connect

Message = dict[str, Any]
SECONDS = 5.0


@pytest.fixture(autouse=True)
def afterwards(giver: Giver, taker: Taker) -> Iterator[None]:
    """It has all of its pages and memory, and serves others."""
    yield
    giver.wait_idle()
    assert taker.read(giver.offer()) is None
    giver.wait_idle()


class Consumer:
    """A conversation, word by word. open: the message that takes the key."""

    def __init__(self, params: Message, greets: bool = True) -> None:
        self.peer = connect(params["remote_host"], params["remote_port"], b"", time.monotonic() + SECONDS)
        self.key = params["remote_key"]
        self.open = {
            "do": "open",
            "key": self.key,
            "engine": params["remote_engine_id"],
            "consumer": "me",
            "digest": token_digest(PROMPT).hex(),
            "start": 0,
            "length": LENGTH - 1,
        }
        if greets:
            self.ask({"do": "hello", "protocol": PROTOCOL, "digest": CONSUMER.digest})
            self.ask({"do": "layout", "fingerprint": CONSUMER.as_object()})

    def ask(self, message: Message) -> Message:
        return self.peer.request(message, time.monotonic() + SECONDS)

    def say(self, do: str, **more: Any) -> Message:
        return self.ask({"do": do, "key": self.key, "attempt": 1} | more)

    def drop(self) -> None:
        """As one that has opened it, or has not."""
        self.say("drop", consumer="me")
        self.peer.close()


def refused(kind: str, call: Any, *given: Any, **named: Any) -> None:
    with pytest.raises(RemoteError) as error:
        call(*given, **named)
    assert error.value.remote_kind == kind, error.value


MESSAGES: list[Message] = [
    {"do": "layout", "fingerprint": CONSUMER.as_object()},
    {"do": "open", "key": "", "engine": "", "consumer": "me", "digest": "00", "start": 0, "length": 5},
    {"do": "piece", "key": "", "attempt": 1, "start": 0, "end": PIECE},
    {"do": "taken", "ticket": ""},
    {"do": "confirm", "key": "", "attempt": 1},
    {"do": "ack", "key": "", "attempt": 1, "readers": [0], "ok": True},
    {"do": "beat", "keys": [""]},
    {"do": "drop", "key": "", "consumer": ""},
]
NONSENSE = [
    None,
    "",
    "x",
    "\ud800",
    "x" * 5000,
    -1,
    0,
    2**31,
    2**63,
    10**400,
    1.5,
    False,
    [],
    [[]],
    {},
    {"a": [1]},
]
NONSENSE += [["x" * 100] * 5000, list(range(70_000))]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: message["do"])
def test_messages_with_nonsense_in_any_field(giver, taker, message):
    """Each is answered, with a refusal unless it is harmless; the conversation goes on, and the key stays good."""
    params = giver.offer()
    consumer = Consumer(params)
    for name in message:
        for given in (*NONSENSE, KeyError):
            nonsense = {field: value for field, value in message.items() if field != name}
            if given is not KeyError:
                nonsense[name] = given
            try:
                answer = consumer.ask(nonsense)
            except RemoteError as error:
                assert error.remote_kind in ("protocol", "unlike", "unknown", "wrong_engine"), nonsense
            else:
                harmless = answer == {"ended": False} or list(answer) == ["lost"]
                assert harmless or "fingerprint" in answer, nonsense
    assert taker.read(params) is None


@pytest.mark.parametrize(
    "change",
    [
        {"tp": 2**31 - 1, "dcp": 2**31 - 1},
        {"tp": 5000, "dcp": 5000},
        {"block_size": 2**40, "interleave": 2**40},
        {"dcp": 0},
        {"tp": 3, "dcp": 2},
        {"index_shards": 7},
        {"interleave": 3},
        {"piece_tokens": 0},
        {"block_size": -8},
    ],
    ids=str,
)
def test_layouts_that_cannot_be_or_are_too_large(giver, change):
    consumer = Consumer(giver.offer(), greets=False)
    began = time.monotonic()
    refused("unlike", consumer.ask, {"do": "layout", "fingerprint": CONSUMER.as_object() | change})
    refused("protocol", consumer.ask, consumer.open)  # not greeted
    assert time.monotonic() - began < 1
    consumer.drop()


def test_the_largest_layout_is_planned_quickly(giver):
    consumer = Consumer(giver.offer(), greets=False)
    largest = replace(CONSUMER, tp=4096, dcp=4096, block_size=2**20)
    consumer.ask({"do": "layout", "fingerprint": largest.as_object()})
    began = time.monotonic()
    consumer.ask(consumer.open)
    assert time.monotonic() - began < 3
    consumer.drop()


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        ({"length": 2**31 - 1}, "too_short"),
        ({"start": LENGTH, "length": LENGTH}, "protocol"),
        ({"start": 5, "length": 4}, "protocol"),
        ({"key": "f" * 32}, "unknown"),
        ({"engine": "another"}, "wrong_engine"),
        ({"digest": "00" * 32}, "other_prompt"),
        ({"digest": "no hex"}, "protocol"),
    ],
    ids=str,
)
def test_opening_what_is_not_there_leaves_the_key_good(giver, change, kind):
    consumer = Consumer(giver.offer())
    began = time.monotonic()
    refused(kind, consumer.ask, consumer.open | change)
    assert time.monotonic() - began < 1, "something as long as that was made"
    assert consumer.ask(consumer.open)["attempt"] == 1
    consumer.drop()


def test_pieces_outside_of_what_was_opened(giver):
    consumer = Consumer(giver.offer())
    refused("protocol", consumer.say, "piece", start=0, end=PIECE)  # not opened
    consumer.ask(consumer.open | {"start": PIECE, "length": 3 * PIECE})
    for start, end in (
        (0, PIECE),
        (3 * PIECE, 3 * PIECE + 1),
        (40, 49),
        (PIECE, 3 * PIECE),
        (20, 20),
        (30, 20),
    ):
        refused("protocol", consumer.say, "piece", start=start, end=end)
    refused("protocol", consumer.say, "piece", start=PIECE, end=PIECE + 1, attempt=2)
    assert consumer.say("piece", start=PIECE, end=PIECE + 1)["crcs"]
    consumer.drop()


def test_nobody_reads_by_another_conversations_attempt(giver):
    params = giver.offer()
    consumer, other = Consumer(params), Consumer(params)
    consumer.ask(consumer.open)
    refused("protocol", other.say, "piece", start=0, end=PIECE)
    refused("used", other.ask, other.open | {"consumer": "another"})
    ticket = consumer.say("piece", start=0, end=PIECE)["ticket"]["id"]
    refused("protocol", other.say, "taken", ticket=ticket)
    assert other.say("drop", consumer="another") == {"ended": False}
    other.peer.close()
    consumer.drop()


def test_an_old_attempt_is_over_when_the_key_is_opened_again(giver):
    params = giver.offer()
    first, second = Consumer(params), Consumer(params)
    first.ask(first.open)
    assert second.ask(second.open) == {"attempt": 2, "lease": giver.lease}
    refused("stale_attempt", first.say, "piece", start=0, end=PIECE)
    refused("stale_attempt", first.say, "confirm")
    assert first.say("ack", readers=[0], ok=False) == {"ended": False}
    first.peer.close()
    second.drop()


@pytest.mark.parametrize("frame", ["random", "header", "json", "array", "deep", "huge", "zeros", "buffers"])
def test_frames_of_nonsense_end_their_connection_only(giver, taker, frame):
    params = giver.offer()
    consumer = Consumer(params)
    text = {"json": b"{not json", "array": b"[1, 2]", "deep": b"[" * 100_000}.get(frame)
    nonsense = {
        "random": bytes(range(256)),
        "header": struct.pack(">4sHHI", b"GDJx", 1, 0, 100),
        "huge": struct.pack(">4sHHI", b"GDJx", 1, 0, 2**32 - 1),
        "zeros": bytes(1000),
        "buffers": struct.pack(">4sHHIQ", b"GDJx", 1, 1, 2, 2**62) + b"{}",
    }.get(frame) or struct.pack(">4sHHI", b"GDJx", 1, 0, len(text or b"")) + (text or b"")
    with consumer.peer.use():
        consumer.peer.write([memoryview(nonsense)], time.monotonic() + SECONDS)
    if frame == "header":
        consumer.peer.close()  # half a frame
    else:
        with pytest.raises(PeerError):
            consumer.peer.receive(time.monotonic() + SECONDS)
    assert taker.read(params) is None


def test_strangers_on_the_port(giver, taker):
    params = giver.offer()
    address = params["remote_host"], params["remote_port"]
    kept = []
    for nonsense in (b"", b"GET / HTTP/1.1\r\n\r\n", bytes(100), json.dumps({"do": "drop"}).encode()):
        stranger = socket.create_connection(address)
        stranger.sendall(nonsense)
        kept.append(stranger)
    assert taker.read(params) is None
    for stranger in kept:
        stranger.close()


class TestLeases:
    @pytest.fixture
    def short(self) -> Iterator[Giver]:
        giver = Giver(lease=0.5)
        yield giver
        giver.close()

    def test_a_lease_that_ends_during_a_read(self, short):
        """The pages stay until that read has ended; then nothing more of them is given, and nothing confirmed."""
        reading, over = threading.Event(), threading.Event()

        def slowly() -> None:
            reading.set()
            over.wait(SECONDS)

        consumer = Consumer(short.offer())
        consumer.ask(consumer.open)
        short.before_pack = slowly
        answers: list[Message] = []
        asking = threading.Thread(target=lambda: answers.append(consumer.say("piece", start=0, end=PIECE)))
        asking.start()
        assert reading.wait(SECONDS)
        wait_for(lambda: short.producer.stats().offers.expired == 1)
        time.sleep(0.2)
        assert short.freed == [] and short.producer.held == 1
        over.set()
        asking.join()
        wait_for(lambda: short.freed == ["1"])
        assert len(answers) == 1, "what was read until then may be used if it is confirmed, which it is not"
        refused("expired", consumer.say, "piece", start=PIECE, end=2 * PIECE)
        refused("expired", consumer.say, "confirm")
        assert consumer.say("ack", readers=[0], ok=True) == {"ended": False}
        assert short.producer.stats().offers.late_acks == 1
        short.wait_idle()
        consumer.peer.close()

    def test_what_was_published_goes_with_the_lease_though_nobody_took_it(self, short):
        consumer = Consumer(short.offer())
        consumer.ask(consumer.open)
        for start in (0, PIECE):
            consumer.say("piece", start=start, end=start + PIECE)
        assert short.transport.usage()["tickets"] == 2
        short.wait_idle(3)
        assert short.transport.usage()["bytes"] == 0
        consumer.peer.close()

    def test_beats_keep_it_and_their_end_ends_it(self, short):
        consumer = Consumer(short.offer())
        for _ in range(8):
            time.sleep(0.1)
            assert consumer.ask({"do": "beat", "keys": [consumer.key, "f" * 32]}) == {"lost": ["f" * 32]}
        short.wait_idle(3)
        assert consumer.ask({"do": "beat", "keys": [consumer.key]}) == {"lost": [consumer.key]}
        refused("expired", consumer.ask, consumer.open)
        consumer.peer.close()

    def test_a_consumer_that_dies_with_a_key_open_is_waited_for_no_longer_than_its_lease(self, short):
        consumer = Consumer(short.offer())
        consumer.ask(consumer.open)
        consumer.say("piece", start=0, end=PIECE)
        consumer.peer.close()
        wait_for(lambda: short.transport.usage()["tickets"] == 0, 0.4)  # that goes at once
        short.wait_idle(3)


def test_acks_that_are_missing_twice_late_or_of_others(giver):
    """The pages come back once, when every reader has acked the attempt that counts."""
    consumer = Consumer(giver.offer())
    consumer.ask(consumer.open)
    before = len(giver.freed)
    assert consumer.say("ack", readers=[], ok=True) == {"ended": False}
    assert consumer.say("ack", readers=[7, -1, 2**40], ok=True) == {"ended": False}
    assert consumer.say("ack", readers=[0], ok=True, attempt=2) == {"ended": False}
    assert len(giver.freed) == before
    assert consumer.say("ack", readers=[0, 0], ok=True) == {"ended": True}
    assert consumer.say("ack", readers=[0], ok=True) == {"ended": False}
    assert consumer.say("ack", readers=[], ok=False) == {"ended": False}
    refused("used", consumer.say, "confirm")
    refused("used", consumer.say, "piece", start=0, end=PIECE)
    assert len(giver.freed) == before + 1
    consumer.peer.close()


def test_many_consumers_at_once_of_which_some_vanish(giver):
    takers = [Taker(transfer=20.0, handshake=20.0) for _ in range(4)]
    failures: list[Any] = []

    def reads(taker: Taker) -> None:
        failures.extend(taker.read(giver.offer()) for _ in range(5))

    def vanishes() -> None:
        for _ in range(5):
            consumer = Consumer(giver.offer())
            consumer.ask(consumer.open)
            consumer.say("piece", start=0, end=PIECE)
            consumer.say("ack", readers=[], ok=False)
            consumer.peer.close()

    threads = [threading.Thread(target=reads, args=(taker,)) for taker in takers]
    threads += [threading.Thread(target=vanishes) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == [None] * 20
    for taker in takers:
        taker.close()
