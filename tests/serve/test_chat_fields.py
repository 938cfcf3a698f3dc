"""What a chat request may hold, how it reaches the template, and what is refused."""

import json
import logging

import pytest
from fake_engine import FakeEngine
from written import CALL, FIND, HELLO, TIME, engine_that_says, glm_tokenizer

from glm_dcp_jax.serve.conversation import MOST_TOOL_BYTES


@pytest.mark.anyio
class TestPrompt:
    async def prompt(self, client_of, messages=HELLO, settings=(), **body) -> str:
        client = client_of(engine_that_says(""), **dict(settings))
        answer = await client.post("/tokenize", json={"messages": messages, **body})
        assert answer.status_code == 200, answer.text
        return glm_tokenizer().decode(answer.json()["tokens"], skip_special_tokens=False)

    async def test_the_template_sees_tools_calls_and_results(self, client_of):
        call = {
            "id": "call_1",
            "type": "function",
            "function": {"name": "find", "arguments": '{"text": "é"}'},
        }
        turns = [
            *HELLO,
            {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "found"}]},
        ]
        prompt = await self.prompt(client_of, turns, tools=[FIND])
        assert json.dumps(FIND) in prompt
        assert json.dumps(FIND) not in await self.prompt(client_of, turns, tools=[FIND], tool_choice="none")
        assert prompt.endswith(
            "<|user|>Hi<|assistant|><think>hm</think>"
            "<tool_call>find<arg_key>text</arg_key><arg_value>é</arg_value></tool_call>"
            "<|observation|><tool_response>found</tool_response><|assistant|><think>"
        )

    async def test_an_answer_can_be_sent_back_as_it_came(self, client_of, ask):
        [choice] = (await ask(f"hm</think>So:{CALL}", tools=[FIND])).json()["choices"]
        prompt = await self.prompt(client_of, [*HELLO, choice["message"]], tools=[FIND])
        assert f"<think>hm</think>So:{CALL}" in prompt

    async def test_arguments_may_be_objects_or_nothing(self, client_of):
        for arguments in ("", "{}", {}):
            call = {"function": {"name": "time", "arguments": arguments}}
            turns = [*HELLO, {"role": "assistant", "tool_calls": [call]}]
            assert "<tool_call>time</tool_call>" in await self.prompt(client_of, turns)

    @pytest.mark.parametrize(
        ("effort", "shown"),
        [
            (None, "Max"),
            ("low", "High"),
            ("medium", "High"),
            ("high", "High"),
            ("xhigh", "Max"),
            ("max", "Max"),
        ],
    )
    async def test_an_effort_is_one_that_the_template_knows(self, client_of, effort, shown):
        assert f"Reasoning Effort: {shown}" in await self.prompt(client_of, reasoning_effort=effort)

    async def test_no_effort_is_no_thinking(self, client_of):
        for effort in ("none", "minimal"):
            assert (await self.prompt(client_of, reasoning_effort=effort)).endswith("<think></think>")
        thinking = {"chat_template_kwargs": {"enable_thinking": True}, "reasoning_effort": "none"}
        assert (await self.prompt(client_of, **thinking)).endswith("<|assistant|><think>")

    async def test_efforts_that_a_template_tells_apart_stay_what_they_are(self, client_of):
        template = {"chat_template": "{{ 'a' if reasoning_effort == 'low' else reasoning_effort }}"}
        assert await self.prompt(client_of, settings=template.items(), reasoning_effort="low") == "a"
        assert await self.prompt(client_of, settings=template.items(), reasoning_effort="high") == "high"


def tool(**fields) -> dict:
    return {"tools": [{"type": "function", "function": {"name": "f", **fields}}]}


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("fields", "param", "says"),
    [
        ({"tools": {}}, "tools", "list"),
        ({"tools": [5]}, "tools.0.type", '"function"'),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", '"function"'),
        ({"tools": [FIND, {"type": "function"}]}, "tools.1.function", "object"),
        (tool(name="no spaces"), "tools.0.function.name", "1 to 128 letters"),
        (tool(name="n" * 129), "tools.0.function.name", "1 to 128 letters"),
        (tool(name=None), "tools.0.function.name", "1 to 128 letters"),
        (tool(description=5), "tools.0.function.description", "string"),
        (tool(parameters=[]), "tools.0.function.parameters", "JSON schema of an object"),
        (tool(parameters={"type": "string"}), "tools.0.function.parameters", "JSON schema of an object"),
        (tool(parameters={"properties": []}), "tools.0.function.parameters.properties", "maps names"),
        (
            tool(parameters={"properties": {"a": "string"}}),
            "tools.0.function.parameters.properties",
            "maps names",
        ),
        ({"tools": [FIND, TIME, FIND]}, "tools.2.function.name", "find is there twice"),
        ({"tools": [TIME] * 129}, "tools", "at most 128"),
        (tool(description="x" * MOST_TOOL_BYTES), "tools", f"at most {MOST_TOOL_BYTES} bytes"),
        ({"tool_choice": "required"}, "tool_choice", "but there are no tools"),
        ({"tool_choice": "always", "tools": [FIND]}, "tool_choice", "must be none, auto, required or"),
        ({"tool_choice": {"type": "function"}, "tools": [FIND]}, "tool_choice", "must be none, auto"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": [FIND]},
            "tool_choice",
            "not among tools",
        ),
        (
            {"tool_choice": "required", "tools": [FIND], "response_format": {"type": "json_object"}},
            "response_format",
            "cannot be given with a tool_choice that forces",
        ),
        ({"tools": [FIND], "guided_regex": "a"}, "guided_regex", "only JSON can be asked for beside tools"),
        ({"parallel_tool_calls": "perhaps"}, "parallel_tool_calls", "boolean"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "'minimal'"),
        ({"messages": [{"role": "tool"}]}, "messages.0.content", "required"),
        ({"messages": [{"role": "assistant"}]}, "messages.0.content", "required"),
        (
            {"messages": [{"role": "user", "content": "a", "tool_call_id": "x"}]},
            "messages.0.tool_call_id",
            "role tool",
        ),
        (
            {"messages": [{"role": "user", "content": "a", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages.0.tool_calls",
            "assistants",
        ),
        (
            {
                "messages": [
                    {
                        "role": "assistant",
                        "content": "a",
                        "tool_calls": [{"function": {"name": "f", "arguments": 5}}],
                    }
                ]
            },
            "messages.0.tool_calls.0.function.arguments",
            "JSON object",
        ),
        (
            {"messages": [{"role": "assistant", "content": "", "reasoning": "a", "reasoning_content": "b"}]},
            "messages.0.reasoning",
            "differs from reasoning_content",
        ),
        (
            {
                "messages": [
                    {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[1"}}]}
                ]
            },
            "messages",
            "must be an object",
        ),
    ],
)
async def test_what_cannot_work_is_named(ask, fields, param, says):
    answer = await ask("Hi", **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["param"] == param and says in error["message"]


@pytest.mark.anyio
class TestServer:
    async def test_tools_need_a_parser(self, ask):
        answer = await ask("Hi", {"tool_call_parser": "none"}.items(), tools=[FIND])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"
        assert "--tool-call-parser" in answer.json()["error"]["message"]

    async def test_tools_need_a_template_that_shows_them(self, ask):
        answer = await ask("Hi", {"chat_template": "{{ messages[0].content }}"}.items(), tools=[FIND])
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "tools"

    async def test_it_says_at_its_start_what_it_reads(self, client_of, caplog):
        with caplog.at_level(logging.INFO, "glm_dcp_jax"):
            client_of(engine_that_says(""))
            client_of(FakeEngine(), tool_call_parser="glm45")
        said = [record.message for record in caplog.records]
        assert said[:2] == ["reasoning parser: glm47 (auto)", "tool call parser: glm47 (auto)"]
        assert said[2:4] == ["reasoning parser: glm47 (auto)", "tool call parser: glm45"]
        assert "the tokenizer has no <tool_call>" in said[4]

    async def test_a_model_that_has_no_tags_gets_a_parser_on_request(self, client_of):
        engine = FakeEngine()  # says its prompt, of which <tool_call> is no token
        template = "{{ '' if tools else '' }}{{ messages[0].content }}"
        client = client_of(engine, chat_template=template, tool_call_parser="glm47")
        messages = [{"role": "user", "content": "<tool_call>time</tool_call>"}]
        body = {"messages": messages, "tools": [TIME], "parallel_tool_calls": False}
        [choice] = (await client.post("/v1/chat/completions", json=body)).json()["choices"]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "time", "arguments": "{}"}
