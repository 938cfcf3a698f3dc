"""Every wrong request gets a status, a message and the field to blame, and the next one is served."""

import json
import re
from pathlib import Path

import pytest
from answers import events
from fake_engine import FakeEngine

from glm_dcp_jax.engine.waiting import QueueFull
from glm_dcp_jax.serve import unsupported
from glm_dcp_jax.serve.body_limit import most_bytes
from glm_dcp_jax.serve.conversation import Message
from glm_dcp_jax.serve.protocol import ChatRequest, CompletionRequest

pytestmark = pytest.mark.anyio
COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


async def assert_still_serving(client):
    assert (await client.post(COMPLETIONS, json={"prompt": "a", "max_tokens": 1})).status_code == 200


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_an_unknown_model_is_not_found(client, path):
    body = {"model": "other", "prompt": "a", "messages": [{"role": "user", "content": "a"}]}
    del body["prompt" if path != COMPLETIONS else "messages"]
    answer = await client.post(path, json=body)
    assert answer.status_code == 404
    assert answer.json()["error"] == {
        "message": "The model `other` does not exist; this server has `fake`, `alias`.",
        "type": "NotFoundError",
        "param": "model",
        "code": 404,
    }
    await assert_still_serving(client)


async def test_any_of_the_served_names_will_do_and_is_echoed(post):
    assert (await post(COMPLETIONS, model="alias", prompt="a")).json()["model"] == "alias"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b'{"prompt": "a"', "not valid JSON"),
        (b"", "must be a JSON object"),
        (b"[1, 2]", "must be a JSON object"),
        (b'"text"', "must be a JSON object"),
        (b"\xff\xfe{}", "body"),
        (b'{"prompt": "\xff"}', "body"),
        (b"[" * 100_000, "body"),
        (b'{"prompt": "a", "seed": ' + b"9" * 10_000 + b"}", "body"),
    ],
)
async def test_a_body_that_is_no_json_object_is_a_bad_request(client, content, says):
    answer = await client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400
    assert answer.json()["error"]["type"] == "BadRequestError" and says in answer.json()["error"]["message"]
    await assert_still_serving(client)


async def test_a_body_of_another_type_says_which_is_wanted(client):
    headers = {"Content-Type": "application/x-www-form-urlencoded"}
    answer = await client.post(COMPLETIONS, content=b'{"prompt": "a"}', headers=headers)
    assert answer.status_code == 400
    assert "Content-Type: application/json" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": True}, "temperature"),
        ({"temperature": float("nan")}, "temperature"),
        ({"temperature": float("inf")}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -5}, "top_k"),
        ({"top_k": 1.5}, "top_k"),
        ({"min_p": 2}, "min_p"),
        ({"n": 0}, "n"),
        ({"n": 10**6}, "n"),
        ({"n": 10**30}, "n"),
        ({"n": "two"}, "n"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -3}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"stop": 5}, "stop"),
        ({"stop": [""]}, "stop"),
        ({"stop_token_ids": "abc"}, "stop_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"stop_token_ids": ["a"]}, "stop_token_ids.0"),
        ({"presence_penalty": 2.5}, "presence_penalty"),
        ({"frequency_penalty": -3}, "frequency_penalty"),
        ({"frequency_penalty": True}, "frequency_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"logit_bias": {"5": 101}}, "logit_bias"),
        ({"logit_bias": {"five": 1}}, "logit_bias"),
        ({"logit_bias": {"129280": 1}}, "logit_bias"),
        ({"logit_bias": {"9" * 5000: 1}}, "logit_bias"),
        ({"logit_bias": {"5": "much"}}, "logit_bias.5"),
        ({"logit_bias": [5]}, "logit_bias"),
        ({"min_tokens": -1}, "min_tokens"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"bad_words": "word"}, "bad_words"),
        ({"bad_words": [""]}, "bad_words"),
        ({"bad_words": ["x"] * 1001}, "bad_words"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [129280]}, "allowed_token_ids"),
        ({"allowed_token_ids": ["a"]}, "allowed_token_ids.0"),
        ({"stop_token_ids": [129280]}, "stop_token_ids"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"prompt_logprobs": -1}, "prompt_logprobs"),
        ({"priority": "high"}, "priority"),
        ({"priority": 1.5}, "priority"),
        ({"priority": 1}, "priority"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": 5}, "cache_salt"),
        ({"echo": "perhaps"}, "echo"),
        ({"stream": "perhaps"}, "stream"),
        ({"stream_options": 1}, "stream_options"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt": None}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": ["a", 1]}, "prompt"),
        ({"prompt": [1, -1]}, "prompt"),
        ({"prompt": [True]}, "prompt"),
        ({"prompt": {"a": 1}}, "prompt"),
        ({"prompt": [129280]}, "prompt"),
        ({"prompt": [2**70]}, "prompt"),
    ],
    ids=str,
)
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
async def test_a_value_that_cannot_work_is_blamed_by_its_field(client, fields, param, stream):
    content = json.dumps({"prompt": "a", "stream": stream, **fields})
    answer = await client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("BadRequestError", 400, param)
    await assert_still_serving(client)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"messages": [{"role": "user", "content": "a"}]}, "messages"),
        (COMPLETIONS, {"max_completion_tokens": 3}, "max_completion_tokens"),
        (COMPLETIONS, {"reasoning_effort": "high"}, "reasoning_effort"),
        (COMPLETIONS, {"chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        (CHAT, {"prompt": "b"}, "prompt"),
    ],
)
async def test_the_other_endpoints_fields_are_not_ignored(post, path, fields, param):
    body = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    answer = await post(path, **body, **fields)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
    assert (await post(path, **body, **dict.fromkeys(fields))).status_code == 200


async def test_stream_options_need_a_stream(post):
    answer = await post(COMPLETIONS, prompt="a", stream_options={"include_usage": True})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stream_options"


async def test_a_lone_surrogate_is_a_bad_request(client):
    for path in (COMPLETIONS, "/tokenize"):
        content = b'{"prompt": "a\\ud800"}'
        answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["param"] == "prompt"


async def test_completions_have_no_tools(post):
    answer = await post(COMPLETIONS, prompt="a", tools=[{"type": "function"}])
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("tools: is not supported")


@pytest.mark.parametrize(
    "fields",
    [
        {"best_of": 3},
        {"early_stopping": True},
        {"service_tier": "flex"},
        {"store": True},
        {"verbosity": "low"},
        {"data_parallel_rank": 0},
        {"guided_whitespace_pattern": " "},
        {"guided_decoding_backend": "outlines"},
        {"suffix": "end"},
        {"use_beam_search": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_what_is_not_supported_is_refused_by_name(client, path, fields):
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    answer = await client.post(path, json={**prompt, **fields})
    [name] = fields
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == name
    assert answer.json()["error"]["message"].startswith(f"{name}: is not supported")


def test_the_docs_name_all_fields_that_no_request_has():
    everything = {name for body in (ChatRequest, CompletionRequest, Message) for name in body.model_fields}
    missing = set(unsupported._HARMLESS) - everything
    text = (
        (Path(__file__).parents[2] / "docs" / "server.md").read_text().partition("**Unsupported fields**")[2]
    )
    listed = text.partition("these are not there:")[2].partition("- **")[0]
    assert missing == set(re.findall("`([a-z_]+)`", listed)) - {"structured_outputs"}


async def test_chat_has_no_echo(post):
    answer = await post(CHAT, messages=[{"role": "user", "content": "a"}], echo=True)
    assert answer.status_code == 400
    assert answer.json()["error"]["message"].startswith("echo: is not supported")


async def test_asking_for_nothing_is_allowed_and_unknown_fields_are_ignored(post):
    nothing = {
        "tools": [],
        "tool_choice": "none",
        "response_format": {"type": "text"},
        "best_of": 1,
        "suffix": None,
        "user": "me",
        "no_such_field": {"a": 1},
    }
    assert (await post(COMPLETIONS, prompt="a", **nothing)).status_code == 200


async def test_a_prompt_that_is_too_long_is_explained_in_numbers(post):
    answer = await post(COMPLETIONS, prompt=[5] * 64)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "prompt"
    assert answer.json()["error"]["message"].startswith(
        "This model's maximum context length is 64 tokens. However, your prompt has 64 tokens"
    )


@pytest.mark.parametrize("stream", [False, True])
async def test_more_output_than_fits_is_explained_in_numbers(post, stream):
    answer = await post(COMPLETIONS, prompt=[5] * 60, max_tokens=5, stream=stream)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "max_tokens"
    assert answer.json()["error"]["message"].startswith(
        "This model's maximum context length is 64 tokens. However, you requested 65 tokens"
    )
    assert (await post(COMPLETIONS, prompt=[5] * 60, max_tokens=4)).status_code == 200


async def test_a_long_chat_blames_its_messages(post):
    answer = await post(CHAT, messages=[{"role": "user", "content": "word " * 80}])
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages"


async def test_chat_logprobs_have_their_own_limits(post, engine, client_of):
    messages = [{"role": "user", "content": "a"}]
    for fields in ({"logprobs": True, "top_logprobs": 21}, {"top_logprobs": 2}):
        answer = await post(CHAT, messages=messages, **fields)
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "top_logprobs"
    body = {"messages": messages, "logprobs": True, "top_logprobs": 3}
    assert (await client_of(engine, max_logprobs=2).post(CHAT, json=body)).status_code == 400


async def test_unknown_paths_and_methods_are_answered_in_the_same_form(client):
    missing = await client.get("/v1/nothing")
    assert missing.status_code == 404 and missing.json()["error"]["type"] == "NotFoundError"
    method = await client.get(COMPLETIONS)
    assert method.status_code == 405 and method.json()["error"]["code"] == 405
    assert method.headers["allow"] == "POST"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_full_queue_is_unavailable_for_now(engine, client, path, stream):
    prompt = {"prompt": "a"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "a"}]}
    engine.full = QueueFull("max_num_queued_reqs", "4 requests wait")
    answer = await client.post(path, json={**prompt, "stream": stream})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    assert answer.json()["error"] == {
        "message": "4 requests wait",
        "type": "ServiceUnavailableError",
        "param": None,
        "code": 503,
    }
    engine.full = None
    await assert_still_serving(client)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_failure_inside_shows_no_details(engine, client, stream):
    engine.fails_after = 0
    answer = await client.post(COMPLETIONS, json={"prompt": "a", "stream": stream})
    assert answer.status_code == 500
    assert answer.json()["error"]["type"] == "InternalServerError"
    assert "secret" not in answer.text and "Traceback" not in answer.text
    engine.fails_after = None
    await assert_still_serving(client)


async def test_a_failure_in_mid_stream_is_an_event(engine, client):
    engine.fails_after = 2
    *chunks, error = events(await client.post(COMPLETIONS, json={"prompt": "a b c", "stream": True}))
    assert len(chunks) == 2
    assert error["error"]["code"] == 500 and "secret" not in str(error)


async def test_a_dead_engine_is_unavailable(engine, client):
    engine.fails_after, engine.dies = 0, True
    assert (await client.post(COMPLETIONS, json={"prompt": "a"})).status_code == 503
    assert (await client.get("/health")).status_code == 503
    refused = await client.post(COMPLETIONS, json={"prompt": "a"})
    assert refused.status_code == 503 and "restarted" in refused.json()["error"]["message"]


async def test_one_failing_prompt_of_many_aborts_the_others(client_of):
    engine = FakeEngine(delay=0.01)
    answer = await client_of(engine).post(
        COMPLETIONS, json={"prompt": [[5], [129280], [6]], "max_tokens": 60}
    )
    assert answer.status_code == 400
    assert engine.running == set() and len(engine.aborted) == 2


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_a_lone_surrogate_in_an_echoed_field_is_answered_with_a_replacement(client, path):
    asked = b'"messages": [{"role": "user", "content": "a"}]' if path == CHAT else b'"prompt": "a"'
    content = b'{"model": "a\\ud800", ' + asked + b"}"
    answer = await client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 404
    assert "The model `a?` does not exist" in answer.json()["error"]["message"]
    await assert_still_serving(client)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, "/tokenize"])
async def test_a_text_surely_too_long_is_refused_before_it_is_tokenized(client, engine, monkeypatch, path):
    def tokenized(*arguments, **named):
        raise AssertionError("tokenized")

    text = " " * (engine.max_model_len * engine.tokenizer.longest_token_bytes + 1)
    body = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    with monkeypatch.context() as patched:
        patched.setattr(engine.tokenizer, "encode", tokenized)
        answer = await client.post(path, json=body)
    assert answer.status_code == 400
    assert "maximum context length is 64 tokens" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == ("messages" if path == CHAT else "prompt")
    await assert_still_serving(client)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_beyond_the_limit_is_413(client, announced):
    async def chunks():
        for _ in range(17):
            yield b" " * 2**16

    content = b" " * (2**20 + 1) if announced else chunks()
    answer = await client.post(COMPLETIONS, content=content, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert answer.json()["error"] == {
        "message": "the body is too large; this server takes at most 1048576 bytes",
        "type": "RequestTooLargeError",
        "param": None,
        "code": 413,
    }
    await assert_still_serving(client)


def test_the_body_limit_grows_with_the_models_length_within_bounds():
    assert [most_bytes(length) for length in (64, 2**17, 2**30)] == [2**20, 2**23, 2**26]


async def test_more_stop_strings_than_anyone_needs_are_refused(post):
    assert (await post(COMPLETIONS, prompt="a", max_tokens=1, stop=["x"] * 1000)).status_code == 200
    answer = await post(COMPLETIONS, prompt="a", max_tokens=1, stop=["x"] * 1001)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "stop"


@pytest.mark.parametrize(("value", "status"), [(0, 400), (1000, 400), (1, 200)])
async def test_the_output_field_that_was_sent_is_the_one_to_blame(post, value, status):
    answer = await post(CHAT, messages=[{"role": "user", "content": "a"}], max_completion_tokens=value)
    assert answer.status_code == status
    if status == 400:
        assert answer.json()["error"]["param"] == "max_completion_tokens"
        assert "max_completion_tokens" in answer.json()["error"]["message"]
