"""Which static shapes steps are compiled for: a ladder each of requests, rows and context."""

from dataclasses import dataclass

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import SchedulerConfig
from glm_dcp_jax.engine.steps import StepShape

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
    """The shapes that an engine's steps come in. Contexts are in tokens, and compiled as page-table widths."""

    layout: Layout
    decode_requests: tuple[int, ...]
    prefill_rows: tuple[int, ...]
    prefill_lines: int
    decode_contexts: tuple[int, ...]
    prefill_contexts: tuple[int, ...]

    @staticmethod
    def of(scheduler: SchedulerConfig, max_model_len: int, layout: Layout) -> "Buckets":
        """Ladders up to the scheduler's limits and the longest sequence."""
        chunk = min(scheduler.max_num_batched_tokens, max_model_len)
        return Buckets(
            layout,
            _given(scheduler.precompile_bs_paddings, scheduler.max_num_seqs)
            or ladder(1, scheduler.max_num_seqs),
            _given(scheduler.precompile_token_paddings, chunk) or ladder(min(_SMALLEST_ROWS, chunk), chunk),
            min(_PREFILL_LINES, scheduler.max_num_seqs),
            ladder(min(_SMALLEST_DECODE_CONTEXT, max_model_len), max_model_len),
            ladder(min(_SMALLEST_PREFILL_CONTEXT, max_model_len), max_model_len),
        )

    @property
    def largest_chunk(self) -> int:
        """Prompt tokens that one prefill step takes at most."""
        return self.prefill_rows[-1]

    def lines_fit(self, rows: int, context: int) -> bool:
        """Whether prefill_lines chunks of `rows` tokens that end within `context` may share a step.

        They must fit its token budget, padded to their bucket, and lie in the shortest context: steps for several long
        prompts would be many more programs for little gain.
        """
        padded = rung(self.prefill_rows, rows)
        short = context <= self.prefill_contexts[0]
        return self.prefill_lines > 1 and short and padded * self.prefill_lines <= self.largest_chunk

    def decode(self, requests: int, context: int) -> StepShape:
        """The step for `requests` requests of at most `context` tokens, the new one included."""
        count = rung(self.decode_requests, requests)
        return StepShape("decode", count, 1, self._pages(rung(self.decode_contexts, context)), count)

    def prefill(
        self, requests: int, rows: int, context: int, all_logits: bool = False, capture: bool = False
    ) -> StepShape:
        """The step for `requests` chunks of at most `rows` tokens that end within `context` tokens."""
        count = 1 if requests == 1 else self.prefill_lines
        size = rung(self.prefill_rows, rows)
        pages = self._pages(rung(self.prefill_contexts, context))
        return StepShape("prefill", count, size, pages, count * size if all_logits else count, capture)

    def all(self) -> list[StepShape]:
        """Every shape that serving can ask for, for warm-up."""
        decodes = [
            self.decode(count, context) for count in self.decode_requests for context in self.decode_contexts
        ]
        prefills = [
            self.prefill(count, rows, context)
            for below, rows in zip((0, *self.prefill_rows), self.prefill_rows, strict=False)
            for context in self.prefill_contexts
            for count in ((1, self.prefill_lines) if self.lines_fit(rows, context) else (1,))
            if context > below  # a chunk of this bucket is longer than the one below
        ]
        return list(dict.fromkeys(decodes + prefills))

    def _pages(self, context: int) -> int:
        return self.layout.pages_for(context)
