"""What the engine counts itself, as Prometheus metrics with vLLM's names under the prefix `glm_dcp:`."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from glm_dcp_jax.config.engine import DECODE_PATHS
from glm_dcp_jax.engine.draft_stats import DraftStats
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.transfer_metrics import TransferFamilies

PREFIX = "glm_dcp:"
LABELS = ("model_name", "engine")


class EngineCollector(Collector):
    """The engine's own counts, read at scrape time."""

    def __init__(self, engine: Engine, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
        """The counts at this moment."""
        stats = self._engine.stats()
        gauges = {
            "num_requests_running": ("Requests in decode or prefill", stats.running),
            "num_requests_waiting": ("Requests that wait for room", stats.waiting),
            "kv_cache_usage_perc": ("Pages of the cache in use, 1 is all", stats.cache_usage),
        }
        for name, (text, value) in gauges.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=LABELS)
            gauge.add_metric(self._labels, value)
            yield gauge
        prefixes = stats.prefix_cache
        counters = {
            "prompt_tokens": ("Prompt tokens processed", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated", stats.generation_tokens),
            "num_preemptions": ("How often a sequence lost its pages to another", stats.preemptions),
            "prefix_cache_queries": ("Tokens looked for in the prefix cache", prefixes.queries),
            "prefix_cache_hits": ("Tokens found in the prefix cache", prefixes.hits),
            "prefix_cache_evictions": ("Pages whose content was given up for another", prefixes.evictions),
            "compiles_after_warm_up": ("Programs compiled while serving: 0", stats.compiles_after_warm_up),
        }
        yield from self._counters(counters)
        if self._engine.config.speculative is not None:
            yield from self._drafts(stats.drafts)
        yield from self._exchanges(stats.exchanges)
        if stats.transfers is not None:
            labels = dict(zip(LABELS, self._labels, strict=True))
            yield from TransferFamilies(PREFIX, labels).of(stats.transfers)
        yield self._cache_config(stats.num_pages, stats.cache_dtype)

    def _counters(self, counters: Mapping[str, tuple[str, float]]) -> Iterator[Metric]:
        """name -> (what it counts, the count)."""
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter

    def _drafts(self, drafts: DraftStats) -> Iterator[Metric]:
        """What speculative decoding proposed, and how much of it was right. position: 0 is a round's first draft."""
        counters = {
            "spec_decode_num_drafts": ("Rounds in which drafts were verified", drafts.rounds),
            "spec_decode_num_draft_tokens": ("Draft tokens verified", drafts.proposed),
            "spec_decode_num_accepted_tokens": ("Draft tokens accepted", drafts.accepted),
        }
        yield from self._counters(counters)
        accepted = CounterMetricFamily(
            PREFIX + "spec_decode_num_accepted_tokens_per_pos",
            "Draft tokens accepted, by their place in the round",
            labels=(*LABELS, "position"),
        )
        for position, count in enumerate(drafts.accepted_at):
            accepted.add_metric((*self._labels, str(position)), count)
        yield accepted

    def _exchanges(self, totals: ExchangeTotals) -> Iterator[Metric]:
        """Decode steps by path, and what travelled between the ranks of a DCP group."""
        steps = CounterMetricFamily(
            PREFIX + "dcp_decode_steps", "Decode steps by the path they took", labels=(*LABELS, "path")
        )
        for path in DECODE_PATHS[1:]:
            steps.add_metric((*self._labels, path), totals.steps.get(path, 0))
        yield steps
        counters = {
            "dcp_received_bytes": (
                "Bytes each device is expected to get in decode, by the steps' shapes; overflows not counted",
                totals.received,
            ),
            "dcp_selected_entries": (
                "Selected positions, over rows and Full layers; paths records and bulk",
                totals.entries,
            ),
            "dcp_records": ("Records exchanged, each once per request and Full layer", totals.records),
            "dcp_selections_compared": ("Decode steps compared across devices", totals.compared),
            "dcp_selections_diverged": (
                "Of these, steps whose devices disagreed: wrong tokens",
                totals.diverged,
            ),
            "dcp_overflows": ("Share groups whose records did not fit the fast exchange", totals.overflows),
        }
        yield from self._counters(counters)
        ratio = GaugeMetricFamily(
            PREFIX + "dcp_records_unique_ratio",
            "Records exchanged per selected entry; 0 before any were",
            labels=LABELS,
        )
        ratio.add_metric(self._labels, totals.unique_ratio)
        yield ratio

    def _cache_config(self, num_pages: int, cache_dtype: str) -> Metric:
        config = self._engine.config
        info = InfoMetricFamily(PREFIX + "cache_config", "Geometry of the cache", labels=LABELS)
        geometry = {
            "block_size": config.cache.block_size,
            "cp_kv_cache_interleave_size": config.cache.cp_kv_cache_interleave_size,
            "decode_context_parallel_size": config.parallel.decode_context_parallel_size,
            "kv_cache_dtype": cache_dtype,
            "num_gpu_blocks": num_pages,
        }
        info.add_metric(self._labels, {name: str(value) for name, value in geometry.items()})
        return info
