"""Which static shapes steps are compiled for: a ladder each of requests, rows and context."""

from dataclasses import dataclass

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import SchedulerConfig
from glm_dcp_jax.engine.steps import BlockShape, StepShape

_STEP = 4
"""Neighbouring rungs differ by this factor: few programs, at the price of padding."""
_SMALLEST_ROWS = 16
_SMALLEST_PREFILL_CONTEXT = 1024
_SMALLEST_DECODE_CONTEXT = 4096
_PREFILL_LINES = 4
"""Prompts that one prefill step may take together, when their chunks are short."""


def ladder(smallest: int, largest: int) -> tuple[int, ...]:
    """smallest, 4 * smallest, ... up to and including largest (which need not be a power)."""
    rungs = []
    while smallest < largest:
        rungs.append(smallest)
        smallest *= _STEP
    return (*rungs, largest)


def _given(sizes: tuple[int, ...] | None, largest: int) -> tuple[int, ...]:
    """The user's sizes below the limit, and the limit; empty when there are none."""
    return () if sizes is None else (*(size for size in sizes if size < largest), largest)


def rung(rungs: tuple[int, ...], need: int) -> int:
    """The lowest rung of at least `need`. Raises ValueError if there is none."""
    for size in rungs:
        if size >= need:
            return size
    raise ValueError(f"no bucket holds {need}; the largest is {rungs[-1]}")


@dataclass(frozen=True)
class Buckets:
    """The shapes that an engine's steps come in. Contexts are in tokens, and compiled as page-table widths.

    rows_each: rows of a request that decodes: its last token, and its drafts.
    """

    layout: Layout
    decode_requests: tuple[int, ...]
    rows_each: int
    prefill_rows: tuple[int, ...]
    prefill_lines: int
    decode_contexts: tuple[int, ...]
    prefill_contexts: tuple[int, ...]

    @staticmethod
    def of(scheduler: SchedulerConfig, max_model_len: int, layout: Layout, drafts: int = 0) -> "Buckets":
        """Ladders up to the scheduler's limits and the longest sequence."""
        chunk = min(scheduler.max_num_batched_tokens, max_model_len)
        return Buckets(
            layout,
            _given(scheduler.precompile_bs_paddings, scheduler.max_num_seqs)
            or ladder(1, scheduler.max_num_seqs),
            1 + drafts,
            _given(scheduler.precompile_token_paddings, chunk) or ladder(min(_SMALLEST_ROWS, chunk), chunk),
            min(_PREFILL_LINES, scheduler.max_num_seqs),
            ladder(min(_SMALLEST_DECODE_CONTEXT, max_model_len), max_model_len),
            ladder(min(_SMALLEST_PREFILL_CONTEXT, max_model_len), max_model_len),
        )

    @property
    def largest_chunk(self) -> int:
        """Prompt tokens that one step takes of a sequence at most."""
        return self.prefill_rows[-1]

    def lines_fit(self, rows: int, context: int, mixed: bool = False) -> bool:
        """Whether prefill_lines chunks of `rows` tokens that end within `context` may share a step.

        They must fit its token budget, padded to their bucket, and lie in the shortest context: steps for several long
        prompts would be many more programs for little gain. mixed: requests decode in the same step.
        """
        padded = rung(self._rows(mixed), rows)
        short = context <= self.prefill_contexts[0]
        return self.prefill_lines > 1 and short and padded * self.prefill_lines <= self.largest_chunk

    def decode(self, requests: int, context: int) -> StepShape:
        """The step for `requests` requests of at most `context` tokens, the new ones included."""
        block = self._decode_block(self.decode_requests, self.decode_contexts, requests, context)
        return StepShape((block,), block.total_rows)

    def prefill(
        self, requests: int, rows: int, context: int, all_logits: bool = False, capture: bool = False
    ) -> StepShape:
        """The step for `requests` chunks of at most `rows` tokens that end within `context` tokens."""
        block = self._prefill_block(self.prefill_rows, self.prefill_contexts, requests, rows, context)
        return StepShape((block,), block.total_rows if all_logits else block.requests, capture)

    def mixed(self, decodes: int, decode_context: int, chunks: int, rows: int, context: int) -> StepShape:
        """The step for requests that decode and chunks of prompts together; its sizes are coarser, to be few.

        Beside a chunk a few more rows that decode cost little: there is one size of them.
        """
        most = self.decode_requests[-1:]
        decode = self._decode_block(most, _coarse(self.decode_contexts), decodes, decode_context)
        prefill = self._prefill_block(self._rows(True), self._contexts(True), chunks, rows, context)
        return StepShape((decode, prefill), decode.total_rows + prefill.requests)

    def all(self) -> list[StepShape]:
        """Every shape that serving can ask for, for warm-up."""
        decodes = [
            self.decode(count, context) for count in self.decode_requests for context in self.decode_contexts
        ]
        prefills = [
            self.prefill(lines, rows, context) for lines, rows, context in self._prefills(mixed=False)
        ]
        mixed = [
            self.mixed(1, decode_context, lines, rows, context)
            for decode_context in _coarse(self.decode_contexts)
            for lines, rows, context in self._prefills(mixed=True)
        ]
        return list(dict.fromkeys(decodes + prefills + mixed))

    def _prefills(self, mixed: bool) -> list[tuple[int, int, int]]:
        """Lines, rows and context of every prefill block."""
        all_rows = self._rows(mixed)
        return [
            (lines, rows, context)
            for below, rows in zip((0, *all_rows), all_rows, strict=False)
            for context in self._contexts(mixed)
            if context > below  # a chunk of this bucket is longer than the one below
            for lines in ((1, self.prefill_lines) if self._several(below, context, mixed) else (1,))
        ]

    def _several(self, below: int, context: int, mixed: bool) -> bool:
        """Whether a block whose chunks have more than `below` rows, in this bucket of contexts, may hold several."""
        shortest = self.prefill_contexts[0]
        first = context == next(each for each in self._contexts(mixed) if each >= shortest)
        return first and self.lines_fit(below + 1, min(context, shortest), mixed)

    def _rows(self, mixed: bool) -> tuple[int, ...]:
        return _coarse(self.prefill_rows)[-2:] if mixed else self.prefill_rows

    def _contexts(self, mixed: bool) -> tuple[int, ...]:
        return _coarse(self.prefill_contexts) if mixed else self.prefill_contexts

    def _decode_block(
        self, all_requests: tuple[int, ...], contexts: tuple[int, ...], requests: int, context: int
    ) -> BlockShape:
        pages = self.layout.pages_for(rung(contexts, context))
        return BlockShape("decode", rung(all_requests, requests), self.rows_each, pages)

    def _prefill_block(
        self, all_rows: tuple[int, ...], contexts: tuple[int, ...], chunks: int, rows: int, context: int
    ) -> BlockShape:
        pages = self.layout.pages_for(rung(contexts, context))
        return BlockShape("prefill", 1 if chunks == 1 else self.prefill_lines, rung(all_rows, rows), pages)


def _coarse(rungs: tuple[int, ...]) -> tuple[int, ...]:
    """Every other rung, the last one among them."""
    return rungs[::-1][::2][::-1]
