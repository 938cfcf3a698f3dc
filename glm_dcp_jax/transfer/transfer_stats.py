"""What transfers came to, counted since the start."""

import threading
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass, field

from glm_dcp_jax.transfer.loads import Load, LoadFailed, Times

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 5.0, 10.0, 30.0, 60.0)
BYTES = tuple(float(2**power) for power in range(11, 40, 2))
RUNS = (1.0, 10.0, 20.0, 30.0, 50.0, 75.0, 100.0, 200.0, 400.0, 1e3, 2e3, 4e3, 1e4, 2e4, 5e4, 1e5, 1e6)
"""Bounds of the buckets: vLLM's, and further ones at their ends."""

_RECENT = 256


@dataclass
class Distribution:
    """Observations by upper bound: counts[i] of at most bounds[i], and of any size at the end. Not cumulative."""

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def __post_init__(self) -> None:
        self.counts = self.counts or [0] * (len(self.bounds) + 1)

    def add(self, value: float) -> None:
        """One more observation."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def copy(self) -> "Distribution":
        """As of now."""
        return Distribution(self.bounds, list(self.counts), self.total)


@dataclass(frozen=True)
class Received:
    """A consumer's counts at one moment. failed: by kind. wasted_bytes: received for loads that then failed or were
    cancelled. unheard: messages that no producer answered. phases: seconds in all, see Times; recent: of each of the
    last loads."""

    seconds: Distribution
    bytes: Distribution
    runs: Distribution
    failed: dict[str, int]
    cancelled: int
    wasted_bytes: int
    unheard: int
    phases: dict[str, float]
    recent: list[dict[str, float]]


class ConsumerStats:
    """Counts of loads, from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seconds, self._bytes, self._runs = (
            Distribution(SECONDS),
            Distribution(BYTES),
            Distribution(RUNS),
        )
        self._failed: dict[str, int] = {}
        self._phases: dict[str, float] = dict.fromkeys(Times().phases, 0.0)
        self._recent: deque[dict[str, float]] = deque(maxlen=_RECENT)
        self._cancelled = self._wasted_bytes = self._unheard = 0

    def add(self, load: Load, failure: LoadFailed | None) -> None:
        """A load has ended."""
        with self._lock:
            if failure is None:
                self._seconds.add(load.times.confirmed - load.times.begun)
                self._bytes.add(load.received_bytes)
                self._runs.add(load.runs)
                self._recent.append(load.times.phases)
                for phase, seconds in load.times.phases.items():
                    self._phases[phase] += seconds
                return
            self._wasted_bytes += load.received_bytes
            if load.is_cancelled():
                self._cancelled += 1
            else:
                self._failed[failure.kind] = self._failed.get(failure.kind, 0) + 1

    def count_unheard(self) -> None:
        """A producer did not hear something."""
        with self._lock:
            self._unheard += 1

    def now(self) -> Received:
        """The counts at this moment."""
        with self._lock:
            return Received(
                self._seconds.copy(),
                self._bytes.copy(),
                self._runs.copy(),
                dict(self._failed),
                self._cancelled,
                self._wasted_bytes,
                self._unheard,
                dict(self._phases),
                list(self._recent),
            )
