"""Asking tasks over HTTP, greedily, a few at a time; and whether a router's answers came by hand-overs."""

import asyncio
from collections.abc import Sequence

import httpx
from lib.serving_client import RequestFailed, connect, counters, model_card
from lib.sweep_tasks import Answers, Task
from tqdm import tqdm

_ALONE = ("glm_dcp_router:fallbacks_total", "glm_dcp_router:prefill_skips_total")


async def ask_all(url: str, tasks: Sequence[Task], concurrency: int, name: str) -> Answers:
    """All tasks' texts, with a progress bar. Raises RequestFailed if the server lists no model."""
    places = asyncio.Semaphore(concurrency)
    errors: list[str] = []
    async with connect(url) as client:
        model = (await model_card(client))["id"]
        # disable=None: no bar in a file
        with tqdm(total=len(tasks), desc=name, unit="task", leave=False, disable=None) as bar:

            async def one(task: Task) -> str | None:
                async with places:
                    text = None
                    try:
                        text = await _complete(client, model, task)
                    except (RequestFailed, httpx.HTTPError) as error:
                        errors.append(f"{type(error).__name__}: {error}")
                bar.update()
                return text

            texts = await asyncio.gather(*map(one, tasks))
    return Answers(texts, errors[0] if errors else None)


async def _complete(client: httpx.AsyncClient, model: str, task: Task) -> str:
    body = {"model": model, "prompt": task.prompt, "max_tokens": task.max_tokens, "temperature": 0}
    body |= {"stop": task.stop} if task.stop else {}
    answer = await client.post("/v1/completions", json=body)
    if answer.status_code != 200:
        raise RequestFailed(f"{answer.status_code} {answer.text.strip()[:500]}")
    try:
        return str(answer.json()["choices"][0]["text"])
    except (ValueError, KeyError, IndexError, TypeError):
        raise RequestFailed(f"no completion: {answer.text.strip()[:500]}") from None


async def accepted_length(url: str) -> float | None:
    """Tokens a round of drafts gave so far, on average: the one that is always right, and the drafts that were; None
    where no draft was made."""
    async with connect(url) as client:
        found = await counters(client)
    rounds = found.get("vllm:spec_decode_num_drafts_total", 0)
    return 1 + found["vllm:spec_decode_num_accepted_tokens_total"] / rounds if rounds else None


async def computed_alone(url: str) -> dict[str, int]:
    """Requests that a router's decode servers did without a prefill server, by reason. Raises RequestFailed if it does
    not say."""
    async with connect(url) as client:
        found = await counters(client)
    ours = {name: value for name, value in found.items() if name.startswith(_ALONE)}
    if not ours:
        raise RequestFailed(f"{url}/metrics has none of {', '.join(_ALONE)}; is it a router?")
    return {name.rpartition("=")[2]: int(value) for name, value in ours.items() if value}
