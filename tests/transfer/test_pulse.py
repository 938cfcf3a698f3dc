"""Heartbeats go on as long as any request needs them, and producers that keep one waiting keep no other waiting."""

import socket
import time
from dataclasses import replace

from glm_dcp_jax.transfer.consumer import Consumer
from glm_dcp_jax.transfer.fingerprint import Fingerprint
from glm_dcp_jax.transfer.loads import Load
from glm_dcp_jax.transfer.pulse import KEYS_IN_A_BEAT, Pulses
from glm_dcp_jax.transfer.references import Reference
from glm_dcp_jax.transfer.transports import make_transport
from glm_dcp_jax.transfer.wire import Listener, Peer

HOST = "127.0.0.1"
FINGERPRINT = Fingerprint(1, "inproc", "abc", "float32", 4, 2, False, 1, 1, 64, 1, 1, 512)


class Ear:
    """A producer's port that hears everything, and agrees."""

    def __init__(self) -> None:
        self.heard: list[dict] = []
        self.listener = Listener(HOST, 0, b"", self._serve, "ear")

    def reference(self, key: str = "0" * 32) -> Reference:
        return Reference("engine", "request", HOST, self.listener.port, key, 9, "inproc")

    def _serve(self, peer: Peer) -> None:
        while True:
            message, _ = peer.receive(None)
            self.heard.append(message)
            peer.send({"lost": []})

    def beats(self, key: str) -> int:
        return sum(message["do"] == "beat" and key in message["keys"] for message in self.heard)

    def drops(self) -> list[str]:
        return [message["key"] for message in self.heard if message["do"] == "drop"]


def wait_for(condition, seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def consumer(handshake: float = 0.3, workers: int = 2) -> Consumer:
    transport = make_transport("inproc", host=HOST, secret=b"", options={})
    return Consumer(
        FINGERPRINT, lambda part, mtp: 1, transport, b"", 0.3, handshake, 5.0, workers, lambda: None
    )


def test_a_key_that_two_requests_bring_is_kept_alive_for_the_second():
    ear = Ear()
    pulses = Pulses(b"", 0.3, 1.0, lambda reference: None)
    pulses.add(ear.reference())
    pulses.add(ear.reference())
    pulses.remove(ear.reference())
    before = ear.beats("0" * 32)
    wait_for(lambda: ear.beats("0" * 32) > before + 2)
    pulses.remove(ear.reference())
    time.sleep(0.2)
    after = ear.beats("0" * 32)
    time.sleep(0.3)
    assert ear.beats("0" * 32) == after
    pulses.close()
    ear.listener.close()


def test_beats_follow_the_producers_lease_where_that_is_shorter():
    ear = Ear()
    pulses = Pulses(b"", 600.0, 1.0, lambda reference: None)
    pulses.add(replace(ear.reference(), lease=0.6))
    wait_for(lambda: ear.beats("0" * 32) > 2, seconds=5.0)
    pulses.close()
    ear.listener.close()


def test_any_number_of_keys_is_kept_alive():
    ear = Ear()
    pulses = Pulses(b"", 0.6, 5.0, lambda reference: None)
    keys = [f"{at:032x}" for at in range(KEYS_IN_A_BEAT + 3)]
    for key in keys:
        pulses.add(ear.reference(key))
    wait_for(lambda: ear.beats(keys[0]) and ear.beats(keys[-1]))
    assert max(len(message["keys"]) for message in ear.heard) <= KEYS_IN_A_BEAT
    pulses.close()
    ear.listener.close()


def test_the_end_of_one_request_is_not_that_of_another_with_the_same_key():
    ear, reads = Ear(), consumer()
    first, second = (Load(name, ear.reference(), b"d") for name in ("first", "second"))
    reads.expect(first)
    reads.expect(second)
    reads.cancel(second)
    reads.drop(ear.reference())  # and a third that was refused
    other = ear.reference("1" * 32)
    reads.drop(other)
    wait_for(lambda: ear.drops())
    time.sleep(0.1)
    assert ear.drops() == [other.key]
    reads.cancel(first)
    wait_for(lambda: ear.drops() == [other.key, "0" * 32])
    reads.close()
    ear.listener.close()


def test_a_producer_that_says_nothing_keeps_one_request_waiting_for_each_worker_not_all():
    with socket.create_server(
        (HOST, 0)
    ) as hung:  # connections are accepted by the system, and nobody answers
        reads = consumer(handshake=0.5, workers=2)
        address = Reference("e", "r", HOST, hung.getsockname()[1], "0" * 32, 9, "inproc")
        loads = [Load(str(at), Reference(**vars(address) | {"key": f"{at:032x}"}), b"d") for at in range(12)]
        for load in loads:
            reads.expect(load)
        began = time.monotonic()
        for load in loads:
            reads.begin(load, 0, 8)
        ended = []
        wait_for(lambda: ended.extend(reads.events()) or len(ended) == len(loads))
        assert {event.failure.kind for event in ended} == {"timeout"}
        assert time.monotonic() - began < 3 * 0.5, "six turns of two would be 3 s"
        later = Load("later", address, b"d")
        reads.expect(later)
        reads.begin(later, 0, 8)
        wait_for(lambda: ended.extend(reads.events()) or len(ended) == len(loads) + 1)
        assert later.times.expected > began + 0.5, "who comes later tries again"
        reads.close()
