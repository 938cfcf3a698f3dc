"""Fields of /v1/responses: what they come to, and which are refused."""

import re

import pytest
from responding import TOOLS
from written import engine_that_says

from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
from glm_dcp_jax.serve.responses.input import input_item, messages_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}


def call(id: str) -> dict:
    return {"type": "function_call", "call_id": id, "name": "find", "arguments": "{}"}


def thought(text: str) -> dict:
    return {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}


def speech(text: str) -> dict:
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


def call_in_chat(id: str) -> dict:
    return {"id": id, "function": {"name": "find", "arguments": "{}"}}


class TestInput:
    def of(self, *items: dict) -> list[dict]:
        return messages_of([input_item(item) for item in items])

    def test_one_turn_is_one_message(self):
        assert self.of(thought("a"), speech("b"), call("1"), call("2"), thought("c"), speech("d")) == [
            {
                "role": "assistant",
                "reasoning": "ac",
                "content": "bd",
                "tool_calls": [call_in_chat("1"), call_in_chat("2")],
            }
        ]

    def test_turns_in_a_row_stay_apart(self):
        assert self.of(speech("a"), speech("b"), thought("c"), speech("d")) == [
            {"role": "assistant", "content": "a"},
            {"role": "assistant", "content": "b"},
            {"role": "assistant", "reasoning": "c", "content": "d"},
        ]

    def test_what_others_say_ends_a_turn(self):
        output = {"type": "function_call_output", "call_id": "1", "output": "3"}
        user = {"role": "user", "content": [{"type": "input_text", "text": "x"}]}
        assert self.of(call("1"), output, call("2"), user, call("3")) == [
            {"role": "assistant", "tool_calls": [call_in_chat("1")]},
            {"role": "tool", "tool_call_id": "1", "content": "3"},
            {"role": "assistant", "tool_calls": [call_in_chat("2")]},
            {"role": "user", "content": "x"},
            {"role": "assistant", "tool_calls": [call_in_chat("3")]},
        ]

    def test_a_summary_stands_for_reasoning_that_is_not_there(self):
        summary = [{"type": "summary_text", "text": "s"}]
        assert self.of({"type": "reasoning", "summary": summary, "id": "rs_1"}) == [
            {"role": "assistant", "reasoning": "s"}
        ]
        assert self.of({"type": "reasoning", "summary": []}) == []


@pytest.mark.anyio
class TestTaken:
    async def test_sampling(self, respond):
        engine = engine_that_says("Hi")
        sampling = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "min_p": 0.1, "seed": 7, "min_tokens": 1}
        answer = await respond(engine, **sampling, stop="x", max_output_tokens=9, cache_salt="s")
        assert answer.status_code == 200
        [params] = engine.params
        assert {name: getattr(params, name) for name in sampling} == sampling
        assert (list(params.stop_strings), params.max_tokens) == (["x"], 9)
        assert engine.ranks == [(0, "s")]

    @pytest.mark.parametrize(
        ("body", "wanted"),
        [
            ({"text": {"format": {"type": "text"}}}, None),
            ({"text": {"format": {"type": "json_object"}}}, StructuredOutputs(json_object=True)),
            ({"text": {"format": FORMAT}}, StructuredOutputs(json=SCHEMA)),
            ({"structured_outputs": {"regex": "a+"}}, StructuredOutputs(regex="a+")),
        ],
        ids=["text", "object", "schema", "vLLM's"],
    )
    async def test_forms_of_the_text(self, respond, body, wanted):
        engine = engine_that_says("Hi")
        answer = await respond(engine, **body, reasoning={"effort": "none"})
        assert answer.status_code == 200, answer.text
        assert engine.params[0].structured_outputs == wanted

    async def test_calls_that_must_be_made(self, respond):
        engine = engine_that_says("Hi")
        named = {"type": "function", "name": "find"}
        for choice in ("required", named):
            assert (await respond(engine, tools=TOOLS, tool_choice=choice)).status_code == 200
        both, one = (params.structured_outputs.grammar for params in engine.params)
        assert "time" in both and "time" not in one

    async def test_what_asks_for_nothing(self, respond):
        answer = await respond(
            "Hi",
            background=False,
            previous_response_id=None,
            reasoning={"summary": "auto"},
            include=["reasoning.encrypted_content"],
            stream_options={"include_obfuscation": False},
            service_tier="auto",
            logprobs=False,
            tools=[{**TOOLS[1], "description": None, "parameters": None, "strict": True}],
        )
        assert answer.status_code == 200, answer.text


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"input": []}, "input", "at least 1"),
        ({"input": 3}, "input", "a string or a list of items"),
        ({"input": [{"type": "reasoning"}]}, "input", ""),
        ({"input": ["x"]}, "input.0", "must be an object"),
        ({"input": [{"role": "user", "content": 3}]}, "input.0.content", "only|string"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input.0.content",
            "only text",
        ),
        (
            {"input": [{"role": "assistant", "content": "x", "reasoning": "y"}]},
            "input.0.reasoning",
            "supported",
        ),
        ({"input": [{"role": "user", "content": "x", "name": "Bob"}]}, "input.0.name", "supported"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "developer"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type", "not kept"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type", "not supported"),
        ({"input": [{"type": "function_call", "call_id": "1", "arguments": ""}]}, "input.0.name", "required"),
        ({"input": [thought("a") | {"encrypted_content": "x"}]}, "input.0.encrypted_content", "supported"),
        ({"text": {"format": {"type": "yaml"}}}, "text.format", "json_schema"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format.schema", "JSON schema"),
        ({"text": {"format": {"type": "json_schema", "schema": SCHEMA}}}, "text.format.name", "string"),
        ({"text": {"format": {**FORMAT, "strict": "yes"}}}, "text.format.strict", "true or false"),
        ({"tools": [{**TOOLS[0], "strict": "yes"}]}, "tools.0.strict", "true or false"),
        ({"add_generation_prompt": False}, "add_generation_prompt", "not supported"),
        ({"add_special_tokens": True}, "add_special_tokens", "not supported"),
        (
            {"text": {"format": FORMAT}, "structured_outputs": {"regex": "a"}},
            "structured_outputs",
            "text.format",
        ),
        (
            {"text": {"format": FORMAT}, "tools": TOOLS, "tool_choice": "required"},
            "text.format",
            "forces a call",
        ),
        ({"text": {"verbosity": "high"}}, "text.verbosity", "medium"),
        ({"max_output_tokens": 0}, "max_output_tokens", "max_output_tokens must be"),
        ({"max_output_tokens": 9999}, "max_output_tokens", "lower max_output_tokens"),
        ({"input": "x " * 9999}, "input", "shorten the (input|prompt)"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"top_logprobs": 2}, "top_logprobs", "include"),
        ({"top_logprobs": 99, "include": ["message.output_text.logprobs"]}, "top_logprobs", "from 0 to"),
        ({"include": ["everything"]}, "include.0", "logprobs"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "not supported"),
        ({"tools": [{"type": "function", "function": {"name": "a"}}]}, "tools.0.function", "beside type"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.name", "letters"),
        ({"tools": [{**TOOLS[0], "parameters": {"type": "string"}}]}, "tools.0.parameters", "schema"),
        ({"tools": [TOOLS[0], TOOLS[0]]}, "tools.1.name", "twice"),
        ({"tool_choice": "required"}, "tool_choice", "no tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "find"}}}, "tool_choice", '"name"'),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "x"}}, "tool_choice", "not among"),
        ({"reasoning": {"effort": "much"}}, "reasoning.effort", "high"),
        ({"reasoning": {"summary": "detailed"}}, "reasoning.summary", "auto"),
        ({"metadata": {"a": 1}}, "metadata.a", "string"),
        ({"tools": [{**TOOLS[0], "x": 10**30}]}, "tools", "64-bit"),
        ({"truncation": "auto"}, "truncation", "disabled"),
        ({"service_tier": "flex"}, "service_tier", "default"),
        ({"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", "must not hold"),
        ({"background": True}, "background", "not supported"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not supported"),
        ({"conversation": "c"}, "conversation", "not supported"),
        ({"prompt": {"id": "p"}}, "prompt", "not supported"),
        ({"n": 2}, "n", "not supported"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params", "dictionary"),
        ({"messages": [1]}, "messages", "here it is input"),
        ({"max_tokens": 3}, "max_tokens", "here it is max_output_tokens"),
        ({"response_format": {"type": "json_object"}}, "response_format", "text.format"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_refused_is_named(respond, body, param, says):
    answer = await respond("Hi", **body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert re.search(says, error["message"]), error["message"]


@pytest.mark.anyio
async def test_what_no_answer_can_hold_is_refused(client):
    body = '{"input": "Hi", "metadata": {"a": "\\ud800"}}'
    answer = await client.post("/v1/responses", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "metadata")
