"""Streams that have nothing to say for a while get comments, if that is asked for."""

import asyncio

import pytest
from fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
COMMENT = ": keep-alive"
PATHS = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def lines_of(text: str) -> list[str]:
    *lines, rest = text.split("\n\n")
    assert rest == ""
    return lines


@pytest.mark.parametrize("path", PATHS)
async def test_idle_streams_get_comments_before_and_between_events(client_of, path):
    client = client_of(FakeEngine(delay=0.25), sse_keep_alive_interval=0.1)
    answer = await client.post(path, json={**PATHS[path], "max_tokens": 2, "stream": True})
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = lines_of(answer.text)
    assert lines[0] == COMMENT and lines[-1] == "data: [DONE]"
    assert 3 <= lines.count(COMMENT) <= 5
    assert lines[-2].startswith("data: {") and COMMENT in lines[lines.index(lines[-2]) - 2 :]


@pytest.mark.parametrize("interval", [0.0, 5.0])
async def test_streams_with_something_to_say_get_none(client_of, interval):
    client = client_of(FakeEngine(delay=0.01), sse_keep_alive_interval=interval)
    answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert COMMENT not in answer.text and answer.text.endswith("data: [DONE]\n\n")


async def test_an_error_before_any_event_or_comment_has_its_status_and_one_behind_a_comment_is_an_event(
    client_of,
):
    engine = FakeEngine()
    client = client_of(engine, sse_keep_alive_interval=0.05)
    wrong = await client.post("/v1/completions", json={"prompt": [129280], "stream": True})
    assert wrong.status_code == 400 and wrong.json()["error"]["param"] == "prompt"
    engine.delay, engine.fails_after = 0.2, 0
    late = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    *comments, error, done = lines_of(late.text)
    assert set(comments) == {COMMENT} and late.status_code == 200
    assert '"code":500' in error and done == "data: [DONE]"


async def test_a_stopped_stream_with_comments_is_aborted(client_of):
    engine = FakeEngine(delay=0.2)
    client = client_of(engine, sse_keep_alive_interval=0.02)
    stopping = client._transport.app.state.context.stopping
    asyncio.get_running_loop().call_later(0.1, stopping.set)
    answer = await client.post("/v1/completions", json={"prompt": "a", "stream": True})
    assert "the server is shutting down" in lines_of(answer.text)[-2]
    assert len(engine.aborted) == 1 and not engine.running


async def test_responses_get_comments_beside_their_numbered_events(client_of):
    client = client_of(FakeEngine(delay=0.25), sse_keep_alive_interval=0.1)
    answer = await client.post("/v1/responses", json={"input": "a", "max_output_tokens": 2, "stream": True})
    lines = lines_of(answer.text)
    events = [line for line in lines if line != COMMENT]
    assert 3 <= lines.count(COMMENT) <= 5 and all(line.startswith("event: response.") for line in events)
    assert [f'"sequence_number":{number}' in line for number, line in enumerate(events)] == [True] * len(
        events
    )
