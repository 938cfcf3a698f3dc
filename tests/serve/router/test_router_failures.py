"""What goes wrong on either leg, and that no cache is left behind."""

import json
import os
import socket
import time

import httpx
import pytest
from fake_backend import PARAMS, Script, answer, stream
from live import wait_until

HANG = Script(hang_at=-1)
BREAK = Script(break_at=-1)


def begin(router, path: str = "/v1/completions", **body) -> socket.socket:
    """Send a request, and do not wait for the answer."""
    host, port = router.url.removeprefix("http://").split(":")
    content = json.dumps({"prompt": "Hello", **body}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(content)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + content)
    return connection


def ended(router, outcome: str) -> None:
    """One request has ended, like this."""
    wait_until(lambda: router.metric("requests_total", outcome=outcome) == 1)
    wait_until(lambda: all(backend.in_flight == 0 for backend in router.context.backends))


def released(router, fleet) -> None:
    """The first prefill server was told to let go of what it handed over, once."""
    wait_until(lambda: router.metric("releases_total", result="ok") == 1)
    assert fleet.released == [PARAMS]


def kept(router, fleet) -> None:
    """Nobody was told to let go of anything."""
    assert fleet.released == []
    assert (
        router.metric("releases_total", result="ok") == router.metric("releases_total", result="failed") == 0
    )


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        (Script(status=500), "status"),
        (Script(status=503), "status"),
        (Script(status=302, headers={"location": "/elsewhere"}), "status"),
        (BREAK, "broken"),
        (Script(chunks=(b'{"kv_transfer', b"..."), break_at=1), "broken"),
        (Script(chunks=(b'{"kv_transfer',)), "bad_answer"),
        (Script(chunks=(b"\xff",)), "bad_answer"),
        (Script(chunks=(b"[1]",)), "bad_answer"),
        (answer({"kv_transfer_params": "key"}), "bad_answer"),
    ],
)
def test_another_prefill_server_is_tried_and_then_decode_does_all(router, fleet, script, reason):
    fleet.prefill[0].script = script
    assert router.post(stream=True).status_code == 200
    assert fleet.decode[0].only.body["kv_transfer_params"]["key"] == "of-p1"
    assert router.metric("retries_total", role="prefill") == 1

    fleet.prefill[1].script = script
    assert router.post(stream=True).status_code == 200
    assert fleet.decode[0].seen[1].body == {"prompt": "Hello", "stream": True}
    assert router.metric("fallbacks_total", reason=reason) == 1
    assert (len(fleet.prefill[0].seen), len(fleet.prefill[1].seen)) == (2, 2)
    kept(router, fleet)


def test_a_prefill_server_that_hangs_is_left_when_its_time_is_over(router_of, fleet):
    router = router_of(prefill_timeout=0.4)
    fleet.prefill[0].script = HANG
    began = time.monotonic()
    assert router.post().status_code == 200
    assert 0.4 < time.monotonic() - began < 5
    assert fleet.prefill[1].seen == [], "the deadline is for all tries together"
    assert fleet.decode[0].only.body == {"prompt": "Hello"}
    assert router.metric("fallbacks_total", reason="timeout") == 1
    wait_until(lambda: fleet.prefill[0].cut_off == 1)


def test_the_second_try_has_only_what_is_left_of_the_deadline(router_of, fleet):
    router = router_of(prefill_timeout=1.0)
    fleet.prefill[0].script, fleet.prefill[1].script = Script(status=500, delay=0.8), HANG
    began = time.monotonic()
    assert router.post().status_code == 200
    assert 1.0 < time.monotonic() - began < 1.7
    assert router.metric("fallbacks_total", reason="timeout") == 1


def test_a_prefill_server_that_cannot_be_reached_is_not_asked_again(router_of, fleet, dead_url):
    router = router_of(prefill=(dead_url,))
    router.context.prefill.backends[0].healthy = True  # as if it had died since it was last asked
    assert router.post().status_code == 200
    assert router.metric("fallbacks_total", reason="unreachable") == 1
    assert router.metric("healthy", role="prefill", backend=dead_url) == 0
    assert router.post().status_code == 200
    assert router.metric("fallbacks_total", reason="unhealthy") == 1
    assert [seen.body for seen in fleet.decode[0].seen] == [{"prompt": "Hello"}] * 2


def test_a_decode_server_that_cannot_be_reached_has_not_used_the_reference_up(router_of, fleet, dead_url):
    router = router_of(decode=(dead_url, fleet.decode[0].url))
    router.context.decode.backends[0].healthy = True
    assert router.post().status_code == 200
    assert fleet.decode[0].only.body["kv_transfer_params"] == PARAMS
    assert len(fleet.prefill[0].seen) == 1 and router.metric("retries_total", role="decode") == 1
    kept(router, fleet)


def test_without_any_decode_server_the_cache_is_released(router_of, fleet, dead_url):
    router = router_of(decode=(dead_url,))
    got = router.post(stream=True)
    assert got.status_code == 502 and got.headers["content-type"] == "application/json"
    error = got.json()["error"]
    assert (error["message"], error["type"]) == ("no decode server can be reached", "BadGatewayError")
    released(router, fleet)
    ended(router, "failed")


@pytest.mark.parametrize("status", [400, 404, 429, 500, 503])
def test_a_refusal_of_decode_reaches_the_client_and_the_cache_is_released(router, fleet, status):
    refusal = {"error": {"message": "no", "code": status}}
    fleet.decode[0].script = answer(refusal, status=status, headers={"retry-after": "7"})
    got = router.post(stream=True)
    assert (got.status_code, got.json(), got.headers["retry-after"]) == (status, refusal, "7")
    assert fleet.decode[1].seen == []
    released(router, fleet)
    ended(router, "rejected" if status < 500 else "failed")


@pytest.mark.parametrize("script", [HANG, stream(b"data: 1\n\n", hang_at=0)], ids=["headers", "first byte"])
def test_a_decode_server_that_does_not_begin_is_left(router_of, fleet, script):
    router = router_of(decode_timeout=0.4)
    fleet.decode[0].script = script
    got = router.post(stream=True)
    assert got.status_code == 504 and got.json()["error"]["type"] == "GatewayTimeoutError"
    assert "did not begin to answer within 0.4 s" in got.json()["error"]["message"]
    wait_until(lambda: fleet.decode[0].cut_off == 1)
    assert fleet.decode[1].seen == [], "the first may have used the reference up"
    released(router, fleet)
    ended(router, "timeout")


@pytest.mark.parametrize("script", [BREAK, stream(b"data: 1\n\n", break_at=0)], ids=["headers", "first byte"])
def test_a_decode_server_that_breaks_off_before_it_begins_is_an_error_answer(router, fleet, script):
    fleet.decode[0].script = script
    got = router.post(stream=True)
    assert got.status_code == 502 and "broke off" in got.json()["error"]["message"]
    assert fleet.decode[1].seen == []
    released(router, fleet)
    ended(router, "failed")


@pytest.mark.parametrize(
    ("chunks", "whole"),
    [
        ((b"data: 1\n\n",), b"data: 1\n\n"),
        ((b"data: 1\n\nda", b"ta: 2"), b"data: 1\n\n"),
        ((b"data: 1\n\ndata: 2\n",), b"data: 1\n\ndata: 2\n"),
    ],
    ids=["between events", "within a line", "between lines"],
)
def test_a_stream_that_breaks_off_ends_with_an_error_event(router, fleet, chunks, whole):
    fleet.decode[0].script = stream(*chunks, b"never sent", break_at=len(chunks), pause=0.05)
    got = router.post(stream=True)
    assert got.status_code == 200 and got.content.startswith(whole)
    head, event, end = got.content.removeprefix(whole).partition(b"data: ")
    assert head == b"\n" and event and end.endswith(b"}\n\n")
    error = json.loads(end)["error"]
    assert (error["type"], error["code"]) == ("BadGatewayError", 502)
    assert b"[DONE]" not in got.content
    kept(router, fleet)
    ended(router, "broken")


def test_a_stream_that_stalls_ends_with_an_error_event(router_of, fleet):
    router = router_of(decode_timeout=0.4)
    fleet.decode[0].script = stream(*[b"data: 1\n\n"] * 4, b"data: 2\n\n", pause=0.2, hang_at=4)
    began = time.monotonic()
    text = router.post(stream=True).text
    assert time.monotonic() - began > 1, "the deadline is between bytes, not for all of them"
    assert text.count("data: 1") == 4 and "nothing came for 0.4 s" in text and "[DONE]" not in text
    wait_until(lambda: fleet.decode[0].cut_off == 1)
    ended(router, "broken")


def test_an_answer_that_is_no_stream_and_breaks_off_is_cut_off(router, fleet):
    fleet.decode[0].script = Script(chunks=(b'{"choices"', b": []}"), pause=0.05, break_at=1)
    with pytest.raises(httpx.RemoteProtocolError):
        router.post()
    ended(router, "broken")


def test_a_client_that_leaves_during_prefill_takes_the_request_with_it(router, fleet):
    fleet.prefill[0].script = HANG
    connection = begin(router)
    wait_until(lambda: fleet.prefill[0].running == 1)
    connection.close()
    wait_until(lambda: fleet.prefill[0].cut_off == 1)
    ended(router, "disconnected")
    assert fleet.prefill[1].seen == fleet.decode[0].seen == []
    kept(router, fleet)


def test_a_client_that_leaves_while_prefill_answers_leaves_no_cache_behind(router, fleet):
    fleet.prefill[0].script = answer({"kv_transfer_params": PARAMS}, delay=0.1)
    connection = begin(router)
    wait_until(lambda: fleet.prefill[0].running == 1)
    connection.close()
    released(router, fleet)
    ended(router, "disconnected")
    assert fleet.prefill[0].cut_off == 0 and fleet.decode[0].seen == []


def test_clients_that_leave_at_any_moment_leave_no_connections_behind(router, fleet):
    fleet.decode[0].script = fleet.decode[1].script = HANG
    before = len(os.listdir("/proc/self/fd"))
    for crowd in range(2):
        connections = [begin(router) for _ in range(40)]
        time.sleep(0.06 * crowd)
        for connection in connections:
            time.sleep(0.002)
            connection.close()
    wait_until(lambda: router.metric("requests_total", outcome="disconnected") == 80)
    wait_until(lambda: len(os.listdir("/proc/self/fd")) <= before + 2)  # the ends of this client's own
    assert all(backend.in_flight == 0 for backend in router.context.backends)


@pytest.mark.parametrize("script", [HANG, stream(b"data: 1\n\n", hang_at=0)], ids=["headers", "first byte"])
def test_a_client_that_leaves_before_decode_answers_leaves_no_cache_behind(router, fleet, script):
    fleet.decode[0].script = script
    connection = begin(router, stream=True)
    wait_until(lambda: fleet.decode[0].running == 1)
    connection.close()
    wait_until(lambda: fleet.decode[0].cut_off == 1)
    released(router, fleet)
    ended(router, "disconnected")
    seen = fleet.prefill[0].released[0]
    assert seen.headers["x-request-id"] == fleet.prefill[0].only.headers["x-request-id"]


def test_a_decode_server_that_is_stopped_takes_nothing_over(router_of, fleet):
    router = router_of(decode=(fleet.decode[0].url,))
    (decode,) = router.context.decode.backends
    with socket.create_server(("127.0.0.1", 0)) as stopped:  # its system accepts, and nobody reads
        decode.url = f"http://127.0.0.1:{stopped.getsockname()[1]}"
        connection = begin(router)
        wait_until(lambda: decode.in_flight == 1)
        connection.close()
        released(router, fleet)
        ended(router, "disconnected")


def test_a_client_that_leaves_within_the_answer_takes_only_the_rest_with_it(router, fleet):
    fleet.decode[0].script = stream(b"data: 1\n\n", b"data: 2\n\n", hang_at=1)
    connection = begin(router, stream=True)
    received = b""
    while b"data: 1" not in received:
        received += connection.recv(1000)
    connection.close()
    wait_until(lambda: fleet.decode[0].cut_off == 1)
    ended(router, "disconnected")
    kept(router, fleet)


def test_the_release_carries_the_clients_key(router, fleet):
    fleet.decode[0].script = answer({}, status=400)
    router.post(headers={"Authorization": "Bearer secret"})
    released(router, fleet)
    assert fleet.prefill[0].released[0].headers["authorization"] == "Bearer secret"


@pytest.mark.parametrize("script", [Script(status=404), BREAK], ids=["refused", "broken"])
def test_a_release_that_fails_is_counted(router, fleet, script):
    fleet.decode[0].script, fleet.prefill[0].release_script = answer({}, status=500), script
    assert router.post().status_code == 500
    wait_until(lambda: router.metric("releases_total", result="failed") == 1)


def test_a_release_does_not_keep_the_client_waiting(router, fleet):
    fleet.decode[0].script, fleet.prefill[0].release_script = answer({}, status=500), Script(delay=1.5)
    began = time.monotonic()
    router.post()
    assert time.monotonic() - began < 1.3
    released(router, fleet)


def test_a_router_that_stops_tells_its_clients(router, fleet):
    fleet.decode[0].script = stream(b"data: 1\n\n", b"data: 2\n\n", hang_at=1)
    with router.client.stream("POST", "/v1/completions", json={"stream": True}) as got:
        lines = got.iter_lines()
        assert next(lines) == "data: 1"
        router.stop()
        rest = list(lines)
    assert "the server is shutting down" in rest[-2]
    assert "[DONE]" not in rest
    ended(router, "stopped")


def test_a_router_that_stops_before_decode_answers_leaves_no_cache_behind(router, fleet):
    fleet.decode[0].script = HANG
    connection = begin(router)
    wait_until(lambda: fleet.decode[0].running == 1)
    router.stop()
    assert connection.recv(1000).startswith(b"HTTP/1.1 503")
    connection.close()
    released(router, fleet)
    ended(router, "stopped")


REFUSES = Script(
    status=400,
    chunks=(b'{"error": {"message": "this engine is a kv_consumer", "param": "kv_transfer_params"}}',),
)


def test_a_prefill_server_that_hands_nothing_over_is_our_mistake_and_no_clients(router_of, fleet):
    fleet.prefill[0].script = fleet.prefill[1].script = REFUSES
    router = router_of()
    assert router.post().status_code == 200
    assert router.metric("fallbacks_total", reason="refused") == 1
    assert "kv_transfer_params" not in fleet.decode[0].only.body


def test_neither_is_a_decode_server_that_takes_nothing(router_of, fleet):
    fleet.decode[0].script = REFUSES
    router = router_of()
    got = router.post()
    assert got.status_code == 502
    assert got.json()["error"]["message"] == "the decode server takes no cache from the prefill server"
    released(router, fleet)
