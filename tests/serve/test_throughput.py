"""The line of throughput: what it says, when it comes, and that it can be turned off."""

import asyncio
import contextlib
import time
from dataclasses import replace

import httpx
import pytest
from fake_engine import FakeEngine, FakeStats
from live import live_server

from glm_dcp_jax.cache.prefix_cache import PrefixCacheStats
from glm_dcp_jax.engine.draft_stats import DraftStats
from glm_dcp_jax.serve import throughput
from glm_dcp_jax.serve.throughput import log_throughput, throughput_line

NO_DRAFTS = DraftStats(0, 0, 0, [])
BEFORE = FakeStats(0, prompt_tokens=100, generation_tokens=50, drafts=NO_DRAFTS)
NOW = replace(BEFORE, running=2, waiting=1, prompt_tokens=125, generation_tokens=251)
INTERVAL = 0.02
BODY = {"prompt": [5, 6], "max_tokens": 5}


def test_the_line_is_vllms():
    assert throughput_line(BEFORE, NOW, 10.0) == (
        "Avg prompt throughput: 2.5 tokens/s, Avg generation throughput: 20.1 tokens/s, Running: 2 reqs, "
        "Waiting: 1 reqs, KV cache usage: 25.0%, Prefix cache hit rate: 57.1%"
    )


def test_before_anything_was_looked_for_nothing_was_found():
    fresh = replace(NOW, prefix_cache=PrefixCacheStats(0, 0, 0))
    assert throughput_line(BEFORE, fresh, 10.0).endswith("Prefix cache hit rate: 0.0%")


def test_drafts_of_the_interval_are_in_it():
    before, now = (replace(NOW, drafts=DraftStats(*counts, [])) for counts in ((6, 12, 7), (10, 20, 13)))
    assert throughput_line(before, now, 10.0).endswith(
        "Prefix cache hit rate: 57.1%, Avg draft acceptance rate: 75.0%, Mean acceptance length: 2.50"
    )
    assert "draft" not in throughput_line(now, now, 10.0)


async def lines_while(engine: FakeEngine, seconds: float) -> None:
    logging = asyncio.create_task(log_throughput(engine, INTERVAL))
    await asyncio.sleep(seconds)
    logging.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await logging


def test_it_comes_while_there_is_work_and_not_otherwise(caplog):
    caplog.set_level("INFO", logger=throughput.__name__)
    engine = FakeEngine()
    asyncio.run(lines_while(engine, 4 * INTERVAL))
    assert caplog.messages == []
    engine.waiting = 3
    asyncio.run(lines_while(engine, 4 * INTERVAL))
    assert caplog.messages and "Waiting: 3 reqs" in caplog.messages[0]


@pytest.mark.parametrize("off", [False, True])
def test_a_server_logs_it_unless_it_is_turned_off(off, caplog, monkeypatch):
    caplog.set_level("INFO", logger=throughput.__name__)
    monkeypatch.setattr(throughput, "INTERVAL", INTERVAL)
    with live_server(FakeEngine(delay=INTERVAL), disable_log_stats=off) as url:
        assert httpx.post(f"{url}/v1/completions", json=BODY).status_code == 200
        time.sleep(2 * INTERVAL)
    said = [message for message in caplog.messages if message.startswith("Avg prompt throughput")]
    assert bool(said) != off
