"""Reading what /v1/responses answers, and holding it against the types of the openai package."""

import json
from typing import Any

import httpx
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter
from written import FIND, TIME

TOOLS = [{"type": "function", **tool["function"]} for tool in (FIND, TIME)]
_EVENT = TypeAdapter(ResponseStreamEvent)
_NAMES = ("id", "call_id", "created_at", "completed_at")


def response_of(answer: httpx.Response) -> dict:
    """The response object of an answer."""
    assert answer.status_code == 200, answer.text
    Response.model_validate(answer.json())
    return answer.json()


def events_of(answer: httpx.Response) -> list[dict]:
    """The events of a stream, which are named and numbered."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *blocks, rest = answer.text.split("\n\n")
    assert rest == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
        assert _EVENT.validate_python(events[-1]).type == events[-1]["type"]
    return events


def told(events: list[dict]) -> dict:
    """The response that a stream ends with, which must be what its events come to."""
    first, second, *between, last = events
    assert [first["type"], second["type"]] == ["response.created", "response.in_progress"]
    assert first["response"]["status"] == second["response"]["status"] == "in_progress"
    items: list[dict] = []
    open_item: dict | None = None
    for event in between:
        kind = event["type"].removeprefix("response.")
        assert event["output_index"] == len(items)
        if kind == "output_item.added":
            assert open_item is None and event["item"]["status"] == "in_progress"
            open_item = event["item"]
            continue
        assert open_item is not None
        if kind == "output_item.done":
            assert event["item"] == {**open_item, "status": event["item"]["status"]}
            items.append(event["item"])
            open_item = None
            continue
        assert event["item_id"] == open_item["id"]
        _apply(open_item, kind, event)
    assert open_item is None
    assert last["type"] == f"response.{last['response']['status']}"
    assert last["response"]["output"] == items
    return last["response"]


def _apply(item: dict, kind: str, event: dict) -> None:
    content = item.get("content")
    match kind:
        case "content_part.added":
            assert content == [] and event["content_index"] == 0
            content.append(event["part"])
        case "content_part.done":
            assert content == [event["part"]]
        case "output_text.delta":
            content[0]["text"] += event["delta"]
            content[0]["logprobs"] += event["logprobs"]
        case "output_text.done":
            assert (event["text"], event["logprobs"]) == (content[0]["text"], content[0]["logprobs"])
        case "reasoning_text.delta":
            content[0]["text"] += event["delta"]
        case "reasoning_text.done":
            assert event["text"] == content[0]["text"]
        case "function_call_arguments.delta":
            item["arguments"] += event["delta"]
        case "function_call_arguments.done":
            assert event["arguments"] == item["arguments"]
        case _:
            raise AssertionError(f"what is {kind}?")


def nameless(value: Any) -> Any:
    """The same without ids and times, which are new each time."""
    if isinstance(value, list):
        return [nameless(one) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: nameless(one) for name, one in value.items() if name not in _NAMES}


def said(response: dict) -> list[tuple]:
    """The items of a response in short: what they are, what they hold, their status."""
    short = {"reasoning": "thinks", "message": "says", "function_call": "calls"}
    items = []
    for item in response["output"]:
        if item["type"] == "function_call":
            what: Any = (item["name"], item["arguments"])
        else:
            what = "".join(part["text"] for part in item["content"])
        items.append((short[item["type"]], what, item["status"]))
    return items
