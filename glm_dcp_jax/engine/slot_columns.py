"""What a step's arrays say of a running sequence and steps do not change: a row for each slot, written once.

A sequence keeps its slot while it runs, so the arrays of a step are rows of these, taken all at once: what a step costs
the host per sequence is one look at its page table.
"""

from collections.abc import Sequence as Ids

import numpy as np

from glm_dcp_jax.cache.allocator import PageTable
from glm_dcp_jax.engine.sampling import RowParams, row_params
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.sequence import Sequence


class SlotColumns:
    """Rows for so many sequences, and a last one that is nobody's: greedy, without pages, with nothing to compute.

    Arrays have a row per slot, R = sequences + 1. prompt_length, limit: [R] int32. params: columns of [R]. is_random,
    is_filtered, wants_logprobs, has_rules: [R] bool. page_counts: [R] int32; pages: [R, P] int32, the null page behind
    a sequence's own. To read; only `note` changes them.
    """

    def __init__(self, sequences: int, pages: int) -> None:
        """pages: of the longest sequence."""
        rows = sequences + 1
        self.idle = sequences
        self.prompt_length, self.limit = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
        self.params: RowParams = row_params([], rows)
        self.is_random, self.is_filtered = np.zeros(rows, bool), np.zeros(rows, bool)
        self.wants_logprobs, self.has_rules = np.zeros(rows, bool), np.zeros(rows, bool)
        self.page_counts, self.pages = np.zeros(rows, np.int32), np.zeros((rows, pages), np.int32)
        self._tables: list[PageTable | None] = [None] * rows
        self._counts = [0] * rows

    def note(self, sequences: Ids[Sequence]) -> None:
        """Write the rows of those that came to run, and add the pages that others took. All must have a slot."""
        tables, counts = self._tables, self._counts
        for sequence in sequences:
            slot, table = sequence.slot, sequence.table
            assert table is not None
            if tables[slot] is not table:  # each entry among those that run brings a table of its own
                self._enter(sequence, slot, table)
            if counts[slot] != len(table.pages):
                self.pages[slot, counts[slot] : len(table.pages)] = table.pages[counts[slot] :]
                self.page_counts[slot] = counts[slot] = len(table.pages)

    def shown_pages(self, slots: np.ndarray, width: int) -> np.ndarray:
        """The first `width` pages of each slot, [len(slots), width] int32."""
        shown = np.zeros((len(slots), width), np.int32)
        most = min(width, self.pages.shape[1])
        shown[:, :most] = self.pages[slots, :most]
        return shown

    def params_of(self, slots: np.ndarray) -> RowParams:
        """Sampling parameters of each slot; step is 0."""
        return RowParams(*(column[slots] for column in self.params))

    def _enter(self, sequence: Sequence, slot: int, table: PageTable) -> None:
        params: SamplingParams = sequence.params
        self._tables[slot], self._counts[slot] = table, 0
        self.pages[slot], self.page_counts[slot] = 0, 0
        self.prompt_length[slot], self.limit[slot] = sequence.prompt_length, sequence.limit
        for column, (value,) in zip(self.params, row_params([(params, sequence.seed, 0)], 1), strict=True):
            column[slot] = value
        self.is_random[slot], self.is_filtered[slot] = not params.greedy, params.filtered
        self.wants_logprobs[slot], self.has_rules[slot] = (
            params.logprobs is not None,
            sequence.rules is not None,
        )
