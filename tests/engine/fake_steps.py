"""Steps without a model: the scheduler's work is carried out, its rules are checked, tokens are invented."""

import random
from collections import deque

from glm_dcp_jax.cache.allocator import PageAllocator
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.prefix_cache import PrefixCache
from glm_dcp_jax.config import SchedulerConfig
from glm_dcp_jax.engine.batch import shape_of
from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.scheduler import Scheduler
from glm_dcp_jax.engine.sequence import Sequence
from glm_dcp_jax.engine.work import Work

LAYOUT = Layout(block_size=4, world=2)  # pages of 8 tokens
TOKEN = 9


class FakeEngine:
    """drafts: per request and step, of which any number is accepted. ahead: steps that start before one is read.

    works: of all steps so far. loads: sequences that were given pages for another engine's cache. contents: page -> the
    tokens that steps have put there.
    """

    def __init__(
        self,
        pages: int = 100,
        drafts: int = 0,
        ahead: int = 0,
        prefix_caching: bool = False,
        max_model_len: int = 64,
        loads: int = 4,
        **settings: object,
    ) -> None:
        settings = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "watermark": 0.0} | settings
        self.config = SchedulerConfig(**settings)
        self.buckets = Buckets.of(self.config, max_model_len, LAYOUT, drafts)
        self.known = set(self.buckets.all())
        allocator = PageAllocator(pages + 1)
        self.prefixes = PrefixCache(allocator, LAYOUT, lookahead=int(drafts > 0), enabled=prefix_caching)
        self.scheduler = Scheduler(self.config, self.buckets, LAYOUT, allocator, self.prefixes, loads)
        self.ahead, self.random = ahead, random.Random(0)
        self.works: list[Work] = []
        self.loads: list[Sequence] = []
        self.finished: list[Sequence] = []
        self.flights: deque[tuple[Work, dict[Sequence, int], set[Sequence]]] = deque()
        self.contents: dict[int, list[int]] = {}
        self.arrivals = 0

    def sequence(self, prompt: int | list[int], output: int = 4, **fields: object) -> Sequence:
        """A sequence of this prompt (or one of so many tokens that no other has) and output length; not added yet."""
        self.arrivals += 1
        tokens = prompt if isinstance(prompt, list) else [1000 * self.arrivals + at for at in range(prompt)]
        keys = self.prefixes.keys(tokens)
        limit = len(tokens) + output
        params = SamplingParams()
        return Sequence(
            0, list(tokens), len(tokens), limit, 0, params, arrival=self.arrivals, keys=keys, **fields
        )

    def add(self, *sequences: Sequence) -> None:
        for each in sequences:
            self.scheduler.add(each)

    def step(self) -> Work:
        """Start a step and read what is due; its work, empty if there is none."""
        work = self.scheduler.next()
        self.check(work)
        self.loads += work.loads
        if not work.is_empty:
            self.works.append(work)
            self.compute(work)
            fed = {sequence for sequence in work.decodes if sequence.fed}
            for sequence in work.drawing:
                sequence.fed = True
            self.flights.append((work, {each: each.preemptions for each in work.sequences}, fed))
        while len(self.flights) > (0 if work.is_empty else self.ahead):
            self.land()
        return work

    def run(self) -> list[Work]:
        """Steps until there is no work; all of them so far."""
        while not self.step().is_empty or self.flights or len(self.scheduler.waiting):
            assert len(self.works) < 10_000, "no end of work"
        return self.works

    def compute(self, work: Work) -> None:
        """Note which tokens the step puts on which page. What is only drawn by steps under way is not known yet."""
        for source, target in work.copies:
            self.contents[target] = list(self.contents[source])
        for chunk in work.chunks:
            for position in range(chunk.start, chunk.end):
                self.write(chunk.sequence, position, chunk.sequence.tokens[position])
        for sequence, reach in zip(work.decodes, work.reaches, strict=True):
            first = len(sequence.tokens) - 1
            for position in range(first, reach):
                known = position < len(sequence.tokens)
                self.write(sequence, position, sequence.tokens[position] if known else TOKEN)

    def write(self, sequence: Sequence, position: int, token: int) -> None:
        page, offset = sequence.pages[position // LAYOUT.virtual_block], position % LAYOUT.virtual_block
        assert self.scheduler.allocator.ref_count(page) == 1, "a shared page is written to"
        kept = self.contents.setdefault(page, [])[:offset]
        self.contents[page] = [*kept, *[0] * (offset - len(kept)), token]

    def land(self) -> None:
        work, epochs, fed = self.flights.popleft()
        for sequence in work.decodes:  # one that the device knew nothing of had no drafts
            count = 1 + self.random.randint(0, self.scheduler.rows - 1 if sequence in fed else 0)
            self.take(sequence, epochs[sequence], count, None)
        for chunk in work.chunks:
            self.take(chunk.sequence, epochs[chunk.sequence], int(chunk.is_last), chunk.end)

    def bring(self, sequence: Sequence) -> None:
        """Another engine's cache of the prompt comes, but for its last row."""
        for position in range(sequence.computed, sequence.prompt_length - 1):
            self.write(sequence, position, sequence.tokens[position])
        self.scheduler.loaded(sequence)

    def take(self, sequence: Sequence, epoch: int, count: int, end: int | None) -> None:
        sequence.in_flight -= count > 0
        if sequence.finish_reason:
            return
        kept = epoch == sequence.preemptions
        if kept and end is None:
            sequence.computed += count
        for _ in range(count):
            sequence.append(TOKEN, frozenset())
            if sequence.finish_reason:
                break
        if kept:
            self.scheduler.advance(sequence, len(sequence.tokens) - 1 if end is None else end)
        if sequence.finish_reason:
            self.scheduler.remove(sequence)
            self.finished.append(sequence)

    def check(self, work: Work) -> None:
        """What holds of every step."""
        scheduler, config = self.scheduler, self.config
        self.prefixes.check()
        assert len(scheduler.running) <= config.max_num_seqs
        slots = [each.slot for each in scheduler.running]
        assert len(set(slots)) == len(slots) and all(0 <= slot < config.max_num_seqs for slot in slots)
        held = {page for each in scheduler.running for page in each.pages}
        assert len(held) == scheduler.allocator.num_used, "pages are lost"
        if work.is_empty:
            return
        assert shape_of(work, self.buckets) in self.known
        parts = work.sequences
        assert len(set(parts)) == len(parts) and set(parts) <= set(scheduler.running)
        tokens = scheduler.rows * len(work.decodes) + sum(chunk.count for chunk in work.chunks)
        assert tokens <= config.max_num_batched_tokens
        for sequence, reach in zip(work.decodes, work.reaches, strict=True):
            assert (
                len(sequence.tokens)
                <= reach
                <= min(LAYOUT.virtual_block * len(sequence.pages), sequence.limit - 1)
            )
        for chunk in work.chunks:
            assert chunk.count >= 1 and chunk.end <= LAYOUT.virtual_block * len(chunk.sequence.pages)
            copied = {copy.target: copy.source for copy in work.copies}
            for position in range(chunk.start):
                page = chunk.sequence.pages[position // LAYOUT.virtual_block]
                held_token = self.contents[copied.get(page, page)][position % LAYOUT.virtual_block]
                assert held_token == chunk.sequence.tokens[position], "a page holds other tokens"


def kinds(works: list[Work]) -> str:
    """p: chunks alone, d: decode alone, m: both."""
    return "".join("m" if work.decodes and work.chunks else "d" if work.decodes else "p" for work in works)


def counts(works: list[Work]) -> list[tuple[int, ...]]:
    """Tokens of the chunks of each step that has any."""
    return [tuple(chunk.count for chunk in work.chunks) for work in works if work.chunks]
