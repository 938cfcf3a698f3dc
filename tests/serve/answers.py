"""Reading what the server answers."""

import json

import httpx


def events(answer: httpx.Response) -> list[dict]:
    """The objects of a server-sent event stream, whose end must be marked."""
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    *lines, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(line.removeprefix("data: ")) for line in lines]
