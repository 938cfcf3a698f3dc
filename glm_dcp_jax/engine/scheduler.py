"""First come, first served: which sequences the next step works on. Plain Python, no jax.

A sequence is admitted when pages for its longest possible length are free, so nothing that runs is ever short of
pages. Prefill and decode steps take turns while there is work for both.
"""

from collections import deque
from dataclasses import dataclass
from typing import Literal

from glm_dcp_jax.cache.allocator import PageAllocator, PageTable
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.sequence import Sequence


@dataclass(frozen=True)
class Work:
    """One step: a chunk of each sequence for prefill (its length in `chunks`), one token of each for decode."""

    kind: Literal["prefill", "decode"]
    sequences: tuple[Sequence, ...]
    chunks: tuple[int, ...]


class Scheduler:
    """Waiting and running sequences, and the pages they hold."""

    def __init__(self, buckets: Buckets, layout: Layout, num_pages: int, max_num_seqs: int) -> None:
        self.allocator = PageAllocator(num_pages)
        self._buckets = buckets
        self._layout = layout
        self._max_num_seqs = max_num_seqs
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self._prefilled_last = False

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its pages."""
        if sequence.table is not None:
            sequence.table.release()
            sequence.table = None
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def next(self) -> Work | None:
        """The next step's work; None when nothing runs or waits."""
        self._admit()
        prefills = [sequence for sequence in self.running if sequence.prefilling]
        decodes = [sequence for sequence in self.running if not sequence.prefilling]
        if prefills and not (decodes and self._prefilled_last):
            self._prefilled_last = True
            return self._prefill(prefills)
        self._prefilled_last = False
        return Work("decode", tuple(decodes), (1,) * len(decodes)) if decodes else None

    @property
    def cache_usage(self) -> float:
        """Share of usable pages that are held, 0 to 1."""
        allocator = self.allocator
        return allocator.num_used / max(allocator.num_used + allocator.num_free, 1)

    def _admit(self) -> None:
        while self.waiting and len(self.running) < self._max_num_seqs:
            sequence = self.waiting[0]
            if self._layout.pages_for(sequence.limit) > self.allocator.num_free:
                return
            self.waiting.popleft()
            sequence.table = PageTable(self.allocator, self._layout)
            sequence.table.grow(sequence.limit)
            self.running.append(sequence)

    def _prefill(self, prefills: list[Sequence]) -> Work:
        """The first sequence's chunk; as many short ones behind it as one step takes."""
        chunk = lambda sequence: min(  # noqa: E731
            len(sequence.tokens) - sequence.computed, self._buckets.largest_chunk
        )
        chosen = [prefills[0]]
        for sequence in prefills[1 : self._buckets.prefill_lines]:
            members = (*chosen, sequence)
            longest = max(chunk(member) for member in members)
            context = max(member.computed + chunk(member) for member in members)
            if not self._buckets.lines_fit(longest, context):
                break
            chosen.append(sequence)
        return Work("prefill", tuple(chosen), tuple(chunk(sequence) for sequence in chosen))
