"""The server's Prometheus metrics, in a registry of the app's own."""

import time
from collections import deque
from collections.abc import Sequence

from prometheus_client import Counter, Histogram, generate_latest

from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.serve.engine_metrics import EngineCollector
from glm_dcp_jax.serve.families import Families
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.metric_table import DEFAULT_PREFIX, METRICS, tokens_up_to
from glm_dcp_jax.serve.registry import make_registry

FINISH_REASONS = ("stop", "length", "abort", "error")
QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")
_OBSERVED = (
    "time_to_first_token_seconds",
    "inter_token_latency_seconds",
    "request_time_per_output_token_seconds",
    "e2e_request_latency_seconds",
    "request_queue_time_seconds",
    "request_prefill_time_seconds",
    "request_decode_time_seconds",
    "request_inference_time_seconds",
    "request_prompt_tokens",
    "request_generation_tokens",
    "request_max_num_generation_tokens",
    "request_params_n",
    "request_params_max_tokens",
)
_RECENT = 512
"""Observations of a latency that are kept as they are."""


class Metrics:
    """What the server counts itself, and what it asks the engine for when scraped.

    ended: outputs by finish reason. recent: the last observations of latencies, by the histogram's name.
    """

    def __init__(self, engine: Engine, model_name: str, prefix: str = DEFAULT_PREFIX) -> None:
        """Every metric shows 0 from the beginning on."""
        self._registry, self._prefix = make_registry(), prefix
        self._labels = (model_name, "0")
        tokens = tokens_up_to(engine.max_model_len)
        self._histograms = {
            described.name: Histogram(
                described.exported(prefix),
                described.text,
                described.labels,
                buckets=described.bounds or tokens,
                registry=self._registry,
            ).labels(*self._labels)
            for described in map(METRICS.__getitem__, _OBSERVED)
        }
        self._finished = self._counters("request_success", FINISH_REASONS)
        self._rejected = self._counters("admission_rejections", QUEUE_LIMITS)
        self._cached = self._counter("prompt_tokens_cached").labels(*self._labels)
        self._registry.register(EngineCollector(engine, Families(prefix, self._labels)))
        self.ended = dict.fromkeys(FINISH_REASONS, 0)
        self.recent: dict[str, deque[float]] = {name: deque(maxlen=_RECENT) for name in _OBSERVED[:2]}

    def _counter(self, name: str) -> Counter:
        described = METRICS[name]
        return Counter(
            described.exported(self._prefix), described.text, described.labels, registry=self._registry
        )

    def _counters(self, name: str, values: Sequence[str]) -> dict[str, Counter]:
        """A counter for each value of the metric's own label."""
        counter = self._counter(name)
        return {value: counter.labels(*self._labels, value) for value in values}

    def observe(self, name: str, value: float) -> None:
        """One more value of a histogram."""
        self._histograms[name].observe(value)
        if name in self.recent:
            self.recent[name].append(value)

    def cached(self, tokens: int) -> None:
        """The prefix cache had so many tokens of a prompt."""
        self._cached.inc(tokens)

    def finished(self, reasons: Sequence[str]) -> None:
        """A request's outputs ended, for these reasons."""
        for reason in reasons:
            self._finished[reason].inc()
            self.ended[reason] += 1

    def rejected(self, limit: str) -> None:
        """A request found more waiting than this setting allows."""
        self._rejected[limit].inc()

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)


class RequestWatch:
    """One request's part in the metrics: when it arrived, when its tokens came, and how many."""

    def __init__(self, metrics: Metrics, prompt_tokens: int, params: SamplingParams) -> None:
        self._metrics, self._prompt_tokens, self._params = metrics, prompt_tokens, params
        self._arrival = time.monotonic()
        self._first = self._last = 0.0
        self._began: float | None = None
        self._tokens: list[int] = []

    def see(self, output: RequestOutput) -> None:
        """Its latest output came."""
        now, tokens = time.monotonic(), [len(choice.token_ids) for choice in output.outputs]
        if sum(tokens) <= sum(self._tokens):
            return
        if self._tokens:
            self._metrics.observe("inter_token_latency_seconds", now - self._last)
        else:
            self._first, self._began = now, output.began
            self._metrics.observe("time_to_first_token_seconds", now - self._arrival)
            self._metrics.cached(output.num_cached_tokens)
        self._last, self._tokens = now, tokens

    def end(self, reasons: Sequence[str]) -> None:
        """It ended, its outputs for these reasons."""
        self._metrics.finished(reasons)
        values: dict[str, float] = {
            "e2e_request_latency_seconds": time.monotonic() - self._arrival,
            "request_prompt_tokens": self._prompt_tokens,
            "request_generation_tokens": sum(self._tokens),
            "request_max_num_generation_tokens": max(self._tokens, default=0),
            "request_params_n": self._params.n,
        }
        if self._params.max_tokens is not None:
            values["request_params_max_tokens"] = self._params.max_tokens
        if self._tokens:
            values["request_decode_time_seconds"] = self._last - self._first
        if self._began is not None:
            values["request_queue_time_seconds"] = self._began - self._arrival
            values["request_prefill_time_seconds"] = self._first - self._began
            values["request_inference_time_seconds"] = self._last - self._began
        if max(self._tokens, default=0) > 1:
            per_token = (self._last - self._first) / (max(self._tokens) - 1)
            values["request_time_per_output_token_seconds"] = per_token
        for name, value in values.items():
            self._metrics.observe(name, value)
