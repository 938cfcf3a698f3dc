"""Requests that nobody should send: each gets a 4xx that blames the right field, and the next one is served."""

import contextlib
import dataclasses
import json
import socket
from collections.abc import AsyncIterator

import httpx
import pytest
from fake_engine import FakeEngine
from live import live_server

from glm_dcp_jax.config import engine_config

pytestmark = pytest.mark.anyio
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
TOKENIZE, DETOKENIZE = "/tokenize", "/detokenize"
RELEASE = "/v1/kv_transfer/release"
BODIES = {
    COMPLETIONS: {"prompt": "a", "max_tokens": 1},
    CHAT: {"messages": [{"role": "user", "content": "a"}], "max_tokens": 1},
    RESPONSES: {"input": "a", "max_output_tokens": 1},
    TOKENIZE: {"prompt": "a"},
    DETOKENIZE: {"tokens": [5]},
    RELEASE: {"kv_transfer_params": {"remote_key": "k"}},
}
REQUIRED = {
    COMPLETIONS: "prompt",
    CHAT: "messages",
    RESPONSES: "input",
    TOKENIZE: "prompt",
    DETOKENIZE: "tokens",
    RELEASE: "kv_transfer_params",
}
GETS = ("/v1/models", "/health", "/ping", "/load", "/version", "/metrics", "/docs", "/openapi.json")
ACTIONS = ("/reset_prefix_cache", "/start_profile", "/stop_profile")
JSON = {"Content-Type": "application/json"}
HUGE = 10**400
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def engine() -> FakeEngine:
    """It holds caches for others, so that there is something to release."""
    engine = FakeEngine()
    transfer = {"kv_connector": "tcp", "kv_role": "kv_both"}
    engine.config = dataclasses.replace(
        engine.config, transfer=engine_config("m", kv_transfer_config=transfer).transfer
    )
    return engine


async def refused(
    client: httpx.AsyncClient, answer: httpx.Response, param: str | None, status: int = 400
) -> str:
    """The message of a refusal in the right form, after which the server serves."""
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    assert error["param"] == param, error
    assert error["message"] and "Traceback" not in error["message"]
    served = await client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
    assert served.status_code == 200, served.text
    return error["message"]


async def send(client: httpx.AsyncClient, path: str, content: bytes) -> httpx.Response:
    return await client.post(path, content=content, headers=JSON)


@pytest.mark.parametrize("path", BODIES)
async def test_the_bodies_here_are_right_ones(client, path):
    assert (await client.post(path, json=BODIES[path])).status_code == 200


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "must be a JSON object"),
        (b"{", "not valid JSON, at character 1"),
        (b"nul", "not valid JSON, at character 0"),
        (b"null", "must be a JSON object"),
        (b"5", "must be a JSON object"),
        (b"[]", "must be a JSON object"),
        (b"\xff\xfe{\x00}\x00", "not UTF-8, at byte 0"),
        (b'{"model": "\xff"}', "not UTF-8, at byte 11"),
        (b"[" * 10_000 + b"]" * 10_000, "nested too deeply"),
        (b'{"a":' * 10_000 + b"1" + b"}" * 10_000, "nested too deeply"),
        (b'{"seed": ' + b"9" * 10_000 + b"}", "not valid JSON"),
        (b"\x00", "not valid JSON"),
    ],
    ids=range(12),
)
@pytest.mark.parametrize("path", BODIES)
async def test_what_is_no_json_object(client, path, content, says):
    assert says in await refused(client, await send(client, path, content), None)


@pytest.mark.parametrize("path", BODIES)
async def test_a_key_that_is_there_twice(client, path):
    whole = json.dumps(BODIES[path]).encode()
    name = REQUIRED[path]
    twice = whole[:-1] + f', "{name}": null}}'.encode()
    message = await refused(client, await send(client, path, twice), name)
    assert message == f"the key {name!r} is there twice; give it once"
    inner = whole[:-1] + b', "x": [{"k": 1, "k": 1}]}'
    await refused(client, await send(client, path, inner), "k")


@pytest.mark.parametrize("path", BODIES)
async def test_what_is_required_and_missing_or_of_a_wrong_type(client, path):
    name = REQUIRED[path]
    for body in (
        {},
        {name: None},
        {name: 5},
        {name: True},
        {name: NAN},
        {name: {"a": {}} if path != RELEASE else []},
    ):
        await refused(client, await send(client, path, json.dumps(body).encode()), name)


@pytest.mark.parametrize(
    "kind", ["text/plain", "application/x-www-form-urlencoded", "multipart/form-data", None]
)
@pytest.mark.parametrize("path", BODIES)
async def test_a_body_of_another_type(client, path, kind):
    content = json.dumps(BODIES[path]).encode()
    headers = {} if kind is None else {"Content-Type": kind}
    answer = await client.post(path, content=content, headers=headers)
    assert "Content-Type: application/json" in await refused(client, answer, None)


NUMBERS = {
    "n": (0, -1, 129, 1.5, HUGE),
    "presence_penalty": (-2.1, 2.1, HUGE, -HUGE),
    "frequency_penalty": (-2.1, 2.1, HUGE),
    "repetition_penalty": (0, -1, HUGE),
    "temperature": (-1, -0.0001, HUGE),
    "top_p": (0, -1, 1.01, HUGE),
    "top_k": (-2, 1.5, 2**31, HUGE),
    "min_p": (-0.1, 1.1, HUGE),
    "seed": (1.5, 2**63, -HUGE),
    "max_tokens": (0, -1, 1.5, 2**31, HUGE),
    "min_tokens": (-1, 1.5, 2**31, HUGE),
    "prompt_logprobs": (-1, 21, 1.5, HUGE),
    "priority": (1, 1.5, HUGE),
}
OTHERS = {
    "logit_bias": ({"5": NAN}, {"5": 101}, {"-1": 1}, {"x": 1}, {"129280": 1}, [1], "a", 5),
    "bad_words": ("word", [""], [5], [["a"]], {}, ["x"] * 1001),
    "allowed_token_ids": ([], [129280], [-1], [HUGE], ["a"], [1.5], "a", 5),
    "stop": (5, [5], [[]], {}, ["x"] * 1001),
    "stop_token_ids": ([129280], [-1], [HUGE], ["a"], [None], "a", 5),
    "ignore_eos": (5, "perhaps", [], NAN),
    "include_stop_str_in_output": (5, "perhaps", []),
    "skip_special_tokens": (5, "perhaps", []),
    "return_token_ids": (5, "perhaps", []),
    "stream": (5, "perhaps", [], {}),
    "stream_options": (5, "a", [], {"include_usage": True}),
    "cache_salt": ("", 5, [], {}),
    "kv_transfer_params": (5, "a", [1], True),
    "model": (5, [], {}, True),
    "tools": ([{"type": "function"}], "a", 5),
    "structured_outputs": ({"nothing": 1}, {"choice": [5]}, {"regex": 5}, "a", 5),
}


@pytest.mark.parametrize("field", [*NUMBERS, *OTHERS])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_every_field_of_a_request_that_generates(client, path, field):
    wrong = OTHERS.get(field) or (*NUMBERS[field], "text", "1", True, [], [1], {}, NAN, INF, -INF)
    for value in wrong:
        content = json.dumps({**BODIES[path], field: value}).encode()
        answer = await send(client, path, content)
        assert answer.status_code == 400, (value, answer.text)
        blamed = answer.json()["error"]["param"]
        assert blamed.split(".")[0] == field, (value, answer.text)
    served = await client.post(COMPLETIONS, json=BODIES[COMPLETIONS])
    assert served.status_code == 200


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"logprobs": NAN}, "logprobs"),
        (COMPLETIONS, {"logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"logprobs": True}, "logprobs"),
        (COMPLETIONS, {"echo": "perhaps"}, "echo"),
        (COMPLETIONS, {"prompt": [HUGE]}, "prompt"),
        (COMPLETIONS, {"prompt": [NAN]}, "prompt"),
        (COMPLETIONS, {"prompt": [[[5]]]}, "prompt"),
        (COMPLETIONS, {"prompt": "\ud800"}, "prompt"),
        (CHAT, {"logprobs": 5}, "logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": NAN}, "top_logprobs"),
        (CHAT, {"logprobs": True, "top_logprobs": HUGE}, "top_logprobs"),
        (CHAT, {"max_completion_tokens": -1}, "max_completion_tokens"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [5]}, "messages.0"),
        (CHAT, {"messages": [{"role": "king", "content": "a"}]}, "messages.0.role"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content"),
        (CHAT, {"messages": [{"role": "user", "content": NAN}]}, "messages.0.content"),
        (CHAT, {"chat_template_kwargs": {"messages": []}}, "chat_template_kwargs"),
        (CHAT, {"chat_template_kwargs": 5}, "chat_template_kwargs"),
        (CHAT, {"add_generation_prompt": "perhaps"}, "add_generation_prompt"),
        (TOKENIZE, {"prompt": "\ud800"}, "prompt"),
        (TOKENIZE, {"return_token_strs": 5}, "return_token_strs"),
        (DETOKENIZE, {"tokens": [HUGE]}, "tokens"),
        (DETOKENIZE, {"tokens": [-1]}, "tokens.0"),
        (DETOKENIZE, {"tokens": [NAN]}, "tokens.0"),
        (DETOKENIZE, {"tokens": [True]}, "tokens.0"),
        (RELEASE, {"kv_transfer_params": {}}, "kv_transfer_params"),
    ],
    ids=str,
)
async def test_fields_of_one_endpoint(client, path, fields, param):
    content = json.dumps({**BODIES[path], **fields}).encode()
    await refused(client, await send(client, path, content), param)


@pytest.mark.parametrize("path", [*BODIES, *ACTIONS, *GETS])
async def test_methods_that_a_path_does_not_take(client, path):
    taken = (
        {"POST"} if path in (*BODIES, *ACTIONS) else {"GET", "HEAD"} if path == "/openapi.json" else {"GET"}
    )
    if path == "/ping":
        taken |= {"POST"}
    for method in ("GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS", "TRACE", "BREW"):
        answer = await client.request(method, path)
        if method in taken:
            assert answer.status_code != 405, (method, path)
        else:
            assert answer.status_code == 405 and answer.headers["allow"], (method, path)
            assert method == "HEAD" or answer.json()["error"]["code"] == 405
    assert (await client.post(COMPLETIONS, json=BODIES[COMPLETIONS])).status_code == 200


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "//v1/models",
        "/v1/%00",
        "/V1/models",
        "/v1/" + "x" * 60_000,
        "/%ff%fe",
        "/../etc/passwd",
    ],
    ids=lambda path: path[:16],
)
async def test_paths_that_are_not_there(client, path):
    await refused(client, await client.get(path), None, 404)


@pytest.mark.parametrize("path", [*BODIES, *ACTIONS])
@pytest.mark.parametrize("announced", [True, False], ids=["announced", "in chunks"])
async def test_a_body_of_100_megabytes_is_not_read(client, engine, path, announced):
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 1
            yield b" " * 10**6

    headers = JSON | ({"Content-Length": str(10**8)} if announced else {})
    answer = await client.post(path, content=chunks(), headers=headers)
    if announced or path in BODIES:
        assert "at most 1048576 bytes" in await refused(client, answer, None, 413)
    assert sent <= 2


@pytest.mark.parametrize("path", BODIES)
async def test_unknown_fields_and_queries_change_nothing(client, path):
    body = {**BODIES[path], "no_such_field": {"a": [NAN]}, "": 1, "x" * 10_000: 2}
    assert (await send(client, f"{path}?stream=true&n=5", json.dumps(body).encode())).status_code == 200


@pytest.mark.parametrize(
    "data",
    [
        b"\x00" * 100,
        b"GET /health\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: -5\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\nHost: a\r\nX: " + b"y" * 200_000 + b"\r\n\r\n",
    ],
    ids=range(5),
)
def test_what_is_no_http_ends_its_connection_and_no_more(data):
    with live_server(FakeEngine()) as url:
        host, port = url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            said = b""
            with contextlib.suppress(OSError):  # it may be closed already
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                said = connection.recv(65536)
        assert said == b"" or said.startswith(b"HTTP/1.1 4"), said
        assert httpx.post(f"{url}{COMPLETIONS}", json=BODIES[COMPLETIONS]).status_code == 200
