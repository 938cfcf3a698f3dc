"""The router's Prometheus metrics, in a registry of the app's own."""

from collections.abc import Sequence

from prometheus_client import Counter, Gauge, Histogram, generate_latest

from glm_dcp_jax.serve.registry import make_registry
from glm_dcp_jax.serve.router.backends import Backend
from glm_dcp_jax.serve.router.bodies import SKIPS

PREFIX = "glm_dcp_router:"
OUTCOMES = ("ok", "rejected", "failed", "timeout", "broken", "disconnected", "stopped")
"""How a request ended: 2xx; 4xx; 5xx; no answer in time; broken off within the answer; client gone; router stopped."""
FALLBACKS = ("unhealthy", "unreachable", "timeout", "status", "broken", "bad_answer", "no_params", "refused")
"""Why a decode server did all of a request that was meant for a prefill server."""
LEGS = {
    "prefill_seconds": "From asking a prefill server to its whole answer, each try",
    "decode_first_byte_seconds": "From asking a decode server to the first byte of its answer",
    "decode_seconds": "From asking a decode server to the end of its answer",
}
_BOUNDS = tuple(map(float, "0.01 0.025 0.05 0.1 0.25 0.5 1 2.5 5 10 20 40 80 160 320 640 1920".split()))


class Metrics:
    """Every metric shows 0 from the beginning on."""

    def __init__(self, backends: Sequence[Backend]) -> None:
        self._registry = make_registry()
        self._requests = self._counters("requests", "Requests by outcome", "outcome", OUTCOMES)
        self._fallbacks = self._counters(
            "fallbacks", "Requests that decode servers did alone, after prefill failed", "reason", FALLBACKS
        )
        self._skips = self._counters(
            "prefill_skips", "Requests that decode servers did alone, as they should", "reason", SKIPS
        )
        self._retries = self._counters(
            "retries", "Requests that went on to another server", "role", ("prefill", "decode")
        )
        self._releases = self._counters(
            "releases",
            "Caches that no decode server took, and whether their prefill server could be told",
            "result",
            ("ok", "failed"),
        )
        self._legs = {
            name: Histogram(PREFIX + name, text, buckets=_BOUNDS, registry=self._registry)
            for name, text in LEGS.items()
        }
        labels = ("role", "backend")
        self._in_flight = Gauge(
            PREFIX + "in_flight", "Requests at each server", labels, registry=self._registry
        )
        self._healthy = Gauge(
            PREFIX + "healthy", "1 for a server that is healthy", labels, registry=self._registry
        )
        for backend in backends:
            self._show(backend)

    def _show(self, backend: Backend) -> None:
        """Have its gauges asked for when scraped."""
        self._in_flight.labels(backend.role, backend.url).set_function(lambda: backend.in_flight)
        self._healthy.labels(backend.role, backend.url).set_function(lambda: bool(backend.healthy))

    def _counters(self, name: str, text: str, label: str, values: Sequence[str]) -> dict[str, Counter]:
        """A counter for each value of a label."""
        counter = Counter(PREFIX + name, text, (label,), registry=self._registry)
        return {value: counter.labels(value) for value in values}

    def finished(self, outcome: str) -> None:
        """A request ended like this."""
        self._requests[outcome].inc()

    def fell_back(self, reason: str) -> None:
        """A decode server has to do all of a request."""
        self._fallbacks[reason].inc()

    def skipped(self, reason: str) -> None:
        """A request needs no prefill server."""
        self._skips[reason].inc()

    def retried(self, role: str) -> None:
        """A request goes on to another server of this role."""
        self._retries[role].inc()

    def released(self, result: str) -> None:
        """A prefill server was told to let go of a cache, or could not be told."""
        self._releases[result].inc()

    def took(self, leg: str, seconds: float) -> None:
        """One more value of one of LEGS."""
        self._legs[leg].observe(seconds)

    def exposition(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return generate_latest(self._registry)
