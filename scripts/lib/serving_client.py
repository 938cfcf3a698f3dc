"""The client of a serving benchmark: streamed completions over HTTP, at most so many at a time, each of them timed."""

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import httpx
from lib.serving_metrics import Timing
from prometheus_client.parser import text_string_to_metric_families
from tqdm import tqdm

_LONGEST_REQUEST = 6 * 3600.0
_CONNECT_SECONDS = 30.0
_MOST_OF_AN_ERROR = 500
_OF_THE_SERVER_ALONE = {"model_name", "engine"}
"""Labels that are the same on all of a server's metrics."""


class RequestFailed(Exception):
    """An answer that is no completion; the message is the server's own where it gave one."""


@dataclass(frozen=True)
class Ask:
    """Where requests go, and what all of them ask for beside their prompts."""

    url: str
    model: str
    max_tokens: int
    temperature: float
    ignore_eos: bool

    def body(self, prompt: Sequence[int], max_tokens: int) -> dict[str, Any]:
        """The JSON of one request. return_token_ids: an event for each token, also where it completes no character."""
        return {
            "model": self.model,
            "prompt": list(prompt),
            "max_tokens": max_tokens,
            "temperature": self.temperature,
            "ignore_eos": self.ignore_eos,
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


def connect(base_url: str) -> httpx.AsyncClient:
    """A client with as many connections as it needs. It sends OPENAI_API_KEY along, as vLLM's benchmark does."""
    key = os.environ.get("OPENAI_API_KEY")
    return httpx.AsyncClient(
        base_url=base_url,
        headers={"Authorization": f"Bearer {key}"} if key else {},
        timeout=httpx.Timeout(_LONGEST_REQUEST, connect=_CONNECT_SECONDS),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
        trust_env=False,  # no proxy between the two
    )


async def run(
    client: httpx.AsyncClient,
    ask: Ask,
    prompts: Sequence[Sequence[int]],
    arrivals: Sequence[float],
    concurrency: int,
) -> tuple[list[Timing], float]:
    """Send all prompts, each at its time or when one of `concurrency` places is free; timings, and seconds in all."""
    places = asyncio.Semaphore(concurrency)
    began = time.perf_counter()
    name = f"concurrency {concurrency}"
    # disable=None: no bar in a file
    with tqdm(total=len(prompts), desc=name, unit="request", leave=False, disable=None) as bar:

        async def one(prompt: Sequence[int], arrival: float) -> Timing:
            await asyncio.sleep(began + arrival - time.perf_counter())
            async with places:
                timing = await complete(client, ask, prompt, ask.max_tokens)
            bar.update()
            return timing

        timings = await asyncio.gather(*map(one, prompts, arrivals))
    return timings, time.perf_counter() - began


async def complete(client: httpx.AsyncClient, ask: Ask, prompt: Sequence[int], max_tokens: int) -> Timing:
    """One request from its sending to its last event. What goes wrong with it is in the timing."""
    timing = Timing(len(prompt), sent=time.perf_counter())
    try:
        async with client.stream("POST", ask.url, json=ask.body(prompt, max_tokens)) as answer:
            if answer.status_code != 200:
                raise RequestFailed(f"{answer.status_code} {_message(await answer.aread())}")
            await _follow(answer, timing)
    except (RequestFailed, httpx.HTTPError) as error:
        timing.error = (
            f"{type(error).__name__}: {error}" if isinstance(error, httpx.HTTPError) else str(error)
        )
    return timing


async def _follow(answer: httpx.Response, timing: Timing) -> None:
    """Note the events of a stream as they come."""
    is_done = False
    async for data, at in _events(answer):
        if data == b"[DONE]":
            is_done = True
            continue
        event = json.loads(data)
        if "error" in event:
            raise RequestFailed(_message(data))
        if any(choice.get("token_ids", True) for choice in event["choices"]):
            timing.tokens_at.append(at)
        if event.get("usage"):
            timing.output_tokens = event["usage"]["completion_tokens"]
    if not is_done:
        raise RequestFailed("the stream ended before [DONE]")
    if not timing.tokens_at:
        raise RequestFailed("the stream brought no token")
    timing.output_tokens = timing.output_tokens or len(timing.tokens_at)


async def _events(answer: httpx.Response) -> AsyncIterator[tuple[bytes, float]]:
    """Data of a stream's events, and when they came: several that come at once have the same time."""
    rest = b""
    async for piece in answer.aiter_bytes():
        at = time.perf_counter()
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield line[len(b"data:") :].strip(), at


def _message(content: bytes) -> str:
    """What an error says: OpenAI's `error.message`, or else the whole of it."""
    with suppress(ValueError, KeyError, TypeError):
        return json.loads(content)["error"]["message"]
    return content.decode(errors="replace").strip()[:_MOST_OF_AN_ERROR]


async def model_card(client: httpx.AsyncClient) -> dict[str, Any]:
    """The server's first model, as /v1/models has it. Raises RequestFailed."""
    try:
        answer = await client.get("/v1/models")
    except httpx.HTTPError as error:
        raise RequestFailed(f"{client.base_url} does not answer ({type(error).__name__}: {error})") from None
    if answer.status_code != 200:
        raise RequestFailed(f"/v1/models: {answer.status_code} {_message(answer.content)}")
    with suppress(ValueError, KeyError, IndexError, TypeError):
        return answer.json()["data"][0]
    raise RequestFailed("/v1/models lists no model")


async def counters(client: httpx.AsyncClient) -> dict[str, float]:
    """The server's counters by name and own labels, from /metrics; none if it has no such page."""
    try:
        answer = await client.get("/metrics")
        families = list(text_string_to_metric_families(answer.text if answer.status_code == 200 else ""))
    except (httpx.HTTPError, ValueError):
        return {}
    found = {}
    for family in families:
        if family.type != "counter":
            continue
        for sample in family.samples:
            labels = [
                f"{name}={value}" for name, value in sample.labels.items() if name not in _OF_THE_SERVER_ALONE
            ]
            if sample.name.endswith("_total"):
                found[" ".join([sample.name, *labels])] = sample.value
    return found
