"""OpenAI's client: completions, chats, tools, structured outputs and responses, whole and streamed, sync and async."""

import asyncio
import json

import openai
import pydantic
import pytest

pytestmark = pytest.mark.slow
HELLO = [{"role": "user", "content": "Hello"}]
NO_THOUGHTS = {"chat_template_kwargs": {"enable_thinking": False}}
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "day": {"enum": ["today", "tomorrow"]},
                "hours": {"type": "array", "items": {"enum": [1, 2]}},
            },
            "required": ["day"],
        },
    },
}


@pytest.fixture(scope="module")
def client(url):
    return openai.OpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0)


def run_async(url, call):
    """One call of the asynchronous client."""

    async def run():
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="secret", max_retries=0) as client:
            return await call(client)

    return asyncio.run(run())


def test_completions_agree_in_every_way(url, client, model):
    given = {"model": model, "prompt": "Once upon", "max_tokens": 12, "temperature": 0}
    whole = client.completions.create(**given)
    streamed = "".join(chunk.choices[0].text for chunk in client.completions.create(stream=True, **given))

    async def call(other):
        answer = await other.completions.create(**given)
        pieces = [
            chunk.choices[0].text async for chunk in await other.completions.create(stream=True, **given)
        ]
        return answer.choices[0].text, "".join(pieces)

    assert {whole.choices[0].text, streamed, *run_async(url, call)} == {whole.choices[0].text}
    assert 0 < whole.usage.completion_tokens <= 12


def test_chats_agree_in_every_way(url, client, model):
    given = {"model": model, "messages": HELLO, "max_tokens": 20, "temperature": 0}
    whole = client.chat.completions.create(**given).choices[0]
    thought = whole.message.reasoning
    assert thought and whole.message.reasoning_content == thought

    async def call(other):
        pieces = [chunk async for chunk in await other.chat.completions.create(stream=True, **given)]
        return "".join(getattr(piece.choices[0].delta, "reasoning", None) or "" for piece in pieces)

    assert run_async(url, call) == thought


def test_a_call_that_must_be_made_and_its_stream(client, model):
    given = {
        "model": model,
        "messages": HELLO,
        "tools": [WEATHER],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "max_tokens": 400,
        "seed": 3,
        "extra_body": NO_THOUGHTS,
    }
    whole = client.chat.completions.create(**given).choices[0]
    assert whole.finish_reason == "tool_calls"
    [call] = whole.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "weather" and arguments["day"] in ("today", "tomorrow")
    with client.chat.completions.stream(**given) as stream:
        final = stream.get_final_completion().choices[0]
    assert json.loads(final.message.tool_calls[0].function.arguments) == arguments
    answered = [
        *HELLO,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "Sun"},
    ]
    goes_on = client.chat.completions.create(model=model, messages=answered, tools=[WEATHER], max_tokens=4)
    assert goes_on.choices[0].finish_reason == "length"


class Mark(pydantic.BaseModel):
    """What is parsed from an answer."""

    model_config = pydantic.ConfigDict(extra="forbid")
    passed: bool
    points: int


def test_an_answer_is_parsed_into_a_model(client, model):
    given = {"model": model, "messages": HELLO, "max_tokens": 2000, "extra_body": NO_THOUGHTS, "seed": 5}
    answer = client.chat.completions.parse(response_format=Mark, **given).choices[0].message
    assert isinstance(answer.parsed, Mark)


def test_a_response_and_its_stream_agree(client, model):
    given = {"model": model, "input": "Hello", "max_output_tokens": 20, "temperature": 0}
    whole = client.responses.create(**given)
    assert whole.status == "incomplete" and whole.incomplete_details.reason == "max_output_tokens"
    assert whole.usage.output_tokens == 20
    events = list(client.responses.create(stream=True, **given))
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))
    last = events[-1].response
    assert [item.type for item in last.output] == [item.type for item in whole.output]
    assert last.output_text == whole.output_text


def test_a_response_is_parsed_into_a_model(client, model):
    extra = NO_THOUGHTS | {"seed": 5}
    answer = client.responses.parse(
        model=model, input="Hello", text_format=Mark, max_output_tokens=2000, extra_body=extra
    )
    assert isinstance(answer.output_parsed, Mark)


def test_a_response_that_must_call(client, model):
    tool = {"type": "function", **WEATHER["function"], "strict": False}
    answer = client.responses.create(
        model=model,
        input="Weather?",
        tools=[tool],
        tool_choice="required",
        max_output_tokens=400,
        extra_body=NO_THOUGHTS,
    )
    calls = [item for item in answer.output if item.type == "function_call"]
    assert calls and all(json.loads(call.arguments)["day"] in ("today", "tomorrow") for call in calls)
    answered = [
        *answer.output,
        {"type": "function_call_output", "call_id": calls[0].call_id, "output": "Sun"},
    ]
    again = client.responses.create(
        model=model,
        input=[{"role": "user", "content": "Weather?"}, *answered],
        tools=[tool],
        max_output_tokens=4,
    )
    assert again.usage.output_tokens == 4


@pytest.mark.parametrize("call", ["chat", "responses"])
def test_what_is_wrong_is_an_error_of_the_client(client, model, call):
    with pytest.raises(openai.BadRequestError) as refused:
        if call == "chat":
            client.chat.completions.create(model=model, messages=HELLO, temperature=-1)
        else:
            client.responses.create(model=model, input="a", temperature=-1)
    assert refused.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="nobody", messages=HELLO)
