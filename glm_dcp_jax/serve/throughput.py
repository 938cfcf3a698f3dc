"""A line in the log, every few seconds while there is work, that says how fast it goes. As vLLM's."""

import asyncio
import logging
import time

from glm_dcp_jax.serve.interface import Engine, EngineStats

INTERVAL = 10.0
"""Seconds between two lines."""
_LOG = logging.getLogger(__name__)


async def log_throughput(engine: Engine, interval: float) -> None:
    """Log a line each `interval` seconds in which anything ran or waited, until cancelled.

    It asks the engine for its counts, as a scrape does; no step has a part in it.
    """
    stats, then = engine.stats(), time.monotonic()
    while True:
        await asyncio.sleep(interval)
        before, since = stats, then
        stats, then = engine.stats(), time.monotonic()
        if _worked(before, stats):
            _LOG.info(throughput_line(before, stats, then - since))


def throughput_line(before: EngineStats, now: EngineStats, seconds: float) -> str:
    """The line about what came between two counts. The hit rate is since the start, all else of these seconds.

    Drafts are in it where any were verified.
    """
    looked_for, found = now.prefix_cache.queries, now.prefix_cache.hits
    parts = [
        f"Avg prompt throughput: {(now.prompt_tokens - before.prompt_tokens) / seconds:.1f} tokens/s",
        f"Avg generation throughput: {(now.generation_tokens - before.generation_tokens) / seconds:.1f} tokens/s",
        f"Running: {now.running} reqs",
        f"Waiting: {now.waiting} reqs",
        f"KV cache usage: {now.cache_usage:.1%}",
        f"Prefix cache hit rate: {found / looked_for if looked_for else 0:.1%}",
    ]
    if proposed := now.drafts.proposed - before.drafts.proposed:
        accepted, rounds = (
            now.drafts.accepted - before.drafts.accepted,
            now.drafts.rounds - before.drafts.rounds,
        )
        parts.append(f"Avg draft acceptance rate: {accepted / proposed:.1%}")
        parts.append(f"Mean acceptance length: {1 + accepted / rounds:.2f}")
    return ", ".join(parts)


def _worked(before: EngineStats, now: EngineStats) -> bool:
    counted = [(stats.prompt_tokens, stats.generation_tokens) for stats in (before, now)]
    return bool(now.running or now.waiting or counted[0] != counted[1])
