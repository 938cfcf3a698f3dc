"""What decode steps exchanged between the ranks of a DCP group, counted without making a step wait."""

import logging
import threading
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_log = logging.getLogger(__name__)

_READ_TOGETHER = 16
"""Steps whose counts are read from the device at once, when all but the last have long been computed."""
_COMPARE_EVERY = 32
"""Steps of which one has its selections compared across devices."""

_REMEMBERED = 16
"""Compared steps whose hashes are kept for processes that are a little ahead or behind."""


@dataclass(frozen=True)
class ExchangeTotals:
    """Totals since the start. steps: decode steps by the path they took. received: bytes that the policy expects each
    device to get from others in these steps (`parallel.policy.Estimate`): computed from their shapes, not measured.

    entries: selected positions of committed tokens, over Full layers and rows. records: those that travelled, each once
    per request and Full layer. overflows: groups of layers whose rest went in rounds. compared, diverged: steps whose
    selections were compared across devices, and those that differed, which makes their tokens wrong.
    """

    steps: dict[str, int] = field(default_factory=dict)
    received: int = 0
    entries: int = 0
    records: int = 0
    overflows: int = 0
    compared: int = 0
    diverged: int = 0

    @property
    def unique_ratio(self) -> float:
        """Records that travelled for each entry: 1 where no two rows of a request select the same; 0 before any did."""
        return self.records / self.entries if self.entries else 0.0


class ExchangeStats:
    """Counts steps; may be read from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._steps: Counter[str] = Counter()
        self._received = 0
        self._moved = np.zeros(3, np.int64)
        self._unread: list[Any] = []
        self._hashes: Any = None
        self._compared = self._diverged = 0
        self._history: deque[tuple[int, int]] = deque([(0, 0)], _REMEMBERED)

    def add(self, path: str, received: int, moved: Any, selection_hash: Any) -> None:
        """One decode step. moved: its parallel.attention.Moved. selection_hash: [devices], of what each selected.

        Both may still be computed.
        """
        with self._lock:
            if self._steps.total() % _COMPARE_EVERY == 0:
                self._hashes = selection_hash
            self._steps[path] += 1
            self._received += received
            self._unread.append(moved)
            if len(self._unread) >= _READ_TOGETHER:
                self._read()

    def totals(self) -> ExchangeTotals:
        """Of all steps so far; waits for the last one."""
        with self._lock:
            self._read()
            entries, records, overflows = self._moved.tolist()
            return ExchangeTotals(
                dict(self._steps),
                self._received,
                entries,
                records,
                overflows,
                self._compared,
                self._diverged,
            )

    @property
    def latest(self) -> tuple[int, int]:
        """How many steps' selections were compared, and the last one's hash, for `agrees` in another process."""
        return self._history[-1]

    def agrees(self, latest: tuple[int, int]) -> bool:
        """Whether another process's devices selected the same in that step; True if it is not at hand here."""
        return dict(self._history).get(latest[0], latest[1]) == latest[1]

    def _read(self) -> None:
        for moved in self._unread:
            self._moved += np.array([np.asarray(count) for count in moved], np.int64)
        self._unread.clear()
        if self._hashes is not None:
            self._compare(_here(self._hashes))
            self._hashes = None

    def _compare(self, hashes: np.ndarray) -> None:
        self._compared += 1
        self._history.append((self._compared, int(hashes[0])))
        if (hashes != hashes[0]).any():
            self._diverged += 1
            _log.error(
                "devices selected different positions (hashes %s): exchanges rest on equal selections, so tokens are "
                "wrong from here on; restart the server, and check its GPUs if this comes back",
                hashes.tolist(),
            )


def _here(hashes: Any) -> np.ndarray:
    """Those of this process's devices."""
    shards = getattr(hashes, "addressable_shards", None)
    return (
        np.asarray(hashes) if shards is None else np.concatenate([np.asarray(shard.data) for shard in shards])
    )
