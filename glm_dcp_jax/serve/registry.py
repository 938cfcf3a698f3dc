"""Where a server's Prometheus metrics are kept, beside those of its process."""

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
)


def make_registry() -> CollectorRegistry:
    """With `process_` and `python_` metrics of this process, and no `_created` series beside counters."""
    disable_created_metrics()  # of the whole process: a registry has no such switch
    registry = CollectorRegistry()
    for collector in (ProcessCollector, PlatformCollector, GCCollector):
        collector(registry=registry)
    return registry
