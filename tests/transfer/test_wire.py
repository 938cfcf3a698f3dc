"""Connections between engines: who is let in, what a frame may be, and what happens to those who wait."""

import contextlib
import os
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
from transport_peer import wait_until_stopped

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer import peer, wire
from glm_dcp_jax.transfer.wire import Listener, Peer, PeerError, RemoteError, connect

HOST = "127.0.0.1"
SECRET = b"a secret"
MIB = 1 << 20


def due(seconds: float = 5.0) -> float:
    return time.monotonic() + seconds


def answer(link: Peer) -> None:
    """Serves what the tests ask for."""
    while True:
        message, buffers = link.receive(None, most_bytes=64 * MIB)
        match message.get("do"):
            case "echo":
                link.send({"echo": message["text"]}, buffers)
            case "refuse":
                link.refuse("no_such_thing", "there is none of these")
            case "big":
                link.send({}, [np.ones(message["bytes"], np.uint8)])
            case "late":
                time.sleep(message["seconds"])
                link.send({"late": True})
            case "break":
                raise RuntimeError("a fault in what serves")
            case "hang up":
                return


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(HOST, 0, SECRET, answer, "test")
    yield made
    made.close()


@pytest.fixture
def link(listener) -> Iterator[Peer]:
    with connect(HOST, listener.port, SECRET, due()) as made:
        yield made


def kind_of(call, *arguments, **named) -> str:
    with pytest.raises(PeerError) as error:
        call(*arguments, **named)
    return error.value.kind


def test_messages_and_buffers_arrive_as_they_were(link):
    buffers = [
        np.arange(7, dtype=np.float32),
        np.zeros((0, 5), np.int64),
        np.arange(24, dtype=np.uint16).reshape(4, 6)[:, ::2],
        np.random.default_rng(0).integers(0, 256, 9 * MIB, np.uint8),
        memoryview(b"raw"),
    ] + [np.full(3, number, np.uint16) for number in range(1500)]  # more parts than one sendmsg takes
    link.send({"do": "echo", "text": "grüße ✓"}, buffers)
    message, back = link.receive(due(), most_bytes=64 * MIB)
    assert message == {"echo": "grüße ✓"}
    assert [array.tobytes() for array in back] == [np.asarray(buffer).tobytes() for buffer in buffers]
    assert all(array.dtype == np.uint8 and array.flags.writeable for array in back)


def test_a_refusal_is_an_error_of_the_remotes_kind_and_the_connection_goes_on(link):
    with pytest.raises(RemoteError, match="there is none of these") as error:
        link.request({"do": "refuse"}, due())
    assert (error.value.kind, error.value.remote_kind) == ("refused", "no_such_thing")
    assert link.request({"do": "echo", "text": 1}, due()) == {"echo": 1}


def test_threads_share_a_connection_and_each_gets_its_own_answer(link):
    wrong = []

    def ask(number: int) -> None:
        for turn in range(30):
            text = f"{number}/{turn}"
            if link.request({"do": "echo", "text": text}, due()) != {"echo": text}:
                wrong.append(text)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_more_bytes_than_expected_are_never_allocated(link):
    assert kind_of(link.exchange, {"do": "big", "bytes": MIB}, due(), MIB - 1) == "protocol"
    assert link.ended
    assert kind_of(link.request, {"do": "echo", "text": 1}, due()) == "lost"


@pytest.mark.parametrize("message", [{"text": "x" * peer.MAX_JSON_BYTES}, {"buffers": peer.MAX_BUFFERS + 1}])
def test_what_no_receiver_takes_is_not_sent(link, message):
    with pytest.raises(ValueError, match="at most"):
        link.send(message, [np.zeros(0, np.uint8)] * message.get("buffers", 0))
    assert link.request({"do": "echo", "text": 1}, due()) == {"echo": 1}


def test_another_secret_is_refused_on_both_sides(listener, caplog):
    assert kind_of(connect, HOST, listener.port, b"not the secret", due()) == "auth"
    deadline = due()
    while "does not know our secret" not in caplog.text:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    with connect(HOST, listener.port, SECRET, due()) as link:
        assert link.request({"do": "echo", "text": 1}, due()) == {"echo": 1}


def test_a_listener_that_cannot_prove_itself_is_not_believed():
    """It says that we are welcome, as one would that wants our requests."""
    trap = socket.create_server((HOST, 0))

    def welcome() -> None:
        caller, _ = trap.accept()
        with caller:
            caller.sendall(wire._HELLO.pack(peer.MAGIC, peer.VERSION, bytes(32)))
            proof = caller.recv(wire._PROOF.size, socket.MSG_WAITALL)
            caller.sendall(wire._VERDICT.pack(True, proof[-32:]))  # the caller's own proof, sent back
            caller.recv(1)

    thread = threading.Thread(target=welcome)
    thread.start()
    assert kind_of(connect, HOST, trap.getsockname()[1], SECRET, due()) == "auth"
    thread.join()
    trap.close()


def test_another_version_is_told_apart(listener, monkeypatch):
    monkeypatch.setattr(wire, "_HELLO", struct.Struct(">4sH32s"))
    trap = socket.create_server((HOST, 0))

    def other() -> None:
        caller, _ = trap.accept()
        with caller:
            caller.sendall(struct.pack(">4sH32s", peer.MAGIC, peer.VERSION + 1, bytes(32)))
            caller.recv(1)

    thread = threading.Thread(target=other)
    thread.start()
    with pytest.raises(PeerError, match="run one release") as error:
        connect(HOST, trap.getsockname()[1], SECRET, due())
    assert error.value.kind == "protocol"
    thread.join()
    trap.close()


GARBAGE = {
    "nothing": b"",
    "zeros": bytes(4),
    "many zeros": bytes(100_000),
    "random": np.random.default_rng(1).bytes(5000),
    "HTTP": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 5,
    "half a proof": peer.MAGIC + bytes(20),
    "a proof of nothing": wire._PROOF.pack(peer.MAGIC, peer.VERSION, bytes(32), bytes(32)),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_from_strangers_harms_nothing(listener, link, garbage):
    for linger in (False, True):  # closed in order, and reset
        with socket.create_connection((HOST, listener.port)) as stranger:
            stranger.sendall(garbage)
            if linger:
                stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert link.request({"do": "echo", "text": 1}, due()) == {"echo": 1}
    with connect(HOST, listener.port, SECRET, due()) as another:
        assert another.request({"do": "echo", "text": 2}, due()) == {"echo": 2}


FRAMES = {
    "another magic": peer._HEADER.pack(b"GET ", peer.VERSION, 0, 2) + b"{}",
    "endless JSON": peer._HEADER.pack(peer.MAGIC, peer.VERSION, 0, 1 << 31),
    "endless buffers": peer._HEADER.pack(peer.MAGIC, peer.VERSION, 1, 2) + struct.pack(">Q", 1 << 60) + b"{}",
    "too many buffers": peer._HEADER.pack(peer.MAGIC, peer.VERSION, 0xFFFF, 2),
    "no JSON": peer._HEADER.pack(peer.MAGIC, peer.VERSION, 0, 3) + b"{x}",
    "no object": peer._HEADER.pack(peer.MAGIC, peer.VERSION, 0, 2) + b"[]",
    "deep JSON": peer._HEADER.pack(peer.MAGIC, peer.VERSION, 0, 200_000) + b"[" * 200_000,
    "half a header": peer._HEADER.pack(peer.MAGIC, peer.VERSION, 0, 2)[:7],
    "half a frame": peer._HEADER.pack(peer.MAGIC, peer.VERSION, 0, 100) + b"{",
}


@pytest.mark.parametrize("frame", FRAMES.values(), ids=FRAMES.keys())
def test_broken_frames_of_one_who_knows_the_secret_end_only_its_connection(listener, link, frame):
    with connect(HOST, listener.port, SECRET, due()) as broken:
        with broken.use():
            broken.write([memoryview(frame)], due())
        with contextlib.suppress(OSError):  # ended already
            broken._socket.shutdown(socket.SHUT_WR)
        assert kind_of(broken.receive, due()) == "lost"
    assert link.request({"do": "echo", "text": 1}, due()) == {"echo": 1}


def test_a_fault_in_what_serves_is_logged_and_ends_only_its_connection(listener, link, caplog):
    with connect(HOST, listener.port, SECRET, due()) as other:
        assert kind_of(other.request, {"do": "break"}, due()) == "lost"
    assert link.request({"do": "echo", "text": 1}, due()) == {"echo": 1}
    assert "a fault in what serves" in caplog.text


def test_deadlines_are_kept_and_end_the_connection(link):
    start = time.monotonic()
    assert kind_of(link.request, {"do": "late", "seconds": 1.0}, due(0.2)) == "timeout"
    assert 0.2 <= time.monotonic() - start < 0.6
    # The answer would be taken for another request's.
    assert kind_of(link.request, {"do": "echo", "text": 1}, due()) == "lost"


def test_a_deadline_that_has_passed_is_a_timeout(listener):
    assert kind_of(connect, HOST, listener.port, SECRET, due(-1)) == "timeout"


def test_a_turn_that_does_not_come_in_time_leaves_the_other_request_alone(link):
    answers = []
    busy = threading.Thread(
        target=lambda: answers.append(link.request({"do": "late", "seconds": 0.5}, due()))
    )
    busy.start()
    time.sleep(0.1)
    assert kind_of(link.request, {"do": "echo", "text": 1}, due(0.1)) == "timeout"
    busy.join()
    assert answers == [{"late": True}]


def test_a_caller_can_give_up(link):
    start = time.monotonic()
    request = {"do": "late", "seconds": 1.0}
    assert (
        kind_of(link.exchange, request, due(), cancelled=lambda: time.monotonic() > start + 0.2)
        == "cancelled"
    )
    assert time.monotonic() - start < 0.6


def test_closing_wakes_whoever_waits(link):
    kinds = []
    waiting = threading.Thread(target=lambda: kinds.append(kind_of(link.receive, None)))
    waiting.start()
    time.sleep(0.1)
    link.close()
    waiting.join(5)
    assert kinds == ["lost"]


def test_a_peer_that_hangs_up_is_lost_at_once(link):
    start = time.monotonic()
    assert kind_of(link.request, {"do": "hang up"}, due(20)) == "lost"
    assert time.monotonic() - start < 1


def test_nobody_listens(listener):
    listener.close()
    start = time.monotonic()
    assert kind_of(connect, HOST, listener.port, SECRET, due(20)) == "lost"
    assert kind_of(connect, "no such host.invalid", 1, SECRET, due(20)) == "lost"
    assert kind_of(connect, HOST, listener.port + 65536, SECRET, due(20)) == "lost"
    assert time.monotonic() - start < 5


SERVER = f"""
import sys, threading
from glm_dcp_jax.transfer.wire import Listener
def serve(link):
    while True:
        link.send(link.receive(None)[0])
print(Listener({HOST!r}, int(sys.argv[1]), {SECRET!r}, serve, "test").port, flush=True)
threading.Event().wait()
"""


@pytest.fixture
def server() -> Iterator[tuple[subprocess.Popen, int]]:
    process = subprocess.Popen([sys.executable, "-c", SERVER, "0"], stdout=subprocess.PIPE, text=True)
    yield process, int(process.stdout.readline())
    process.kill()
    process.wait()


def test_a_stopped_process_is_a_timeout_and_a_killed_one_is_lost_at_once(server):
    process, port = server
    with connect(HOST, port, SECRET, due()) as link, connect(HOST, port, SECRET, due()) as other:
        assert link.request({"a": 1}, due()) == {"a": 1}
        process.send_signal(signal.SIGSTOP)
        wait_until_stopped(process.pid)
        start = time.monotonic()
        assert kind_of(link.request, {}, due(0.3)) == "timeout"
        assert (
            kind_of(connect, HOST, port, SECRET, due(0.3)) == "timeout"
        )  # the kernel accepts, nobody answers
        assert 0.6 <= time.monotonic() - start < 1.2

        kinds = []
        waiting = threading.Thread(target=lambda: kinds.append(kind_of(other.request, {}, due(20))))
        waiting.start()
        time.sleep(0.1)
        process.kill()
        waiting.join(2)
        assert kinds == ["lost"]


def test_a_killed_process_can_be_started_again_on_its_port(server):
    process, port = server
    with connect(HOST, port, SECRET, due()):
        process.kill()
        process.wait()
    again = subprocess.Popen([sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True)
    try:
        assert int(again.stdout.readline()) == port
        with connect(HOST, port, SECRET, due()) as link:
            assert link.request({"a": 1}, due()) == {"a": 1}
    finally:
        again.kill()
        again.wait()


def test_idle_strangers_are_shown_out(monkeypatch):
    monkeypatch.setattr(wire, "AUTHENTICATION_SECONDS", 0.2)
    listener = Listener(HOST, 0, SECRET, answer, "test")
    with socket.create_connection((HOST, listener.port), timeout=5) as stranger:
        start = time.monotonic()
        while stranger.recv(100):
            pass
        assert 0.1 < time.monotonic() - start < 1
    listener.close()


def test_connections_are_bounded(monkeypatch, caplog):
    monkeypatch.setattr(wire, "MAX_CONNECTIONS", 2)
    listener = Listener(HOST, 0, SECRET, answer, "test")
    links = [connect(HOST, listener.port, SECRET, due()) for _ in range(2)]
    assert kind_of(connect, HOST, listener.port, SECRET, due()) == "lost"
    assert "turned away" in caplog.text
    assert links[0].request({"do": "echo", "text": 1}, due()) == {"echo": 1}
    links[0].close()
    deadline = due()
    while True:  # its thread ends a moment later
        try:
            links.append(connect(HOST, listener.port, SECRET, deadline))
            break
        except PeerError:
            time.sleep(0.01)
    listener.close()
    assert kind_of(links[1].receive, due()) == "lost"
    for link in links:
        link.close()


def test_many_connections_leave_nothing_behind():
    listener = Listener(HOST, 0, SECRET, answer, "test")
    files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(300):
        with connect(HOST, listener.port, SECRET, due()) as link:
            assert link.request({"do": "echo", "text": number}, due()) == {"echo": number}
    listener.close()
    assert len(os.listdir("/proc/self/fd")) <= files
    assert threading.active_count() <= threads


@pytest.mark.parametrize(("host", "port"), [("192.0.2.1", 0), (HOST, 70000), ("no such host.invalid", 0)])
def test_an_address_that_cannot_be_listened_on_is_refused(host, port):
    with pytest.raises(ConfigError, match="choose an address of this machine"):
        Listener(host, port, SECRET, answer, "test")


def test_a_port_that_is_taken_is_refused(listener):
    with pytest.raises(ConfigError, match="choose an address of this machine and a free port"):
        Listener(HOST, listener.port, SECRET, answer, "test")
