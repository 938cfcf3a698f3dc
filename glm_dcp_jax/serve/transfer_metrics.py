"""What engines hand over to one another, as Prometheus metrics: vLLM's names for NIXL, whatever the transport is."""

from collections.abc import Iterable, Iterator, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

if TYPE_CHECKING:  # they load jax
    from glm_dcp_jax.engine.kv_connector import TransferStats
    from glm_dcp_jax.transfer.offers import OfferStats
    from glm_dcp_jax.transfer.producer import ProducerStats
    from glm_dcp_jax.transfer.transfer_stats import Distribution, Received

ANY = "over any transport"
REFUSALS = ("unknown", "used", "expired", "other_prompt", "stale_attempt", "dropped")
FAILURES = (*REFUSALS, "wrong_engine", "too_short", "unlike", "lost", "timeout", "corrupt", "auth")
"""Kinds that are there from the start, at 0, so that the first failure has a rate; rarer ones come later."""


class TransferFamilies:
    """Makes metric families. prefix: before each name. labels: names and values that each sample has."""

    def __init__(self, prefix: str, labels: Mapping[str, str]) -> None:
        self._prefix, self._names, self._values = prefix, tuple(labels), tuple(labels.values())

    def of(self, stats: "TransferStats") -> Iterator[Metric]:
        """The counts of the roles that the engine has."""
        if stats.received is not None:
            yield from self._of_consumer(stats.received)
        if stats.sent is not None:
            yield from self._of_producer(stats.sent)

    def _of_consumer(self, received: "Received") -> Iterator[Metric]:
        yield self._histogram(
            "nixl_xfer_time_seconds", f"Bringing a request's cache, {ANY}", received.seconds
        )
        yield self._histogram("nixl_bytes_transferred", f"Bytes of a request's cache, {ANY}", received.bytes)
        phases = "Seconds that arrived caches have spent, by phase; pack and fetch are parts of read"
        yield self._counters("kv_transfer_phase_seconds", phases, "phase", received.phases.items())
        runs = f"Runs of slots, contiguous on both sides, that a request's cache came in, {ANY}"
        yield self._histogram("nixl_num_descriptors", runs, received.runs)
        failed = f"Requests whose cache did not arrive, {ANY}"
        yield self._counter("nixl_num_failed_transfers", failed, sum(received.failed.values()))
        unheard = f"Messages about the end of a transfer that no producer answered, {ANY}"
        yield self._counter("nixl_num_failed_notifications", unheard, received.unheard)
        yield self._counters(
            "kv_transfer_failures", "Caches that did not arrive", "kind", _all_of(FAILURES, received.failed)
        )
        cancelled = "Transfers that had begun when their request ended"
        yield self._counter("kv_transfer_cancelled", cancelled, received.cancelled)
        wasted = "Bytes received for transfers that failed or were cancelled"
        yield self._counter("kv_transfer_wasted_bytes", wasted, received.wasted_bytes)

    def _of_producer(self, sent: "ProducerStats") -> Iterator[Metric]:
        yield self._counter("kv_transfer_sent_bytes", "Bytes packed for consumers", sent.sent_bytes)
        padding = "Bytes packed beside these to fill up shapes, which stay here"
        yield self._counter("kv_transfer_padding_bytes", padding, sent.padding_bytes)
        if sent.offers is not None:
            yield from self._of_offers(sent.offers)

    def _of_offers(self, offers: "OfferStats") -> Iterator[Metric]:
        held = "Requests that have ended and whose cache is held for a consumer"
        gauge = GaugeMetricFamily(self._prefix + "kv_transfer_held_requests", held, labels=self._names)
        gauge.add_metric(self._values, offers.held)
        yield gauge
        expired = f"Requests whose cache nobody came for within its lease, {ANY}"
        yield self._counter("nixl_num_kv_expired_reqs", expired, offers.expired)
        late = f"Messages about the end of a transfer that came after its cache had been given up, {ANY}"
        yield self._counter("nixl_num_notifications_after_expiry", late, offers.late_acks)
        outcomes = [(name, getattr(offers, name)) for name in ("finished", "failed", "expired", "dropped")]
        yield self._counters(
            "kv_transfer_offers", "Caches that were held, by how that ended", "outcome", outcomes
        )
        refused = "Requests of consumers that were refused"
        yield self._counters("kv_transfer_refusals", refused, "kind", _all_of(REFUSALS, offers.refused))

    def _counter(self, name: str, text: str, value: float) -> Metric:
        counter = CounterMetricFamily(self._prefix + name, text, labels=self._names)
        counter.add_metric(self._values, value)
        return counter

    def _counters(self, name: str, text: str, label: str, values: Iterable[tuple[str, float]]) -> Metric:
        """One sample for each value of a label of its own."""
        counter = CounterMetricFamily(self._prefix + name, text, labels=(*self._names, label))
        for value, count in values:
            counter.add_metric((*self._values, value), count)
        return counter

    def _histogram(self, name: str, text: str, found: "Distribution") -> Metric:
        bounds = [*map(floatToGoString, found.bounds), "+Inf"]
        histogram = HistogramMetricFamily(self._prefix + name, text, labels=self._names)
        buckets = list(zip(bounds, accumulate(found.counts), strict=True))
        histogram.add_metric(self._values, buckets, found.total)
        return histogram


def _all_of(kinds: Iterable[str], found: Mapping[Any, float]) -> Iterable[tuple[str, float]]:
    return (dict.fromkeys(kinds, 0.0) | dict(found)).items()
