"""A consumer whose producer lies, stalls or goes away at any word; without engines.

What arrives without an error is right, or the Taker raises; everything ends by our deadlines; the producer has its
pages and its memory back; and afterwards both sides do it right with one another.
"""

import time
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import pytest
from between import Message, alters, always, answers, at, breaks, breaks_after
from reading import HANDSHAKE, LENGTH, PIECE, PRODUCER, TRANSFER, Giver, Taker, failing

from glm_dcp_jax.transfer.transports import make_transport

CONVERSATION = ("hello", "layout", "open", "piece", "taken", "confirm", "ack")
"""What a load says, in this order."""
ACK_SECONDS = 4.0
"""What an answer takes that nobody waits for."""


@pytest.fixture(autouse=True)
def afterwards(giver: Giver, taker: Taker) -> Iterator[None]:
    yield
    giver.wait_idle()
    assert taker.read(giver.offer()) is None
    giver.wait_idle()
    assert taker.consumer.loads == 0


def test_what_a_load_says(giver, taker, between):
    assert taker.read(between.through(giver.offer())) is None
    said = [message["do"] for message in between.seen]
    assert list(dict.fromkeys(said)) == list(CONVERSATION)
    assert said.count("piece") == said.count("taken") == -(-(LENGTH - 1) // PIECE)


@pytest.mark.parametrize("when", [breaks, breaks_after])
@pytest.mark.parametrize("do", CONVERSATION)
def test_a_connection_that_breaks_once_is_overcome(giver, taker, between, do, when):
    with between.doing(at(do, when)):
        assert taker.read(between.through(giver.offer())) is None
        giver.wait_idle()


@pytest.mark.parametrize("number", range(4))
def test_pieces_that_have_landed_are_not_read_again(giver, taker, between, number):
    with between.doing(at("piece", breaks, number)):
        assert taker.read(between.through(giver.offer())) is None
    starts = [message["start"] for message in between.seen if message["do"] == "piece"]
    # What was asked for ahead, and had not been fetched, is asked for again.
    assert len(starts) <= 4 + 2


def test_a_ticket_that_went_with_its_connection_is_asked_for_again(giver, taker, between):
    """As when the connection breaks while a piece is fetched, which is another connection's business."""

    def retires(message: Message, ask: Any) -> Message:
        answer = ask(message)
        giver.transport.retire(answer["ticket"]["id"])
        return answer

    with between.doing(at("piece", retires, 1)):
        assert taker.read(between.through(giver.offer())) is None
    assert between.count("open") == 2


@pytest.mark.parametrize("do", CONVERSATION[:-1])
def test_a_connection_that_breaks_every_time_is_lost(giver, taker, between, do):
    with between.doing(always(do, breaks)):
        failing(taker, between.through(giver.offer()), "lost")
        giver.wait_idle()
        assert between.count("open") <= 2


WORDS = [None, 7, -1, 2**80, 1.5, False, "x" * 300, [], [[]], {}, {"a": 1}]
"""What nothing of a conversation can be."""


@pytest.mark.parametrize("do", CONVERSATION[:4])
@pytest.mark.parametrize("word", [{}, *({name: word} for name in ("x", "error") for word in WORDS[:3])])
def test_answers_that_say_nothing(giver, taker, between, do, word):
    with between.doing(always(do, answers(word))):
        failure = taker.read(between.through(giver.offer()))
    assert failure is not None and failure.kind in ("unlike", "protocol", "corrupt", "stale_attempt")
    giver.wait_idle()


@pytest.mark.parametrize(
    ("do", "name"),
    [
        ("hello", "protocol"),
        ("layout", "fingerprint"),
        ("open", "attempt"),
        ("piece", "ticket"),
        ("piece", "crcs"),
    ],
)
def test_answers_that_say_something_else(giver, taker, between, do, name):
    for word in WORDS:
        if name == "attempt" and type(word) is int:
            continue  # its own loss: it will not know the acks of that attempt
        with between.doing(always(do, alters(lambda answer, word=word: answer | {name: word}))):
            failure = taker.read(between.through(giver.offer()))
        assert failure is not None, word
        assert failure.kind in ("unlike", "protocol", "corrupt", "stale_attempt")
    giver.wait_idle()


@pytest.mark.parametrize("name", list(PRODUCER.as_object()))
def test_fingerprints_that_cannot_be(giver, taker, between, name):
    ours = PRODUCER.as_object()[name]
    free = ("tp", "dcp", "block_size", "interleave", "index_shards", "piece_tokens")
    for word in WORDS:
        if type(word) is type(ours) and (word == ours or (name in free and word == 7)):
            continue  # it can be
        lies = alters(lambda answer, word=word: {"fingerprint": answer["fingerprint"] | {name: word}})
        with between.doing(always("layout", lies)):
            failing(taker, between.through(giver.offer()), "unlike")
    giver.wait_idle()


@pytest.mark.parametrize(
    "change",
    [
        {"rows": []},
        {"rows": [8, 8, 1]},
        {"rows": [7, 8, 16]},
        {"rows": [-8, 8, 16]},
        {"rows": [2**50, 8, 16], "padded_rows": [2**50, 16, 16]},
        {"rows": "8"},
        {"row_bytes": [24, 24, 2**40]},
        {"row_bytes": None},
    ],
    ids=str,
)
def test_tickets_of_other_arrays_are_refused_before_anything_is_fetched(
    giver, taker, between, change, monkeypatch
):
    def fetch(*_: Any) -> None:
        raise AssertionError("there would be memory for it by now")

    lies = alters(lambda answer: answer | {"ticket": answer["ticket"] | change})
    with between.doing(always("piece", lies)), monkeypatch.context() as changed:
        changed.setattr(taker.transport, "fetch", fetch)
        failing(taker, between.through(giver.offer()), "corrupt")
    giver.wait_idle()


@pytest.mark.parametrize(
    "change", [{"padded_rows": [1, 1, 1]}, {"transport": "nixl"}, {"id": 5}, {"port": "x"}], ids=str
)
def test_tickets_that_are_none(giver, taker, between, change):
    lies = alters(lambda answer: answer | {"ticket": answer["ticket"] | change})
    with between.doing(always("piece", lies)):
        failing(taker, between.through(giver.offer()), "corrupt")
        giver.wait_idle()


def test_a_ticket_that_is_not_published(giver, taker, between):
    lies = alters(lambda answer: answer | {"ticket": answer["ticket"] | {"id": "0" * 32}})
    with between.doing(always("piece", lies)):
        failing(taker, between.through(giver.offer()), "unknown_ticket")


@pytest.mark.parametrize(
    "change",
    [
        lambda crcs: [crcs[0] ^ 1, *crcs[1:]],
        lambda crcs: [*crcs[:-1], crcs[-1] + 2**32],
        lambda crcs: crcs[:-1],
        lambda crcs: [*crcs, 0],
        lambda crcs: [str(crc) for crc in crcs],
        lambda crcs: crcs[::-1],
    ],
    ids=["wrong", "huge", "fewer", "more", "texts", "another order"],
)
@pytest.mark.parametrize("number", [0, 3])
def test_checksums_that_are_not_those_of_the_bytes(giver, taker, between, number, change):
    lies = alters(lambda answer: answer | {"crcs": change(answer["crcs"])})
    with between.doing(at("piece", lies, number)):
        failing(taker, between.through(giver.offer()), "corrupt")
        giver.wait_idle()


@pytest.mark.parametrize("kind", ["a byte", "a row more", "a row less", "an array less", "wider rows"])
def test_other_bytes_than_were_packed(giver, taker, between, kind):
    """The ticket is of arrays like those of the plan; what is fetched by it is not, or is damaged."""

    def damaged(answer: Message) -> Message:
        arrays = giver.transport.fetch(answer["ticket"], time.monotonic() + 5)
        if kind == "a byte":
            arrays[-1][-1, -1] ^= 1
        elif kind == "a row more":
            arrays[0] = np.concatenate([arrays[0], arrays[0][:1]])
        elif kind == "a row less":
            arrays[0] = arrays[0][1:]
        elif kind == "an array less":
            arrays.pop()
        else:
            arrays[0] = np.repeat(arrays[0], 2, axis=1)
        own = other.publish([jax.device_put(array) for array in arrays], [len(array) for array in arrays])
        return answer | {"ticket": answer["ticket"] | {name: own[name] for name in ("id", "port", "start")}}

    other = make_transport("tcp", host="127.0.0.1", secret=b"", options={})
    with between.doing(always("piece", alters(damaged))):
        failing(taker, between.through(giver.offer()), "corrupt")
    other.close()


def silent(message: Message, ask: Any) -> Message:
    """Nothing is answered for longer than anybody waits."""
    time.sleep(ACK_SECONDS if message["do"] == "ack" else TRANSFER + 1)
    return ask(message)


@pytest.mark.parametrize(
    ("do", "seconds"),
    [
        ("hello", HANDSHAKE),
        pytest.param("layout", HANDSHAKE, marks=pytest.mark.slow),
        pytest.param("open", HANDSHAKE, marks=pytest.mark.slow),
        ("piece", TRANSFER),
        pytest.param("taken", TRANSFER, marks=pytest.mark.slow),
        ("confirm", TRANSFER),
    ],
)
def test_a_producer_that_says_nothing_any_more_is_a_timeout_when_due(impatient, between, do, seconds):
    """It is not waited for a second time, to tell it so: its lease says the same."""
    giver = Giver(lease=TRANSFER + 1)
    params = between.through(giver.offer())
    began = time.monotonic()
    with between.doing(always(do, silent)):
        failing(impatient, params, "timeout")
    assert seconds - 0.1 < time.monotonic() - began < seconds + 10
    giver.wait_idle()
    giver.close()


def test_a_load_does_not_wait_long_for_the_answer_to_its_ack(giver, taker, between):
    began = time.monotonic()
    with between.doing(at("ack", silent)):
        assert taker.read(between.through(giver.offer())) is None
    assert time.monotonic() - began < ACK_SECONDS
