"""A client that goes away takes its request with it, wherever it is, and no other; a stopping server takes all."""

import asyncio
import http.client
import json
import socket
import threading
import time
from concurrent.futures import Future
from types import SimpleNamespace

import httpx
import pytest
from answers import events
from fake_engine import FakeEngine, tokenizer
from live import live_server, wait_until
from prometheus_client.parser import text_string_to_metric_families

from glm_dcp_jax.serve import chat_prompt
from glm_dcp_jax.serve.app import create_app
from glm_dcp_jax.serve.conversation import Conversation, Message
from glm_dcp_jax.serve.settings import ServerSettings

PATH = "/v1/completions"


def begin(url: str, **body) -> socket.socket:
    """Send a request, and do not wait for the answer."""
    host, port = url.removeprefix("http://").split(":")
    content = json.dumps(body).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: {host}\r\nContent-Type: application/json\r\nContent-Length: {len(content)}"
    connection = socket.create_connection((host, int(port)))
    connection.sendall(head.encode() + b"\r\n\r\n" + content)
    return connection


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("delay", [0.02, 5.0], ids=["decoding", "before the first token"])
def test_the_request_is_aborted(stream, delay):
    engine = FakeEngine(delay=delay)
    with live_server(engine) as url:
        body = {"prompt": [[5], [6]], "max_tokens": 60, "stream": stream}
        connection = begin(url, **body)
        wait_until(lambda: len(engine.running) == 2)
        if stream and delay < 1:
            assert connection.recv(100)
        began = time.monotonic()
        connection.close()
        wait_until(lambda: not engine.running)
        assert time.monotonic() - began < 1
        assert len(engine.aborted) == 2
        wait_until(lambda: aborts(url) == 2)


def aborts(url: str) -> float:
    host = url.removeprefix("http://")
    connection = http.client.HTTPConnection(host)
    connection.request("GET", "/metrics")
    text = connection.getresponse().read().decode()
    connection.close()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == "vllm:request_success_total" and sample.labels["finished_reason"] == "abort":
                return sample.value
    raise AssertionError("no such metric")


def test_others_go_on():
    engine = FakeEngine(delay=0.02)
    with live_server(engine) as url:
        leaver = begin(url, prompt=[5], max_tokens=60, stream=True)
        stayer = http.client.HTTPConnection(url.removeprefix("http://"))
        answer = {}

        def stay() -> None:
            stayer.request(
                "POST",
                PATH,
                json.dumps({"prompt": [6], "max_tokens": 30}),
                {"Content-Type": "application/json"},
            )
            answer.update(json.loads(stayer.getresponse().read()))

        thread = threading.Thread(target=stay)
        thread.start()
        wait_until(lambda: len(engine.running) == 2)
        leaver.close()
        thread.join()
        stayer.close()
        assert answer["usage"]["completion_tokens"] == 30
        assert len(engine.aborted) == 1


def test_the_engine_is_shut_down_with_the_server():
    engine = FakeEngine()
    with live_server(engine):
        assert not engine.stopped
    assert engine.stopped


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_stopping_server_tells_the_clients_it_leaves(stream):
    async def run() -> httpx.Response:
        app = create_app(engine, ServerSettings(served_model_names=("fake",)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            body = {"prompt": [5], "max_tokens": 60, "stream": stream}
            answer = asyncio.ensure_future(client.post(PATH, json=body))
            while not engine.generation_tokens:
                await asyncio.sleep(0.005)
            app.state.context.stopping.set()
            return await answer

    engine = FakeEngine(delay=0.02)
    answer = asyncio.run(run())
    error = events(answer)[-1] if stream else answer.json()
    assert error["error"]["message"] == "the server is shutting down" and error["error"]["code"] == 503
    assert answer.status_code == (200 if stream else 503)
    assert len(engine.aborted) == 1


@pytest.mark.anyio
@pytest.mark.parametrize("steps", range(1, 6))
async def test_a_client_that_leaves_as_the_prompt_is_rendered_is_not_forgotten(monkeypatch, steps):
    rendered: Future[str] = Future()
    rendered.set_result("Hi")
    go_on = threading.Event()
    monkeypatch.setattr(chat_prompt, "_pool", lambda: SimpleNamespace(submit=lambda render: rendered))
    monkeypatch.setattr(chat_prompt, "encode_within", lambda *arguments: [1] if go_on.wait(10) else [])
    asked = Conversation(messages=[Message(role="user", content="Hi")])
    task = asyncio.ensure_future(chat_prompt.chat_token_ids(tokenizer(), asked, None, False, 64))
    for _ in range(steps):
        await asyncio.sleep(0)
    task.cancel()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
