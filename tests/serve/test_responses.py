"""/v1/responses of a model that thinks and calls tools, whole and streamed."""

import asyncio
import json
import time

import httpx
import pytest
from responding import TOOLS, events_of, nameless, response_of, said, told
from written import ARGUMENTS, CALL, FIND, HELLO, engine_that_says, glm_tokenizer, spelled, written

from glm_dcp_jax.serve.app import create_app
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.settings import ServerSettings

LOGPROBS = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
JSON_ARGUMENTS = json.dumps(ARGUMENTS)
TURNS = {
    "all": f"hm</think>So:{CALL}\n<tool_call>time</tool_call>then<think>x",
    "thoughts between": f"a</think>\n{CALL}<think>b</think>{CALL}",
    "no name": "a<tool_call>no name! </think>b",
    "nothing": "",
    "blanks": "</think>\n ",
    "thoughts alone": "hm 猫",
    "a call without an end": f"hm{CALL.removesuffix('</tool_call>')}",
    "a call that is cut": f"</think>So{CALL.partition('3')[0]}",
}


def score_text(item: dict) -> str:
    """What the tokens of a message say by their logprobs."""
    [part] = item["content"]
    return bytes(byte for one in part["logprobs"] for byte in one["bytes"]).decode()


@pytest.mark.anyio
class TestWhole:
    async def test_items_come_in_the_order_they_were_written(self, respond):
        response = response_of(await respond(f"hm</think>So:{CALL}then", tools=TOOLS))
        assert said(response) == [
            ("thinks", "hm", "completed"),
            ("says", "So:", "completed"),
            ("calls", ("find", JSON_ARGUMENTS), "completed"),
            ("says", "then", "completed"),
        ]
        assert (response["status"], response["error"], response["incomplete_details"]) == (
            "completed",
            None,
            None,
        )
        ids = [item["id"].partition("_")[0] for item in response["output"]]
        assert ids == ["rs", "msg", "fc", "msg"] and response["id"].startswith("resp_")
        assert response["output"][2]["call_id"].startswith("call_")

    async def test_usage_counts_reasoning_with_its_end(self, respond):
        turn = f"hm</think>So:{CALL}"
        engine = engine_that_says(turn)
        engine.cached_tokens = 5
        usage = response_of(await respond(engine, tools=TOOLS))["usage"]
        assert usage["output_tokens"] == len(written(turn)) + 1
        assert usage["output_tokens_details"] == {"reasoning_tokens": len(written("hm</think>"))}
        assert usage["input_tokens_details"]["cached_tokens"] == 5
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]

    @pytest.mark.parametrize(
        ("tokens", "items"),
        [
            (1, [("thinks", "h", "incomplete")]),
            (4, [("thinks", "hm", "completed"), ("says", "S", "incomplete")]),
            (
                len(written(f"hm</think>{CALL}")) - 1,
                [("thinks", "hm", "completed"), ("calls", ("find", JSON_ARGUMENTS), "incomplete")],
            ),
            (
                len(written(f"hm</think>{CALL}")),
                [("thinks", "hm", "completed"), ("calls", ("find", JSON_ARGUMENTS), "completed")],
            ),
        ],
        ids=["in reasoning", "in a message", "in a call", "behind a call"],
    )
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_max_output_tokens_leaves_it_incomplete(self, respond, tokens, items, stream):
        turn = f"hm</think>{'So' if tokens == 4 else CALL}"
        answer = await respond(turn, tools=TOOLS, max_output_tokens=tokens, stream=stream)
        response = told(events_of(answer)) if stream else response_of(answer)
        assert said(response) == items
        assert response["status"] == "incomplete" and response["completed_at"] is None
        assert response["incomplete_details"] == {"reason": "max_output_tokens"}
        assert response["max_output_tokens"] == response["usage"]["output_tokens"] == tokens

    async def test_a_call_that_the_model_cut_is_incomplete(self, respond):
        response = response_of(await respond(TURNS["a call that is cut"], tools=TOOLS))
        assert [item["status"] for item in response["output"]] == ["completed", "incomplete"]
        assert response["status"] == "completed"

    async def test_it_says_what_was_asked_for(self, respond):
        asked = {
            "instructions": "Be kind.",
            "max_output_tokens": 50,
            "metadata": {"a": "b"},
            "parallel_tool_calls": False,
            "temperature": 0.5,
            "top_p": 0.25,
            "tools": TOOLS,
            "tool_choice": {"type": "function", "name": "find"},
            "user": "u",
            "prompt_cache_key": "k",
        }
        response = response_of(await respond("</think>Hi", **asked, reasoning={"effort": "high"}, store=True))
        assert {name: response[name] for name in asked} == asked
        assert response["reasoning"] == {"effort": "high", "summary": None}
        assert (response["store"], response["truncation"]) == (False, "disabled")

    async def test_reasoning_can_be_turned_off_and_left_out(self, respond):
        assert said(response_of(await respond("hm", reasoning={"effort": "none"}))) == [
            ("says", "hm", "completed")
        ]
        response = response_of(await respond("hm</think>So", include_reasoning=False))
        assert said(response) == [("says", "So", "completed")]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 3

    async def test_without_a_parser_all_is_a_message(self, respond):
        settings = {"reasoning_parser": "none", "tool_call_parser": "none"}.items()
        says = f"hm</think>{CALL}"
        response = response_of(await respond(says, settings, **LOGPROBS))
        assert said(response) == [("says", says, "completed")]
        assert score_text(response["output"][0]) == says + "<|endoftext|>"

    async def test_tags_that_are_no_tokens_are_found_but_have_no_logprobs(self, respond, monkeypatch):
        engine = engine_that_says()
        engine.says = [spelled("hm</think>So")]
        monkeypatch.setattr(engine.tokenizer, "token_id", lambda text: None)
        settings = {"reasoning_parser": "glm45"}.items()
        response = response_of(await respond(engine, settings))
        assert said(response) == [("thinks", "hm", "completed"), ("says", "So", "completed")]
        assert response["usage"]["output_tokens_details"]["reasoning_tokens"] == 2
        answer = await respond(engine, settings, **LOGPROBS)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "include")

    async def test_a_tag_that_a_user_wrote_begins_no_turn(self, respond, monkeypatch):
        engine = engine_that_says()
        engine.says = [spelled("Hi")]
        monkeypatch.setattr(engine.tokenizer, "token_id", lambda text: None)
        template = "<|user|>{{ messages[0].content }}<|assistant|>"
        settings = {"reasoning_parser": "glm45", "chat_template": template}.items()
        response = response_of(await respond(engine, settings, input="what is <think>"))
        assert said(response) == [("says", "Hi", "completed")]
        settings = {"reasoning_parser": "glm45", "chat_template": template + "<think>"}.items()
        assert said(response_of(await respond(engine, settings))) == [("thinks", "Hi", "completed")]


@pytest.mark.anyio
class TestStream:
    @pytest.mark.parametrize("stop", ["m</think>", "</tool_call>", "o:<tool_call>fi", "then"])
    @pytest.mark.parametrize("burst", [1, 3, 1000])
    async def test_stop_strings_see_all_of_it(self, respond, stop, burst):
        body = {"tools": TOOLS, "stop": stop, **LOGPROBS}
        whole = response_of(await respond(engine_that_says(TURNS["all"], burst=5), **body))
        engine = engine_that_says(TURNS["all"], burst=burst)
        assert nameless(told(events_of(await respond(engine, **body, stream=True)))) == nameless(whole)
        thought = len(written("hm</think>"))
        assert whole["usage"]["output_tokens_details"]["reasoning_tokens"] == thought

    @pytest.mark.parametrize("burst", [1, 2, 4, 8, 1000])
    @pytest.mark.parametrize("turn", TURNS.values(), ids=TURNS)
    async def test_it_is_the_whole_response_in_pieces(self, respond, turn, burst):
        body = {"tools": TOOLS, **LOGPROBS}
        whole = response_of(await respond(engine_that_says(turn, burst=5), **body))
        streamed = told(events_of(await respond(engine_that_says(turn, burst=burst), **body, stream=True)))
        assert nameless(streamed) == nameless(whole)

    async def test_logprobs_are_of_each_messages_own_tokens(self, respond):
        body = {"tools": TOOLS, **LOGPROBS, "stream": True}
        turn = f"hm</think>So 猫<tool_call>! :{CALL}\n{CALL}then"
        response = told(events_of(await respond(engine_that_says(turn, burst=1), **body)))
        messages = [item for item in response["output"] if item["type"] == "message"]
        assert [item["content"][0]["text"] for item in messages] == ["So 猫<tool_call>! :", "then"]
        assert [score_text(item) for item in messages] == [
            "So 猫<tool_call>! :",
            "then<|endoftext|>",
        ]
        [first, *_] = messages[0]["content"][0]["logprobs"]
        assert len(first["top_logprobs"]) == 1

    async def test_a_string_is_streamed_as_it_comes(self, respond):
        long = CALL.replace("a\n", "a" * 40)
        events = events_of(
            await respond(engine_that_says(f"</think>{long}", burst=1), tools=TOOLS, stream=True)
        )
        assert sum(event["type"] == "response.function_call_arguments.delta" for event in events) > 40

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_after_one_call_nothing_more_is_generated(self, respond, stream):
        engine = engine_that_says(f"</think>{CALL}and{CALL}" + "x" * 100)
        answer = await respond(engine, tools=TOOLS, parallel_tool_calls=False, stream=stream)
        response = told(events_of(answer)) if stream else response_of(answer)
        assert said(response) == [("calls", ("find", JSON_ARGUMENTS), "completed")]
        assert response["status"] == "completed" and len(engine.aborted) == 1

    @pytest.mark.parametrize("choice", ["auto", {"type": "function", "name": "find"}], ids=["auto", "named"])
    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_after_one_call_it_is_complete_also_where_tokens_ran_out(self, respond, choice, stream):
        engine = engine_that_says(f"</think>{CALL}and more", burst=1000)
        body = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "stream": stream}
        answer = await respond(engine, **body, max_output_tokens=len(written(f"</think>{CALL}an")))
        response = told(events_of(answer)) if stream else response_of(answer)
        assert said(response) == [("calls", ("find", JSON_ARGUMENTS), "completed")]
        assert response["status"] == "completed"

    async def test_a_failure_behind_a_sign_of_life_is_told_from_the_beginning(self, respond):
        engine = engine_that_says("Hi")
        engine.delay, engine.fails_after = 0.05, 0
        answer = await respond(engine, {"sse_keep_alive_interval": 0.01}.items(), stream=True)
        events = answer.text.replace(": keep-alive\n\n", "")
        assert events != answer.text
        response = told(events_of(httpx.Response(200, headers=answer.headers, text=events)))
        assert (response["status"], response["output"]) == ("failed", [])

    async def test_a_prompt_that_cannot_be_made_behind_a_sign_of_life_is_an_error_event(
        self, respond, monkeypatch
    ):
        def slow(*arguments):
            time.sleep(0.05)
            raise ApiError("too long", param="input")

        monkeypatch.setattr("glm_dcp_jax.serve.chat_prompt.encode_within", slow)
        answer = await respond("Hi", {"sse_keep_alive_interval": 0.01}.items(), stream=True)
        events = answer.text.replace(": keep-alive\n\n", "")
        assert events != answer.text
        [event] = events_of(httpx.Response(200, headers=answer.headers, text=events))
        assert event == {
            "type": "error",
            "code": "BadRequestError",
            "message": "too long",
            "param": "input",
            "sequence_number": 0,
        }

    async def test_a_failure_on_the_way_fails_the_response(self, respond):
        engine = engine_that_says("hm</think>Some", burst=1)
        engine.fails_after = 5
        response = told(events_of(await respond(engine, stream=True)))
        assert said(response) == [("thinks", "hm", "completed"), ("says", "So", "incomplete")]
        assert response["status"] == "failed" and response["error"]["code"] == "server_error"
        assert "secret" not in response["error"]["message"] and response["usage"] is None

    async def test_a_stopping_server_fails_the_response(self):
        engine = engine_that_says("</think>" + "x" * 500, burst=1)
        engine.delay = 0.005
        app = create_app(engine, ServerSettings(served_model_names=("fake",)))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            answer = asyncio.ensure_future(client.post("/v1/responses", json={"input": "Hi", "stream": True}))
            while engine.generation_tokens < 5:
                await asyncio.sleep(0.005)
            app.state.context.stopping.set()
            response = told(events_of(await answer))
        assert response["error"]["message"] == "the server is shutting down" and len(engine.aborted) == 1
        [(kind, text, status)] = said(response)
        assert (kind, status) == ("says", "incomplete") and set(text) == {"x"}

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_a_failure_at_the_start_is_an_ordinary_error(self, respond, stream):
        engine = engine_that_says("Hi")
        engine.fails_after = 0
        answer = await respond(engine, stream=stream)
        assert answer.status_code == 500 and answer.json()["error"]["type"] == "InternalServerError"


@pytest.mark.anyio
async def test_what_was_answered_can_be_sent_back_and_means_what_it_means_to_chats(client_of):
    client = client_of(engine_that_says(f"hm</think>So:{CALL}{CALL}"))
    output = response_of(await client.post("/v1/responses", json={"input": "Hi", "tools": TOOLS}))["output"]
    chat = (await client.post("/v1/chat/completions", json={"messages": HELLO, "tools": [FIND]})).json()
    message = chat["choices"][0]["message"]
    items = [{"role": "user", "content": "Hi"}, *output]
    messages = [*HELLO, message]
    for call in output[2:]:
        result = [{"type": "input_text", "text": "3 cats"}]
        items.append({"type": "function_call_output", "call_id": call["call_id"], "output": result})
        messages.append({"role": "tool", "tool_call_id": call["call_id"], "content": "3 cats"})
    here = await client.post(
        "/v1/responses", json={"input": items, "tools": TOOLS[:1], "instructions": "Look."}
    )
    said_there = {"messages": [{"role": "system", "content": "Look."}, *messages], "tools": [FIND]}
    there = (await client.post("/v1/chat/completions", json=said_there)).json()
    assert response_of(here)["usage"]["input_tokens"] == there["usage"]["prompt_tokens"]


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("answered", "shown"),
    [("ab", "ab"), ("ba", "ab"), ("bx", "bx"), ("b", "b")],
    ids=["in order", "the other way round", "to an unknown call", "one alone"],
)
async def test_results_stand_in_the_order_of_their_calls(client_of, monkeypatch, answered, shown):
    calls = [{"call_id": id, "name": "find", "arguments": "{}"} for id in "ab"]
    seen = []
    render = glm_tokenizer().apply_chat_template
    monkeypatch.setattr(
        glm_tokenizer(),
        "apply_chat_template",
        lambda messages, *rest, **more: seen.append(messages) or render(messages, *rest, **more),
    )
    client = client_of(engine_that_says("Hi"))
    results = [{"type": "function_call_output", "call_id": id, "output": id} for id in answered]
    items = [
        {"role": "user", "content": "Hi"},
        *({"type": "function_call", **call} for call in calls),
        *results,
    ]
    response_of(await client.post("/v1/responses", json={"input": items}))
    made = [{"id": id, "function": {"name": "find", "arguments": "{}"}} for id in "ab"]
    said_there = [{"role": "tool", "tool_call_id": id, "content": id} for id in answered]
    messages = [*HELLO, {"role": "assistant", "tool_calls": made}, *said_there]
    assert (await client.post("/v1/chat/completions", json={"messages": messages})).status_code == 200
    for prompt in seen:
        assert [message["content"] for message in prompt if message["role"] == "tool"] == list(shown)
    assert len(seen) == 2


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("method", "path"), [("GET", ""), ("DELETE", ""), ("POST", "/cancel"), ("GET", "/input_items")]
)
async def test_past_responses_are_not_kept(client, method, path):
    answer = await client.request(method, f"/v1/responses/resp_1{path}")
    error = answer.json()["error"]
    assert (answer.status_code, error["type"]) == (404, "NotFoundError")
    assert "resp_1: this server keeps none" in error["message"]
