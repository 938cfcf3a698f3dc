"""/v1/responses as the openai package asks for responses."""

import asyncio
import json

import openai
import pytest
from live import live_server, wait_until
from pydantic import BaseModel
from responding import TOOLS
from written import ARGUMENTS, CALL, engine_that_says, written


class City(BaseModel):
    """What the text is parsed as."""

    name: str
    people: int


@pytest.fixture
def engine():
    return engine_that_says(f"hm</think>So:{CALL}", burst=2)


@pytest.fixture
def url(engine):
    with live_server(engine) as url:
        yield f"{url}/v1"


@pytest.fixture
def openai_client(url):
    with openai.OpenAI(base_url=url, api_key="x", max_retries=0) as client:
        yield client


def test_a_tool_is_called_and_its_output_answered(openai_client, engine):
    items = [{"role": "user", "content": "How many cats?"}]
    response = openai_client.responses.create(model="fake", input=items, tools=TOOLS)
    thought, message, call = response.output
    assert thought.content[0].text == "hm" and message.content[0].text == response.output_text == "So:"
    assert (call.name, json.loads(call.arguments)) == ("find", ARGUMENTS)
    items += [*response.output, {"type": "function_call_output", "call_id": call.call_id, "output": "3"}]
    engine.says = [written("</think>Three.")]
    response = openai_client.responses.create(model="fake", input=items, tools=TOOLS)
    assert (response.status, response.output_text) == ("completed", "Three.")


def test_events_and_the_final_response(openai_client):
    with openai_client.responses.stream(model="fake", input="Hi", tools=TOOLS) as stream:
        events = list(stream)
        response = stream.get_final_response()
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == "So:"
    arguments = [event for event in events if event.type == "response.function_call_arguments.delta"]
    assert json.loads(arguments[-1].snapshot) == ARGUMENTS
    assert response.output_text == "So:" and response.usage.output_tokens_details.reasoning_tokens == 3
    assert [item.type for item in response.output] == ["reasoning", "message", "function_call"]


def test_a_text_is_parsed(openai_client, engine):
    engine.says = [written('hm</think>{"name": "Bonn", "people": 3}')]
    response = openai_client.responses.parse(model="fake", input="Which?", text_format=City)
    assert response.output_parsed == City(name="Bonn", people=3)
    assert engine.params[0].structured_outputs.json == response.text.format.to_dict()["schema"]
    with openai_client.responses.stream(model="fake", input="Which?", text_format=City) as stream:
        assert stream.get_final_response().output_parsed == City(name="Bonn", people=3)


def test_asynchronously_and_by_raw_events(url):
    async def run() -> list[str]:
        async with openai.AsyncOpenAI(base_url=url, api_key="x", max_retries=0) as client:
            stream = await client.responses.create(model="fake", input="Hi", tools=TOOLS, stream=True)
            types = [event.type async for event in stream]
            made = await client.responses.create(
                model="fake", input="Hi", tools=TOOLS, extra_body={"top_k": 3}
            )
            assert made.output_text == "So:"
            return types

    types = asyncio.run(run())
    assert types[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert types[-1] == "response.completed"


def test_errors_arrive_as_the_clients_own(openai_client):
    with pytest.raises(openai.BadRequestError, match="max_output_tokens must be"):
        openai_client.responses.create(model="fake", input="Hi", max_output_tokens=0)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        openai_client.responses.create(model="other", input="Hi", stream=True)
    for past in (
        openai_client.responses.retrieve,
        openai_client.responses.delete,
        openai_client.responses.cancel,
    ):
        with pytest.raises(openai.NotFoundError, match="keeps none"):
            past("resp_1")


def test_a_client_that_leaves_takes_its_request_with_it(openai_client, engine):
    engine.delay = 0.01
    engine.says = [written("x" * 500)]
    with openai_client.responses.create(model="fake", input="Hi", stream=True) as stream:
        assert next(iter(stream)).type == "response.created"
    wait_until(lambda: not engine.running)
    assert len(engine.aborted) == 1


def test_a_client_that_does_not_wait_takes_its_request_with_it(openai_client, engine):
    engine.delay = 0.01
    engine.says = [written("x" * 500)]
    with pytest.raises(openai.APITimeoutError):
        openai_client.with_options(timeout=0.1).responses.create(model="fake", input="Hi")
    wait_until(lambda: not engine.running)
    assert len(engine.aborted) == 1
