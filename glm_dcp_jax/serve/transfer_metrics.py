"""What engines hand over to one another, as Prometheus metrics: vLLM's names for NIXL, whatever the transport is."""

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from prometheus_client.metrics_core import Metric

from glm_dcp_jax.serve.families import Families

if TYPE_CHECKING:  # they load jax
    from glm_dcp_jax.engine.kv_connector import TransferStats
    from glm_dcp_jax.transfer.offers import OfferStats
    from glm_dcp_jax.transfer.producer import ProducerStats
    from glm_dcp_jax.transfer.transfer_stats import Received

OUTCOMES = ("finished", "failed", "expired", "dropped")
REFUSALS = ("unknown", "used", "expired", "other_prompt", "stale_attempt", "dropped")
FAILURES = (*REFUSALS, "wrong_engine", "too_short", "unlike", "lost", "timeout", "corrupt", "auth")
"""Kinds that are there from the start, at 0, so that the first failure has a rate; rarer ones come later."""


def transfer_families(families: Families, stats: "TransferStats") -> Iterator[Metric]:
    """The counts of the roles that the engine has."""
    if stats.received is not None:
        yield from _of_consumer(families, stats.received)
    if stats.sent is not None:
        yield from _of_producer(families, stats.sent)


def _of_consumer(families: Families, received: "Received") -> Iterator[Metric]:
    yield families.histogram("nixl_xfer_time_seconds", received.seconds)
    yield families.histogram("nixl_bytes_transferred", received.bytes)
    yield families.histogram("nixl_num_descriptors", received.runs)
    yield families.of("nixl_num_failed_transfers", sum(received.failed.values()))
    yield families.of("nixl_num_failed_notifications", received.unheard)
    yield families.by_label("kv_transfer_failures", _all_of(FAILURES, received.failed))
    yield families.by_label("kv_transfer_phase_seconds", received.phases.items())
    yield families.of("kv_transfer_cancelled", received.cancelled)
    yield families.of("kv_transfer_wasted_bytes", received.wasted_bytes)


def _of_producer(families: Families, sent: "ProducerStats") -> Iterator[Metric]:
    yield families.of("kv_transfer_sent_bytes", sent.sent_bytes)
    yield families.of("kv_transfer_padding_bytes", sent.padding_bytes)
    if sent.offers is not None:
        yield from _of_offers(families, sent.offers)


def _of_offers(families: Families, offers: "OfferStats") -> Iterator[Metric]:
    yield families.of("kv_transfer_held_requests", offers.held)
    yield families.by_label("kv_transfer_offers", [(name, getattr(offers, name)) for name in OUTCOMES])
    yield families.by_label("kv_transfer_refusals", _all_of(REFUSALS, offers.refused))
    yield families.of("nixl_num_kv_expired_reqs", offers.expired)
    yield families.of("nixl_num_notifications_after_expiry", offers.late_acks)


def _all_of(kinds: Iterable[str], found: Mapping[Any, float]) -> Iterable[tuple[str, float]]:
    return (dict.fromkeys(kinds, 0.0) | dict(found)).items()
