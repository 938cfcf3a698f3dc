"""Metrics whose values something else keeps, made into what Prometheus scrapes."""

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import TYPE_CHECKING

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.metrics_core import Metric
from prometheus_client.utils import floatToGoString

from glm_dcp_jax.serve.metric_table import LABELS, METRICS

if TYPE_CHECKING:  # it loads jax
    from glm_dcp_jax.transfer.transfer_stats import Distribution


class Families:
    """Makes metric families by the table of metrics. labels: values of LABELS, which each sample has."""

    def __init__(self, prefix: str, labels: tuple[str, str]) -> None:
        self._prefix, self._labels = prefix, labels

    def of(self, name: str, value: float) -> Metric:
        """A counter or gauge without a label of its own."""
        return self._family(name, [(self._labels, value)])

    def by_label(self, name: str, values: Iterable[tuple[str, float]]) -> Metric:
        """One sample for each value of the metric's own label."""
        return self._family(name, [((*self._labels, own), value) for own, value in values])

    def histogram(self, name: str, found: "Distribution") -> Metric:
        """A histogram of what was observed."""
        described = METRICS[name]
        bounds = [*map(floatToGoString, found.bounds), "+Inf"]
        buckets = list(zip(bounds, accumulate(found.counts), strict=True))
        family = HistogramMetricFamily(
            described.exported(self._prefix), described.text, labels=described.labels
        )
        family.add_metric(self._labels, buckets, found.total)
        return family

    def info(self, name: str, values: Mapping[str, object]) -> Metric:
        """What does not change, as labels of a 1."""
        described = METRICS[name]
        family = InfoMetricFamily(described.exported(self._prefix), described.text, labels=LABELS)
        family.add_metric(self._labels, {label: str(value) for label, value in values.items()})
        return family

    def _family(self, name: str, samples: Iterable[tuple[tuple[str, ...], float]]) -> Metric:
        described = METRICS[name]
        kind = CounterMetricFamily if described.kind == "counter" else GaugeMetricFamily
        family = kind(described.exported(self._prefix), described.text, labels=described.labels)
        for labels, value in samples:
            family.add_metric(labels, value)
        return family
