"""The server's Prometheus metrics, with vLLM's names under the prefix `glm_dcp:`, in a registry of the app's own."""

import time
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest

from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.serve.engine_metrics import LABELS, PREFIX, EngineCollector
from glm_dcp_jax.serve.interface import Engine


def _bounds(text: str) -> tuple[float, ...]:
    """Upper bounds of a histogram's buckets."""
    return tuple(map(float, text.split()))


_FIRST_TOKEN_SECONDS = _bounds("0.005 0.01 0.025 0.05 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640")
_TOKEN_SECONDS = _bounds("0.005 0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80")
_REQUEST_SECONDS = _bounds("0.05 0.1 0.25 0.5 1 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680")
_TOKENS = _bounds("1 2 5 10 20 50 100 200 500 1e3 2e3 5e3 1e4 2e4 5e4 1e5 2e5 5e5 1e6")
_OUTPUTS = _bounds("1 2 5 10 20")
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to its first token", _FIRST_TOKEN_SECONDS),
    "inter_token_latency_seconds": ("From new tokens of a request to its next ones", _TOKEN_SECONDS),
    "request_time_per_output_token_seconds": (
        "A request's mean time per token but the first",
        _TOKEN_SECONDS,
    ),
    "request_decode_time_seconds": ("From a request's first token to its last", _REQUEST_SECONDS),
    "e2e_request_latency_seconds": ("From a request's arrival to its end", _REQUEST_SECONDS),
    "request_prompt_tokens": ("Tokens of a request's prompt", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request", _TOKENS),
    "request_params_n": ("Outputs that a request asked for", _OUTPUTS),
    "request_params_max_tokens": ("Tokens that an output of a request may have", _TOKENS),
}
_REASONS = ("stop", "length", "abort", "error")
_QUEUE_LIMITS = ("max_num_queued_reqs", "max_num_queued_tokens")


class Metrics:
    """What the server counts itself, and what it asks the engine for when scraped."""

    def __init__(self, engine: Engine, model_name: str) -> None:
        """Every metric shows 0 from the beginning on."""
        self._registry = CollectorRegistry()
        self._labels = (model_name, "0")
        self._histograms = {
            name: Histogram(PREFIX + name, text, LABELS, buckets=bounds, registry=self._registry).labels(
                *self._labels
            )
            for name, (text, bounds) in _HISTOGRAMS.items()
        }
        self._finished = self._counters(
            "request_success", "Finished outputs by finish reason", "finished_reason", _REASONS
        )
        self._rejected = self._counters(
            "admission_rejections",
            "Requests that met a limit of the queue, by limit",
            "reason",
            _QUEUE_LIMITS,
        )
        self._cached = Counter(
            PREFIX + "prompt_tokens_cached",
            "Prompt tokens that the prefix cache had",
            LABELS,
            registry=self._registry,
        ).labels(*self._labels)
        self._registry.register(EngineCollector(engine, self._labels))

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """A counter for each value of a label."""
        counter = Counter(PREFIX + name, text, (*LABELS, label), registry=self._registry)
        return {value: counter.labels(*self._labels, value) for value in values}

    def observe(self, name: str, value: float) -> None:
        """One more value of a histogram."""
        self._histograms[name].observe(value)

    def cached(self, tokens: int) -> None:
        """The prefix cache had so many tokens of a prompt."""
        self._cached.inc(tokens)

    def finished(self, reasons: Sequence[str]) -> None:
        """A request's outputs ended, for these reasons."""
        for reason in reasons:
            self._finished[reason].inc()

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
        self._tokens: list[int] = []

    def see(self, output: RequestOutput) -> None:
        """Its latest output came."""
        now, tokens = time.monotonic(), [len(choice.token_ids) for choice in output.outputs]
        if sum(tokens) <= sum(self._tokens):
            return
        if self._tokens:
            self._metrics.observe("inter_token_latency_seconds", now - self._last)
        else:
            self._first = now
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
            "request_params_n": self._params.n,
        }
        if self._params.max_tokens is not None:
            values["request_params_max_tokens"] = self._params.max_tokens
        if self._tokens:
            values["request_decode_time_seconds"] = self._last - self._first
        if max(self._tokens, default=0) > 1:
            per_token = (self._last - self._first) / (max(self._tokens) - 1)
            values["request_time_per_output_token_seconds"] = per_token
        for name, value in values.items():
            self._metrics.observe(name, value)
