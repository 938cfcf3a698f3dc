"""A signal to stop: health checks and new requests hear of it at once, what runs may go on for a while."""

import socket
import time
from types import SimpleNamespace

import httpx
import pytest
from fake_engine import FakeEngine
from live import signalled_server, wait_until

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.settings import ServerSettings

BROUGHT = {"do_remote_prefill": True, "remote_key": "a"}


def stream(url: str, tokens: int):
    body = {"prompt": [5], "max_tokens": tokens, "stream": True}
    return httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=10)


def holding(caches: int) -> SimpleNamespace:
    """Transfers of an engine that holds so many caches for others."""
    return SimpleNamespace(sent=SimpleNamespace(offers=SimpleNamespace(held=caches)), received=None)


def refusal(answer: httpx.Response) -> str:
    assert answer.status_code == 503 and answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["type"] == "ServiceUnavailableError"
    return answer.json()["error"]["message"]


def test_a_draining_server_says_so_and_lets_what_runs_finish(caplog):
    caplog.set_level("INFO", "glm_dcp_jax")
    engine = FakeEngine(delay=0.03)
    with (
        signalled_server(engine, shutdown_timeout=20.0) as (url, signal_it, thread),
        stream(url, 40) as answer,
    ):
        lines = answer.iter_lines()
        assert next(lines).startswith("data: ")
        assert httpx.get(f"{url}/health").status_code == 200
        signal_it()
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        said = [refusal(httpx.get(f"{url}{path}")) for path in ("/health", "/ping")]
        said.append(refusal(httpx.post(f"{url}/ping")))
        body = {"prompt": "a", "kv_transfer_params": BROUGHT}
        said.append(refusal(httpx.post(f"{url}/v1/completions", json=body)))
        assert set(said) == {"the server is shutting down and takes no new requests"}
        assert engine.dropped == [BROUGHT], "who holds the refused request's cache hears of it"
        assert httpx.get(f"{url}/status.json").json()["state"] == "draining"
        assert httpx.get(f"{url}/metrics").status_code == httpx.get(f"{url}/v1/models").status_code == 200
        *_, last, done = [line for line in lines if line]
        assert '"finish_reason":"length"' in last and done == "data: [DONE]"
        thread.join(5)
        assert not thread.is_alive() and engine.stopped and 0 < engine.drain_seconds < 20
    assert "waiting up to 20 s for 1 request;" in caplog.text


@pytest.mark.parametrize(("patience", "signals", "least"), [(0.5, 1, 0.4), (0.0, 1, 0.0), (60.0, 2, 0.0)])
def test_what_does_not_finish_in_time_or_before_a_second_signal_is_ended(patience, signals, least):
    engine = FakeEngine(delay=0.05)
    with (
        signalled_server(engine, shutdown_timeout=patience) as (url, signal_it, thread),
        stream(url, 60) as answer,
    ):
        lines = answer.iter_lines()
        next(lines)
        began = time.monotonic()
        for _ in range(signals):
            signal_it()
        *_, last, done = [line for line in lines if line]
        assert "the server is shutting down" in last and done == "data: [DONE]"
        thread.join(5)
        assert not thread.is_alive() and least <= time.monotonic() - began < 2.5
    assert len(engine.aborted) == 1 and engine.drain_seconds == 0


def test_a_body_that_does_not_come_is_not_waited_for_any_longer(caplog):
    with signalled_server(FakeEngine(), shutdown_timeout=0.2) as (url, signal_it, thread):
        port = int(url.rpartition(":")[2])
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            head = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\nContent-Length: 9\r\n"
            client.sendall(f"{head}\r\n{{".encode())
            time.sleep(0.1)
            signal_it()
            answer = ""
            while "the server is shutting down" not in answer:
                assert (more := client.recv(1000)), answer
                answer += more.decode()
            assert answer.startswith("HTTP/1.1 503 ")
            thread.join(3)
            assert not thread.is_alive()
    assert not [record for record in caplog.records if record.exc_info]


def test_caches_that_others_have_yet_to_read_keep_it_for_as_long(caplog):
    caplog.set_level("INFO", "glm_dcp_jax")
    engine = FakeEngine()
    engine.transfers = holding(2)
    with signalled_server(engine, shutdown_timeout=20.0) as (url, signal_it, thread):
        signal_it()
        wait_until(lambda: httpx.get(f"{url}/health").status_code == 503)
        time.sleep(0.3)
        assert thread.is_alive() and not engine.stopped
        engine.transfers = holding(0)
        thread.join(5)
        assert not thread.is_alive() and engine.stopped
    assert "waiting up to 20 s for the caches of 2 requests, which nobody has read yet" in caplog.text


def test_caches_that_nobody_reads_keep_it_no_longer(caplog):
    engine = FakeEngine()
    engine.transfers = holding(1)
    with signalled_server(engine, shutdown_timeout=0.3) as (_, signal_it, thread):
        signal_it()
        thread.join(5)
        assert not thread.is_alive() and engine.drain_seconds == 0
    assert "not waiting any longer for the caches of 1 request, which" in caplog.text


@pytest.mark.parametrize("state", [{"is_dead": True}, {"is_ready": False}], ids=str)
def test_an_engine_that_serves_nothing_is_not_waited_for(state):
    engine = FakeEngine()
    with signalled_server(engine, shutdown_timeout=60.0) as (_, signal_it, thread):
        vars(engine).update(state)
        engine.transfers = holding(1) if engine.is_dead else None
        signal_it()
        thread.join(5)
        assert not thread.is_alive()


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), float("inf")])
def test_times_that_nobody_can_wait_are_refused(seconds):
    with pytest.raises(ConfigError, match="shutdown_timeout must be 0 or more seconds"):
        ServerSettings(("m",), shutdown_timeout=seconds)
