"""Prometheus metrics, with vLLM's names under the prefix `glm_dcp:`, in a registry of the app's own."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from glm_dcp_jax.config.engine import DECODE_PATHS
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.serve.interface import Engine

PREFIX = "glm_dcp:"
LABELS = ("model_name", "engine")
_FIRST_TOKEN_SECONDS = (
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
)
_REQUEST_SECONDS = (
    0.05,
    0.1,
    0.25,
    0.5,
    1,
    2.5,
    5,
    10,
    15,
    20,
    30,
    40,
    50,
    60,
    120,
    240,
    480,
    960,
    1920,
    7680,
)


class Metrics:
    """What the server counts itself, and what it asks the engine for when scraped."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._first_token = Histogram(
            PREFIX + "time_to_first_token_seconds",
            "From the request's arrival to its first token",
            LABELS,
            buckets=_FIRST_TOKEN_SECONDS,
            registry=self._registry,
        )
        self._request = Histogram(
            PREFIX + "e2e_request_latency_seconds",
            "From the request's arrival to its last token",
            LABELS,
            buckets=_REQUEST_SECONDS,
            registry=self._registry,
        )
        self._finished = Counter(
            PREFIX + "request_success_total",
            "Finished outputs by finish reason",
            (*LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "abort", "error"):
            self._finished.labels(*self._labels, reason)
        self._registry.register(_EngineCollector(engine, self._labels))

    def first_token(self, seconds: float) -> None:
        """A request got its first token this long after it arrived."""
        self._first_token.labels(*self._labels).observe(seconds)

    def finished(self, reasons: list[str], seconds: float) -> None:
        """A request ended this long after it arrived, its outputs for these reasons."""
        self._request.labels(*self._labels).observe(seconds)
        for reason in reasons:
            self._finished.labels(*self._labels, reason).inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class _EngineCollector(Collector):
    """The engine's own counts, read at scrape time."""

    def __init__(self, engine: Engine, labels: tuple[str, str]) -> None:
        self._engine = engine
        self._labels = labels

    def collect(self) -> Iterator[Metric]:
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
        counters = {
            "prompt_tokens": ("Prompt tokens processed", stats.prompt_tokens),
            "generation_tokens": ("Tokens generated", stats.generation_tokens),
            "compiles_after_warm_up": ("Programs compiled while serving: 0", stats.compiles_after_warm_up),
        }
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
        yield from self._exchanges(stats.exchanges)
        yield self._cache_config(stats.num_pages, stats.cache_dtype)

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
                "Bytes each device got from others in decode, by the steps' shapes; overflows not counted",
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
        for name, (text, value) in counters.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=LABELS)
            counter.add_metric(self._labels, value)
            yield counter
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
