"""/v1/chat/completions: the template makes the prompt, which the fake engine echoes."""

import asyncio
import subprocess
import sys
import threading

import pytest
from answers import events
from fake_engine import tokenizer

from glm_dcp_jax.serve import chat_prompt

pytestmark = pytest.mark.anyio
PATH = "/v1/chat/completions"
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi 猫"}]
PROMPT = "<system>Be brief.<user>Hi 猫<go>"


async def test_the_template_makes_the_prompt(post):
    ids = tokenizer().encode(PROMPT, add_special_tokens=False)
    body = (await post(PATH, model="fake", messages=MESSAGES, max_tokens=len(ids))).json()
    assert body["object"] == "chat.completion" and body["id"].startswith("chatcmpl-")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {
                "role": "assistant",
                "content": PROMPT,
                "reasoning": None,
                "reasoning_content": None,
            },
            "logprobs": None,
            "finish_reason": "length",
            "stop_reason": None,
        }
    ]
    assert body["usage"]["prompt_tokens"] == len(ids)


async def test_a_stream_begins_with_the_role_and_is_the_answer_in_pieces(post):
    body = {"messages": MESSAGES, "n": 2, "max_completion_tokens": 12}
    whole = (await post(PATH, **body)).json()
    chunks = events(await post(PATH, **body, stream=True, stream_options={"include_usage": True}))
    for index in (0, 1):
        own = [c["choices"][0] for c in chunks[:-1] if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        content = "".join(choice["delta"]["content"] for choice in own)
        assert content == whole["choices"][index]["message"]["content"]
        assert [choice["finish_reason"] for choice in own][-1] == "length"
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in chunks)
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]


async def test_without_a_limit_it_may_fill_the_context(post):
    usage = (await post(PATH, messages=MESSAGES)).json()["usage"]
    assert usage["total_tokens"] == 64


async def test_max_completion_tokens_wins_over_max_tokens(post):
    body = await post(PATH, messages=MESSAGES, max_tokens=9, max_completion_tokens=2)
    assert body.json()["usage"]["completion_tokens"] == 2


async def test_text_parts_are_joined_and_developer_is_system(post):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "Rules."}, {"role": "user", "content": parts}]
    tokens = (await post("/tokenize", messages=messages)).json()["tokens"]
    assert tokenizer().decode(tokens) == "<system>Rules.<user>a\nb<go>"


async def test_template_variables_and_the_servers_own_template(engine, client_of):
    template = "{{ enable_thinking }} {{ reasoning_effort }} {{ messages[-1].reasoning_content }}"
    client = client_of(engine, chat_template=template)
    body = {
        "messages": [{"role": "assistant", "content": "b", "reasoning_content": "hm"}],
        "chat_template_kwargs": {"enable_thinking": False},
        "reasoning_effort": "high",
    }
    tokens = (await client.post("/tokenize", json=body)).json()["tokens"]
    assert tokenizer().decode(tokens) == "False high hm"


async def test_logprobs_carry_the_bytes_of_each_token(post):
    body = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True, "top_logprobs": 2}
    whole = (await post(PATH, **body)).json()["choices"][0]
    content = whole["logprobs"]["content"]
    assert b"".join(bytes(entry["bytes"]) for entry in content).decode() == whole["message"]["content"]
    assert content[0]["token"] == "<" and content[0]["logprob"] == -9999.0
    assert [top["logprob"] for top in content[0]["top_logprobs"]] == [0.0, -1.0]
    chunks = events(await post(PATH, **body, stream=True))
    streamed = [c["choices"][0]["logprobs"] for c in chunks]
    assert [entry for piece in streamed if piece for entry in piece["content"]] == content


async def test_logprobs_without_alternatives(post):
    content = (await post(PATH, messages=MESSAGES, max_tokens=1, logprobs=True)).json()
    [entry] = content["choices"][0]["logprobs"]["content"]
    assert entry["top_logprobs"] == []


@pytest.mark.parametrize(
    ("messages", "param", "says"),
    [
        ([], "messages", "at least 1"),
        ("hello", "messages", "list"),
        ([{"role": "robot", "content": "a"}], "messages.0.role", "'user'"),
        ([{"role": "user"}], "messages.0.content", "required"),
        ([{"role": "user", "content": None}], "messages.0.content", "required"),
        ([{"role": "user", "content": 5}], "messages.0.content", "string"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages.0.content", "only text"),
        (
            [{"role": "assistant", "content": "", "tool_calls": [{"id": "x"}]}],
            "messages.0.tool_calls.0.function",
            "required",
        ),
        (["hello"], "messages.0", "dictionary"),
    ],
)
async def test_messages_that_cannot_work_are_named(post, messages, param, says):
    answer = await post(PATH, messages=messages)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert says in answer.json()["error"]["message"]


async def test_a_template_that_refuses_is_the_clients_error(engine, client_of):
    client = client_of(engine, chat_template="{{ raise_exception('no system messages') }}")
    for stream in (False, True):
        answer = await client.post(PATH, json={"messages": MESSAGES, "stream": stream})
        assert answer.status_code == 400
        assert "no system messages" in answer.json()["error"]["message"]


async def test_template_variables_must_not_replace_the_messages(post):
    answer = await post(PATH, messages=MESSAGES, chat_template_kwargs={"messages": []})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "chat_template_kwargs"


async def test_templates_that_loop_for_long_time_out_and_hold_up_nothing_but_templates(
    engine, client_of, monkeypatch
):
    released = threading.Event()
    monkeypatch.setattr(engine.tokenizer, "apply_chat_template", lambda *_, **__: released.wait(20))
    monkeypatch.setattr(chat_prompt, "RENDER_SECONDS", 0.3)
    client = client_of(engine)
    try:
        chats = [asyncio.create_task(client.post(PATH, json={"messages": MESSAGES})) for _ in range(40)]
        await asyncio.sleep(0.05)
        completion = await client.post("/v1/completions", json={"prompt": "Hi", "max_tokens": 1})
        assert completion.status_code == 200
        assert not any(chat.done() for chat in chats)
        for answer in await asyncio.gather(*chats):
            assert answer.status_code == 400
            assert "the chat template took too long" in answer.json()["error"]["message"]
    finally:
        released.set()


def test_a_template_that_never_ends_does_not_keep_the_process_alive():
    script = (
        "import threading; from glm_dcp_jax.transfer.daemon_pool import DaemonPool; "
        "DaemonPool(1, 'x').submit(threading.Event().wait)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=20)
