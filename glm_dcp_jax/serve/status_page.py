"""GET / and /docs: pages for people, of how the server does and of its API.

GET /status.json: what the first one shows, for programs.
"""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from fastapi import APIRouter, Request, Response

from glm_dcp_jax._version import __version__
from glm_dcp_jax.serve.context import Context, context_of
from glm_dcp_jax.serve.errors import json_response
from glm_dcp_jax.serve.interface import EngineStats
from glm_dcp_jax.serve.pages import Page

if TYPE_CHECKING:
    from glm_dcp_jax.engine.kv_connector import TransferStats  # loads jax

router = APIRouter()
_PAGE, _DOCS = Page("status_page.html"), Page("api_docs.html")


@router.get("/", include_in_schema=False)
async def page() -> Response:
    """The page. It asks for /status.json and for nothing else."""
    return _PAGE.answer()


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """The endpoints and their fields, of /openapi.json."""
    return _DOCS.answer()


@router.get("/status.json")
async def status(request: Request) -> Response:
    """The server's state, layout, load, latencies and counts, as of the engine's last step. No text of any request."""
    answer = json_response(_status(context_of(request)))
    answer.headers["Cache-Control"] = "no-store"
    return answer


def state_of(context: Context) -> str:
    """`warming_up`, `ready`, `draining` or `dead`."""
    if context.drain.begun:
        return "draining"
    if context.engine.is_dead:
        return "dead"
    return "ready" if context.engine.is_ready else "warming_up"


def _status(context: Context) -> dict[str, Any]:
    stats = context.engine.stats()
    config, exchanges = context.engine.config, stats.exchanges
    return {
        "state": state_of(context),
        "model": context.settings.served_model_names[0],
        "version": __version__,
        "uptime_seconds": round(time.time() - context.started, 3),
        "layout": _layout(context, stats),
        "requests": {
            "running": stats.running,
            "waiting": stats.waiting,
            "deferred": stats.deferred,
            "finished": context.metrics.ended,
            "preemptions": stats.preemptions,
        },
        "tokens": {"prompt": stats.prompt_tokens, "generation": stats.generation_tokens},
        "cache": {
            "usage": stats.cache_usage,
            "tokens": stats.num_pages
            * config.cache.block_size
            * config.parallel.decode_context_parallel_size,
            "prefix_queries": stats.prefix_cache.queries,
            "prefix_hits": stats.prefix_cache.hits,
        },
        "latency": {name: _percentiles(values) for name, values in context.metrics.recent.items()},
        "decode": {
            "path": config.parallel.dcp_decode_path,
            "steps": exchanges.steps,
            "received_bytes": exchanges.received,
            "unique_ratio": exchanges.unique_ratio,
            "overflows": exchanges.overflows,
            "diverged": exchanges.diverged,
        },
        "drafts": None
        if config.speculative is None
        else {
            "rounds": stats.drafts.rounds,
            "proposed": stats.drafts.proposed,
            "accepted": stats.drafts.accepted,
            "accepted_at": stats.drafts.accepted_at,
        },
        "transfers": _transfers(stats.transfers),
        "compiles_after_warm_up": stats.compiles_after_warm_up,
    }


def _layout(context: Context, stats: EngineStats) -> dict[str, Any]:
    config = context.engine.config
    return {
        "devices": config.parallel.tensor_parallel_size,
        "device_kind": stats.device_kind,
        "processes": config.processes.num_processes,
        "tensor_parallel_size": config.parallel.tensor_parallel_size,
        "decode_context_parallel_size": config.parallel.decode_context_parallel_size,
        "expert_parallel": config.parallel.enable_expert_parallel,
        "indexer_shards": config.parallel.dcp_indexer_shards,
        "cache_dtype": stats.cache_dtype,
        "block_size": config.cache.block_size,
        "interleave": config.cache.cp_kv_cache_interleave_size,
        "max_model_len": context.engine.max_model_len,
        "max_num_seqs": config.scheduler.max_num_seqs,
        "drafts": 0 if config.speculative is None else config.speculative.num_speculative_tokens,
    }


def _transfers(stats: "TransferStats | None") -> dict[str, int] | None:
    if stats is None:
        return None
    counts = {}
    if stats.received is not None:
        counts["arrived"] = sum(stats.received.seconds.counts)
        counts["failed"] = sum(stats.received.failed.values())
    if stats.sent is not None and stats.sent.offers is not None:
        counts["held"] = stats.sent.offers.held
        counts["expired"] = stats.sent.offers.expired
    return counts


def _percentiles(values: Iterable[float]) -> dict[str, float | None]:
    """The 50th and the 99th, by nearest rank; None of nothing."""
    ordered = sorted(values)
    count = len(ordered)
    return {
        "count": count,
        "p50": ordered[(count - 1) // 2] if count else None,
        "p99": ordered[-(-99 * count // 100) - 1] if count else None,
    }
