"""Hundreds of clients that come and go at random: nothing of them is left.

`GLM_DCP_CHURN_SECONDS` says for how long (300), of which the first third is not measured: pools fill, code is loaded.
"""

import asyncio
import json
import os
import random
import time

import httpx
import pytest
from server import Running, served, wait_until_idle

pytestmark = pytest.mark.slow
SECONDS = float(os.environ.get("GLM_DCP_CHURN_SECONDS", "300"))
CLIENTS = 500
MAY_GROW = 64 << 20
"""Bytes of memory between the first measurement and the last: what allocators keep."""


def memory_of(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def files_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def threads_of(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/task"))


def body_of(rng: random.Random) -> tuple[str, dict]:
    """A request of some kind; some are refused."""
    common = {
        "max_tokens": rng.choice([1, 5, 40, 400]),
        "stream": rng.random() < 0.6,
        "n": rng.choice([1, 1, 1, 2]),
    }
    if rng.random() < 0.2:
        common["structured_outputs"] = {"regex": "[a-z]{3,60}"}
    if rng.random() < 0.1:
        common["temperature"] = -1
    text = "word " * rng.choice([1, 30, 300])
    if rng.random() < 0.5:
        return "/v1/completions", {"prompt": text, **common}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": text}], **common}


async def hang_up_early(url: str, rng: random.Random) -> None:
    """A connection that is cut off in the middle of its request, or right behind it."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    path, body = body_of(rng)
    content = json.dumps(body).encode()
    whole = f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content
    writer.write(whole[: rng.randint(1, len(whole))])
    await writer.drain()
    await asyncio.sleep(rng.random() / 10)
    writer.transport.abort()


async def one_client(url: str, seed: int, until: float, seen: dict[str, int]) -> None:
    rng = random.Random(seed)
    while time.monotonic() < until:
        await asyncio.sleep(rng.random() * 2)
        patience = rng.choice([0.05, 0.5, 3.0, 20.0])
        try:
            if rng.random() < 0.2:
                await asyncio.wait_for(hang_up_early(url, rng), 20)
                kind = "cut off"
            else:
                path, body = body_of(rng)
                async with httpx.AsyncClient(base_url=url, timeout=patience) as client:
                    answer = await client.post(path, json=body)
                kind = str(answer.status_code)
        except (httpx.HTTPError, OSError, TimeoutError):
            kind = "left"
        seen[kind] = seen.get(kind, 0) + 1


async def churn(running: Running, seconds: float) -> tuple[dict[str, int], list[int], list[int]]:
    """What clients saw, and the server's memory and threads at the end of each sixth."""
    seen: dict[str, int] = {}
    began = time.monotonic()
    clients = [one_client(running.url, seed, began + seconds, seen) for seed in range(CLIENTS)]
    everybody = asyncio.gather(*clients)
    memory, threads = [], []
    for sixth in range(1, 7):
        await asyncio.sleep(max(began + seconds * sixth / 6 - time.monotonic(), 0))
        memory.append(memory_of(running.pid))
        threads.append(threads_of(running.pid))
    await everybody
    return seen, memory, threads


@pytest.mark.timeout(SECONDS + 600)
def test_nothing_is_left_of_500_clients():
    flags = ("-tp", "2", "-dcp", "2", "--max-num-seqs", "8", "--precompile-bs-paddings", "8")
    with served(*flags, "--max-num-queued-reqs", "200") as running:
        httpx.post(f"{running.url}/v1/completions", json={"prompt": "a", "max_tokens": 2}, timeout=60)
        files = files_of(running.pid)
        seen, memory, threads = asyncio.run(churn(running, SECONDS))
        left = wait_until_idle(running.url)
        print(
            f"\nclients saw {seen}; MB in each sixth: {[round(each / 1e6) for each in memory]}, threads: {threads}"
        )
        assert seen.get("200", 0) > 20 and seen.get("left", 0) + seen.get("cut off", 0) > 50
        assert not [kind for kind in seen if kind.isdigit() and int(kind) >= 500 and kind != "503"]
        [usage] = [value for name, value in left.items() if "kv_cache_usage_perc" in name]
        assert usage == 0, "pages are still taken"
        time.sleep(6)  # connections that are kept alive end
        assert files_of(running.pid) <= files + 4, "file descriptors are left"
        assert threads_of(running.pid) <= threads[1] + 2, "threads are left"  # pools are full by then
        assert memory[-1] - memory[1] < MAY_GROW, memory
