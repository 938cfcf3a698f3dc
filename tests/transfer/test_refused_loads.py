"""Loads that are refused, given up, or led to somebody who is no producer; without engines."""

import random
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from between import Message, alters, always, answers, at
from reading import CONSUMER, LENGTH, PROMPT, Giver, Taker, failing, wait_for

from glm_dcp_jax.transfer.fingerprint import PROTOCOL
from glm_dcp_jax.transfer.references import Reference
from glm_dcp_jax.transfer.wire import Listener


@pytest.fixture(autouse=True)
def afterwards(giver: Giver, taker: Taker) -> Iterator[None]:
    yield
    giver.wait_idle()
    assert taker.read(giver.offer()) is None
    giver.wait_idle()
    assert taker.consumer.loads == 0


class TestStrangers:
    """What listens where the producer is said to be is something else."""

    @pytest.mark.parametrize(
        ("says", "kind"),
        [
            (b"", "timeout"),
            (bytes(4096), "protocol"),
            (b"HTTP/1.1 400 Bad Request\r\n\r\n" + b"x" * 100, "protocol"),
            (b"GDJx\x00\x63" + bytes(32), "protocol"),
            (b"GDJx\x00\x01" + bytes(32), "timeout"),
            (b"GDJx\x00\x01" + bytes(32) + b"\x01" + bytes(32), "auth"),
            (b"GDJx\x00\x01" + bytes(32) + bytes(33), "auth"),
        ],
        ids=["nothing", "zeros", "HTTP", "another version", "half a proof", "a wrong proof", "no"],
    )
    def test_a_listener(self, giver, impatient, says, kind):
        stranger = socket.create_server(("127.0.0.1", 0))
        kept = []

        def accept() -> None:
            while True:
                try:
                    connection, _ = stranger.accept()
                except OSError:
                    return
                connection.sendall(says)
                kept.append(connection)

        threading.Thread(target=accept, daemon=True).start()
        params = giver.offer() | {"remote_port": stranger.getsockname()[1]}
        failing(impatient, params, kind)
        stranger.shutdown(socket.SHUT_RDWR)
        for each in (stranger, *kept):
            each.close()
        giver.producer.release(Reference.of_params(params))

    @pytest.mark.parametrize(
        "frame",
        [
            b"GDJx",
            random.Random(0).randbytes(64),
            b"GDJx\0\1\0\0\0\0\0\2[]",
            b"GDJx\0\1\0\0\xff\xff\xff\xff",
        ],
        ids=["a beginning", "noise", "no object", "a huge one"],
    )
    def test_frames_that_are_none(self, giver, impatient, frame):
        def serve(peer: Any) -> None:
            peer.receive(None)
            with peer.use():
                peer.write([memoryview(frame)], time.monotonic() + 5)
                peer.read(memoryview(bytearray(100_000)), time.monotonic() + 2)

        stranger = Listener("127.0.0.1", 0, b"", serve, "stranger")
        params = giver.offer() | {"remote_port": stranger.port}
        failure = impatient.read(params)
        assert failure is not None and failure.kind in ("protocol", "timeout", "lost")
        stranger.close()
        giver.producer.release(Reference.of_params(params))

    @pytest.mark.parametrize(
        "host",
        ["127.0.0.1", "no.such.host.invalid", "x" * 200, ".."],
        ids=["here", "nowhere", "long", "dots"],
    )
    def test_nothing(self, giver, taker, host):
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        params = giver.offer() | {"remote_port": port, "remote_host": host}
        failing(taker, params, "lost")
        giver.producer.release(Reference.of_params(params))


class TestRefusals:
    def test_a_forged_key(self, giver, taker):
        params = giver.offer()
        failing(taker, params | {"remote_key": "0" * 32}, "unknown")
        assert taker.read(params) is None

    def test_another_engine(self, giver, taker):
        params = giver.offer()
        failing(taker, params | {"remote_engine_id": "an engine/another start"}, "wrong_engine")
        assert taker.read(params) is None, "the key was nobody's to end"

    @pytest.mark.parametrize(
        "prompt", [PROMPT[::-1], [*PROMPT, 1], PROMPT[:-1], []], ids=["other", "longer", "shorter", "none"]
    )
    def test_another_prompt(self, giver, taker, prompt):
        params = giver.offer()
        failing(taker, params, "other_prompt", prompt)
        assert taker.read(params) is None, "the key is still that of its own prompt"

    def test_a_key_that_was_used(self, giver, taker):
        params = giver.offer()
        assert taker.read(params) is None
        failing(taker, params, "used")

    def test_a_key_that_another_is_just_using(self, giver, taker, between):
        """The second is refused, and the first does not notice."""
        params, refused = giver.offer(), []
        other = Taker()

        def second(message: Message, ask: Any) -> Message:
            refused.append(other.read(params))
            return ask(message)

        with between.doing(at("piece", second, 1)):
            assert taker.read(between.through(params)) is None
        assert [failure.kind for failure in refused] == ["used"]
        other.close()

    def test_more_tokens_than_are_held(self, giver, taker):
        """Of tokens that both know; a consumer that asks for more than it was told."""
        load = taker.expect(giver.offer())
        taker.begin(load, 0, LENGTH + 1)
        failure = taker.finish(load)
        assert failure is not None and failure.kind == "too_short"

    @pytest.mark.parametrize(
        "change",
        [
            {"connector": "nixl"},
            {"model": "another model"},
            {"record": "another format"},
            {"layers": 4},
            {"full_layers": 2},
            {"mtp": True},
            {"protocol": PROTOCOL + 1},
        ],
        ids=str,
    )
    def test_engines_that_do_not_fit_together(self, giver, change):
        other = Taker(replace(CONSUMER, **change))
        failing(other, giver.offer(), "unlike")
        giver.wait_idle()
        assert other.consumer.loads == 0
        other.close()

    def test_another_version_of_the_protocol(self, giver, taker, between):
        with between.doing(always("hello", alters(lambda answer: answer | {"protocol": PROTOCOL + 1}))):
            failing(taker, between.through(giver.offer()), "unlike")

    @pytest.mark.parametrize("secrets", [(b"a" * 16, b""), (b"", b"b" * 16), (b"a" * 16, b"b" * 16)])
    def test_another_secret(self, secrets):
        there, here = Giver(secret=secrets[0], lease=1.0), Taker(secret=secrets[1])
        failing(here, there.offer(), "auth")
        there.wait_idle()  # when its lease is over: nobody could tell it
        here.close()
        there.close()


def test_a_load_that_was_cancelled_ends_without_a_word(giver, taker, between):
    params = between.through(giver.offer())
    load = taker.expect(params)

    def cancel(message: Message, ask: Any) -> Message:
        taker.consumer.cancel(load)
        return ask(message)

    with between.doing(at("piece", cancel, 1)):
        taker.begin(load)
        wait_for(lambda: not taker.consumer.loads)
        giver.wait_idle()
    taker.consumer.events()
    assert giver.producer.stats().offers.failed


def test_a_load_that_was_cancelled_before_it_began_is_told_to_the_producer(giver, taker):
    load = taker.expect(giver.offer())
    taker.consumer.cancel(load)
    giver.wait_idle()
    assert taker.consumer.loads == 0 and taker.consumer.events() == []


def test_an_error_of_our_own_fails_the_load_and_not_its_thread(giver, taker, monkeypatch):
    def fails(*_: Any) -> None:
        raise KeyError("a mistake")

    with monkeypatch.context() as changed:
        changed.setattr(taker.transport, "fetch", fails)
        for _ in range(8):  # more than there are threads
            failing(taker, giver.offer(), "error")


def test_only_arrays_of_one_device_are_published(giver, devices):
    """A part of an array on several devices would be matched by its number, and not by what it holds."""
    mesh = jax.make_mesh((2,), ("x",), devices=devices(2))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    array = jax.device_put(np.zeros((4, 8), np.uint8), sharding)
    with pytest.raises(ValueError, match="on several devices"):
        giver.transport.publish([array], [4])


@pytest.mark.parametrize("lost", [None, "x", 5, [[]], [{}], [None], {}, ["x" * 1000], [1.5]])
def test_heartbeats_survive_whatever_is_answered(giver, between, lost):
    """The thread that keeps caches alive would end unseen."""
    taker = Taker(lease=0.12)
    load = taker.expect(between.through(giver.offer()))
    with between.doing(always("beat", answers({"lost": lost}))):
        wait_for(lambda: between.count("beat") > 2)
    taker.begin(load)
    assert taker.finish(load) is None
    taker.close()
