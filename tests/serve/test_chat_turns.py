"""/v1/chat/completions of a model that thinks and calls tools, whole and streamed."""

import json

import openai
import pytest
from answers import events
from live import live_server
from written import ARGUMENTS, CALL, FIND, HELLO, TIME, engine_that_says, written

FIND_IT = {"type": "function", "function": {"name": "find"}}


def gathered(chunks: list[dict], index: int = 0) -> dict:
    """What a stream's `delta`s of one choice come to, as a message, and its last finish_reason."""
    own = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    assert own[0]["delta"] == {"role": "assistant", "content": ""}
    message: dict = {"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []}
    for choice in own[1:]:
        for name, value in choice["delta"].items():
            if name != "tool_calls":
                message[name] += value
                continue
            [call] = value
            if call["index"] == len(message["tool_calls"]):
                assert call["id"].startswith("call_") and call["type"] == "function"
                assert call["function"]["arguments"] == ""
                message["tool_calls"].append(["", ""])
                message["tool_calls"][-1][0] = call["function"]["name"]
            else:
                assert set(call) == {"index", "function"} and set(call["function"]) == {"arguments"}
                message["tool_calls"][call["index"]][1] += call["function"]["arguments"]
    assert [choice["finish_reason"] for choice in own[:-1]] == [None] * (len(own) - 1)
    message["tool_calls"] = [(name, json.loads(text)) for name, text in message["tool_calls"]]
    return {**message, "finish_reason": own[-1]["finish_reason"]}


@pytest.mark.anyio
class TestWhole:
    async def test_reasoning_content_and_calls(self, ask):
        answer = (await ask(f"hm</think>So:{CALL}", tools=[FIND])).json()
        [choice] = answer["choices"]
        [call] = choice["message"].pop("tool_calls")
        assert choice["message"] == {
            "role": "assistant",
            "content": "So:",
            "reasoning": "hm",
            "reasoning_content": "hm",
        }
        assert call.pop("id").startswith("call_")
        assert json.loads(call["function"].pop("arguments")) == ARGUMENTS
        assert call == {"type": "function", "function": {"name": "find"}}
        assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None

    async def test_content_is_null_where_only_calls_are_made(self, ask):
        [choice] = (await ask(f"</think>\n{CALL}\n", tools=[FIND])).json()["choices"]
        assert choice["message"]["content"] is None and choice["message"]["reasoning"] is None

    async def test_calls_have_ids_of_their_own(self, ask):
        [choice] = (await ask(f"</think>{CALL}{CALL}", tools=[FIND])).json()["choices"]
        assert len({call["id"] for call in choice["message"]["tool_calls"]}) == 2

    async def test_each_choice_is_a_turn(self, ask):
        engine = engine_that_says("a</think>b", f"</think>{CALL}")
        first, second = (await ask(engine, tools=[FIND], n=2)).json()["choices"]
        assert (first["message"]["reasoning"], first["message"]["content"]) == ("a", "b")
        assert (first["finish_reason"], second["finish_reason"]) == ("stop", "tool_calls")

    async def test_a_call_that_is_cut_is_no_reason_to_call(self, ask):
        cut = CALL.partition("\n")[0]
        [choice] = (await ask(f"</think>{cut}", tools=[FIND])).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert json.loads(choice["message"]["tool_calls"][0]["function"]["arguments"]) == {"text": "a"}
        tokens = len(written(f"</think>{CALL}"))
        [choice] = (await ask(f"</think>{CALL}", tools=[FIND], max_tokens=tokens - 1)).json()["choices"]
        assert choice["finish_reason"] == "length"

    async def test_reasoning_alone_leaves_content_null(self, ask):
        [choice] = (await ask("hm")).json()["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, "hm")

    async def test_reasoning_can_be_left_out(self, ask):
        answer = (await ask("hm</think>So", include_reasoning=False)).json()
        assert answer["choices"][0]["message"]["reasoning"] is None
        assert answer["choices"][0]["message"]["content"] == "So"
        assert answer["usage"]["completion_tokens"] == len(written("hm</think>So")) + 1

    async def test_content_is_null_where_reasoning_alone_is_left_out(self, ask):
        [choice] = (await ask("hm", include_reasoning=False)).json()["choices"]
        assert (choice["message"]["content"], choice["message"]["reasoning"]) == (None, None)

    async def test_without_thinking_all_is_content(self, ask):
        for off in (
            {"chat_template_kwargs": {"enable_thinking": False}},
            {"reasoning_effort": "none"},
            {"thinking": {"type": "disabled"}},
        ):
            [choice] = (await ask("hm", **off)).json()["choices"]
            assert (choice["message"]["content"], choice["message"]["reasoning"]) == ("hm", None)

    @pytest.mark.parametrize(
        "none", [{}, {"tools": [FIND], "tool_choice": "none"}], ids=["no tools", "not to call"]
    )
    async def test_without_tools_calls_are_text(self, ask, none):
        [choice] = (await ask(f"</think>{CALL}", **none)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == (CALL, "stop")

    async def test_logprobs_and_token_ids_are_of_all_tokens(self, ask):
        body = {"tools": [FIND], "logprobs": True, "return_token_ids": True}
        [choice] = (await ask(f"hm</think>{CALL}", **body)).json()["choices"]
        assert (
            len(choice["logprobs"]["content"])
            == len(choice["token_ids"])
            == len(written(f"hm</think>{CALL}")) + 1
        )


@pytest.mark.anyio
class TestStream:
    @pytest.mark.parametrize("burst", [1, 2, 4, 8, 1000])
    async def test_it_is_the_whole_answer_in_pieces(self, ask, burst):
        engine = engine_that_says(f"hm</think>So:{CALL}<tool_call>time</tool_call>", burst=burst)
        body = {"tools": [FIND, TIME], "stream": True, "stream_options": {"include_usage": True}}
        *chunks, last = events(await ask(engine, **body))
        assert gathered(chunks) == {
            "content": "So:",
            "reasoning": "hm",
            "reasoning_content": "hm",
            "tool_calls": [("find", ARGUMENTS), ("time", {})],
            "finish_reason": "tool_calls",
        }
        assert last["usage"]["completion_tokens"] == len(engine.says[0]) + 1

    async def test_a_string_is_streamed_as_it_comes(self, ask):
        long = CALL.replace("a\n", "a" * 40)
        engine = engine_that_says(f"</think>{long}", burst=1)
        chunks = events(await ask(engine, tools=[FIND], stream=True))
        pieces = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
        assert sum("tool_calls" in piece for piece in pieces) > 40

    async def test_a_chunk_has_one_kind_of_text(self, ask):
        engine = engine_that_says(f"hm</think>So:{CALL}", burst=1000)
        chunks = events(await ask(engine, tools=[FIND], stream=True))
        kinds = [sorted(chunk["choices"][0]["delta"]) for chunk in chunks]
        assert kinds == [
            ["content", "role"],
            ["reasoning", "reasoning_content"],
            ["content"],
            ["tool_calls"],
            ["tool_calls"],
        ]

    async def test_reasoning_can_be_left_out(self, ask):
        chunks = events(await ask("hm</think>So", include_reasoning=False, stream=True))
        assert gathered(chunks)["content"] == "So" and gathered(chunks)["reasoning"] == ""
        assert len(chunks) < len(written("hm</think>So"))

    async def test_logprobs_are_of_all_tokens(self, ask):
        body = {"tools": [FIND], "logprobs": True, "return_token_ids": True}
        chunks = events(await ask(f"hm</think>{CALL}", **body, stream=True))
        scored = [c["choices"][0]["logprobs"] for c in chunks]
        ids = [id for c in chunks for id in c["choices"][0].get("token_ids", [])]
        count = len(written(f"hm</think>{CALL}")) + 1
        assert sum(len(some["content"]) for some in scored if some) == len(ids) == count

    async def test_without_a_parser_it_is_as_it_was(self, ask):
        says = f"hm</think>{CALL}"
        settings = {"reasoning_parser": "none", "tool_call_parser": "none"}
        chunks = events(await ask(says, settings.items(), stream=True))
        assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in chunks) == says
        [choice] = (await ask(says, settings.items())).json()["choices"]
        assert choice["message"] == {"role": "assistant", "content": says}


@pytest.mark.anyio
class TestOneCall:
    BODY = {"tools": [FIND], "parallel_tool_calls": False}
    TURN = f"</think>{CALL}and{CALL}" + "x" * 100

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_after_it_nothing_more_is_generated(self, ask, stream):
        engine = engine_that_says(self.TURN)
        options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
        answer = await ask(engine, **self.BODY, **options)
        if stream:
            *chunks, last = events(answer)
            turn, usage = gathered(chunks), last["usage"]
            assert (turn["tool_calls"], turn["content"]) == ([("find", ARGUMENTS)], "")
            reason = turn["finish_reason"]
        else:
            [choice], usage = answer.json()["choices"], answer.json()["usage"]
            assert len(choice["message"]["tool_calls"]) == 1 and choice["message"]["content"] is None
            reason = choice["finish_reason"]
        assert reason == "tool_calls" and len(engine.aborted) == 1
        first = len(written(f"</think>{CALL}"))
        assert first <= usage["completion_tokens"] == engine.generation_tokens < first + engine.burst

    @pytest.mark.parametrize(
        ("choice", "reason"), [("auto", "tool_calls"), (FIND_IT, "stop")], ids=["auto", "named"]
    )
    @pytest.mark.parametrize("burst", [1, 1000])
    async def test_its_reason_is_the_same_where_tokens_ran_out_at_once(self, ask, choice, reason, burst):
        engine = engine_that_says(self.TURN, burst=burst)
        limit = len(written(f"</think>{CALL}")) + 1
        [made] = (await ask(engine, **self.BODY, tool_choice=choice, max_tokens=limit)).json()["choices"]
        assert made["finish_reason"] == reason

    @pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
    async def test_other_choices_go_on(self, ask, stream):
        engine = engine_that_says(self.TURN, "</think>" + "y" * 90)
        answer = await ask(engine, **self.BODY, n=2, stream=stream, stop="xxx")
        if stream:
            first, second = (gathered(events(answer), index) for index in (0, 1))
        else:
            first, second = (
                {**choice["message"], "finish_reason": choice["finish_reason"]}
                for choice in answer.json()["choices"]
            )
            assert [choice["stop_reason"] for choice in answer.json()["choices"]] == [None, None]
        assert (len(first["tool_calls"]), first["finish_reason"]) == (1, "tool_calls")
        assert (second["content"], second["finish_reason"]) == ("y" * 90, "stop")

    async def test_a_turn_without_a_call_ends_by_itself(self, ask):
        [choice] = (await ask("</think>Hi", **self.BODY)).json()["choices"]
        assert (choice["message"]["content"], choice["finish_reason"]) == ("Hi", "stop")


def test_openais_client_gets_reasoning_and_calls():
    engine = engine_that_says(f"hm</think>So:{CALL}", burst=2)
    with (
        live_server(engine) as url,
        openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client,
    ):
        with client.chat.completions.stream(model="fake", messages=HELLO, tools=[FIND]) as stream:
            said = "".join(
                getattr(event.chunk.choices[0].delta, "reasoning", None) or ""
                for event in stream
                if event.type == "chunk"
            )
            message = stream.get_final_completion().choices[0].message
        made = client.chat.completions.create(model="fake", messages=HELLO, tools=[FIND])
    assert said == made.choices[0].message.reasoning == "hm"
    for answer in (message, made.choices[0].message):
        assert answer.content == "So:"
        [call] = answer.tool_calls
        assert (call.function.name, json.loads(call.function.arguments)) == ("find", ARGUMENTS)
    assert made.choices[0].finish_reason == "tool_calls"
