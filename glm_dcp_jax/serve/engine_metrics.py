"""What the engine counts itself, as Prometheus metrics."""

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from glm_dcp_jax.config.engine import DECODE_PATHS
from glm_dcp_jax.engine.draft_stats import DraftStats
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.serve.families import Families
from glm_dcp_jax.serve.interface import Engine, EngineStats
from glm_dcp_jax.serve.transfer_metrics import transfer_families


class EngineCollector(Collector):
    """The engine's own counts, read at scrape time."""

    def __init__(self, engine: Engine, families: Families) -> None:
        self._engine, self._families = engine, families

    def collect(self) -> Iterator[Metric]:
        """The counts at this moment."""
        stats, families = self._engine.stats(), self._families
        waiting = [("capacity", stats.waiting - stats.deferred), ("deferred", stats.deferred)]
        yield families.of("num_requests_running", stats.running)
        yield families.of("num_requests_waiting", stats.waiting)
        yield families.by_label("num_requests_waiting_by_reason", waiting)
        yield families.of("num_preemptions", stats.preemptions)
        yield families.of("prompt_tokens", stats.prompt_tokens)
        yield families.of("generation_tokens", stats.generation_tokens)
        yield families.histogram("iteration_tokens_total", stats.step_tokens)
        yield families.of("kv_cache_usage_perc", stats.cache_usage)
        yield families.of("prefix_cache_queries", stats.prefix_cache.queries)
        yield families.of("prefix_cache_hits", stats.prefix_cache.hits)
        yield families.of("prefix_cache_evictions", stats.prefix_cache.evictions)
        yield families.info("cache_config", self._geometry(stats))
        yield from self._exchanges(stats.exchanges)
        yield families.of("compiles_after_warm_up", stats.compiles_after_warm_up)
        if self._engine.config.speculative is not None:
            yield from self._drafts(stats.drafts)
        if stats.transfers is not None:
            yield from transfer_families(families, stats.transfers)

    def _drafts(self, drafts: DraftStats) -> Iterator[Metric]:
        """What speculative decoding proposed, and how much of it was right."""
        families = self._families
        yield families.of("spec_decode_num_drafts", drafts.rounds)
        yield families.of("spec_decode_num_draft_tokens", drafts.proposed)
        yield families.of("spec_decode_num_accepted_tokens", drafts.accepted)
        at = [(str(position), count) for position, count in enumerate(drafts.accepted_at)]
        yield families.by_label("spec_decode_num_accepted_tokens_per_pos", at)

    def _exchanges(self, totals: ExchangeTotals) -> Iterator[Metric]:
        """Decode steps by path, and what travelled between the ranks of a DCP group."""
        families = self._families
        steps = [(path, totals.steps.get(path, 0)) for path in DECODE_PATHS[1:]]
        yield families.by_label("dcp_decode_steps", steps)
        yield families.of("dcp_received_bytes", totals.received)
        yield families.of("dcp_selected_entries", totals.entries)
        yield families.of("dcp_records", totals.records)
        yield families.of("dcp_records_unique_ratio", totals.unique_ratio)
        yield families.of("dcp_overflows", totals.overflows)
        yield families.of("dcp_selections_compared", totals.compared)
        yield families.of("dcp_selections_diverged", totals.diverged)

    def _geometry(self, stats: EngineStats) -> dict[str, object]:
        config = self._engine.config
        return {
            "block_size": config.cache.block_size,
            "cache_dtype": stats.cache_dtype,
            "cp_kv_cache_interleave_size": config.cache.cp_kv_cache_interleave_size,
            "decode_context_parallel_size": config.parallel.decode_context_parallel_size,
            "enable_prefix_caching": config.cache.enable_prefix_caching,
            "gpu_memory_utilization": config.cache.gpu_memory_utilization,
            "num_gpu_blocks": stats.num_pages,
        }
