"""Which sequences the next step works on. Plain Python, no jax.

A step has one budget of tokens. Sequences that decode come first, a row for the last token and one for each draft; what
is left goes to chunks of prompts. A sequence is admitted when its prompt's pages are free and some are left over; later
it takes a page when it needs one. Where there is none, the last in rank loses its pages, waits, and computes them anew
(what the prefix cache still has of them it gets back).

Decisions rest on the calls and what steps have brought so far, and on nothing else: hosts that make the same calls take
the same decisions.
"""

import heapq
import itertools

from glm_dcp_jax.cache.allocator import OutOfPages, PageAllocator, PageTable
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.prefix_cache import Match, PrefixCache
from glm_dcp_jax.config import SchedulerConfig
from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.sequence import Sequence
from glm_dcp_jax.engine.waiting import Line, rank_of
from glm_dcp_jax.engine.work import Chunk, PageCopy, Work

_MOST_LOOKED_AT = 64
"""Sequences of the line that one step considers."""


class Scheduler:
    """Waiting and running sequences, and the pages they hold. rows: of a sequence that decodes, 1 + drafts.

    deferred: of those that wait, how many the last step passed over because something other than room was missing.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        buckets: Buckets,
        layout: Layout,
        allocator: PageAllocator,
        prefixes: PrefixCache,
        max_loads: int = 1,
    ) -> None:
        """max_loads: sequences whose prompts come from other engines at the same time; at most half of all places."""
        self._max_loads = min(max_loads, max(1, config.max_num_seqs // 2))
        self.allocator, self.prefixes = allocator, prefixes
        self._config, self._buckets, self._layout = config, buckets, layout
        self._virtual_block = layout.virtual_block
        self.rows = buckets.rows_each
        rank = rank_of(config.scheduling_policy)
        self.waiting, self.running = Line(rank), Line(rank)
        self._free_slots = list(range(config.max_num_seqs))
        self._further_drafts = max(self.rows - 2, 0)
        self._spare_pages = round(config.watermark * (allocator.num_pages - 1))
        self._promised: dict[bytes, Sequence] = {}
        self.preemptions = self.deferred = 0

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Forget a sequence, wherever it is, and free its pages. A step under way may still write to them: steps run
        in order, so whoever gets the pages next writes later."""
        self._release(sequence)
        for line in (self.running, self.waiting):
            if sequence in line:
                line.remove(sequence)

    def next(self) -> Work:
        """The next step's work, which counts as begun; empty when nothing can run now."""
        work, self.deferred = Work(), 0
        budget = self._config.max_num_batched_tokens
        preempted = self._decode(work, budget)
        budget -= len(work.decodes) * self.rows
        for sequence in self.running:
            if not sequence.prefilling or sequence.loading:
                continue
            if not self._chunk(work, sequence, budget - _tokens(work.chunks)):
                break
        if not preempted:
            self._admit(work, self._config.max_num_batched_tokens)
        for (
            sequence
        ) in work.copied_for:  # held until now, so that nobody was given what is copied in this step
            if sequence.table is not None:
                sequence.table.drop_source_page()
        return work

    def advance(self, sequence: Sequence, computed: int) -> None:
        """Steps that are over have put `computed` tokens of the sequence into the cache: others may share them."""
        keys, table = sequence.keys, sequence.table
        if keys is None or table is None:
            return
        ends_prompt = sequence.settled < sequence.prompt_length <= computed
        sequence.settled = computed
        blocks = computed // self._virtual_block
        if blocks == sequence.advanced and not ends_prompt:
            return
        sequence.extend_keys()
        self.prefixes.register(table, keys, computed, rest=ends_prompt)
        sequence.advanced = min(blocks, len(keys))
        self._keep_promises(sequence, sequence.advanced)

    def loaded(self, sequence: Sequence) -> None:
        """Another engine's cache of its prompt is in its pages, but for the last row: it decodes from there."""
        sequence.begin()
        sequence.loading, sequence.remote = False, None
        sequence.computed = sequence.cached_tokens = len(sequence.tokens) - 1
        self.advance(sequence, sequence.computed)

    def not_loaded(self, sequence: Sequence) -> None:
        """Nothing came of it: it computes its prompt itself, in the pages that it has."""
        sequence.begin()
        sequence.loading, sequence.remote = False, None

    def keep(self, sequence: Sequence) -> PageTable:
        """Let a sequence that has ended go, but not its pages: whoever takes them gives them back."""
        table = sequence.table
        assert table is not None
        self._register(sequence)
        table.drop_source_page()
        sequence.table = None
        self.remove(sequence)
        return table

    @property
    def cache_usage(self) -> float:
        """Share of usable pages that are held, 0 to 1."""
        allocator = self.allocator
        return allocator.num_used / max(allocator.num_used + allocator.num_free, 1)

    # ---- sequences that decode

    def _decode(self, work: Work, budget: int) -> bool:
        """Choose those that decode, and see to their pages. Returns whether a sequence lost its pages for it."""
        before = self.preemptions
        most = budget // self.rows
        for sequence in list(self.running):
            table, length = sequence.table, len(sequence.tokens)
            prefilling = length - sequence.computed > 1
            ends_under_way = length + sequence.in_flight >= sequence.limit
            if table is None or prefilling or ends_under_way:
                continue
            if len(work.decodes) == most:
                break
            under_way = (sequence.in_flight + 1) * self.rows - 1
            reach = self._with_drafts(sequence, length + under_way)
            if reach <= table.capacity or self._grow(sequence, reach):
                self._add_decode(work, sequence, reach)
        return self.preemptions > before

    def _add_decode(self, work: Work, sequence: Sequence, reach: int) -> None:
        work.decodes.append(sequence)
        work.reaches.append(reach)
        sequence.in_flight += 1

    def _with_drafts(self, sequence: Sequence, length: int) -> int:
        """Tokens to have pages for where `length` are computed: all drafts behind the first may have records too."""
        return min(length + self._further_drafts, sequence.limit - 1)

    def _grow(self, sequence: Sequence, length: int) -> bool:
        """Pages for `length` tokens, taken from the last in rank if need be; False if that is the sequence itself."""
        assert sequence.table is not None
        while True:
            try:
                sequence.table.grow(length)
                return True
            except OutOfPages:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    return False

    def _preempt(self, sequence: Sequence) -> None:
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting.add(sequence)
        sequence.computed, sequence.fed = 0, False
        sequence.preemptions += 1
        self.preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        """Give back what it holds; what is final of it can be found again, unless the model went wrong on it."""
        if sequence.table is not None:
            self._register(sequence)
            sequence.table.release()
            sequence.table = None
        if sequence.remote is not None:
            sequence.remote.abandon()
        sequence.loading, sequence.remote = False, None
        sequence.settled = sequence.advanced = 0
        if sequence.slot >= 0:
            heapq.heappush(self._free_slots, sequence.slot)
            sequence.slot = -1
        self._keep_promises(sequence, sequence.promised)

    def _register(self, sequence: Sequence) -> None:
        """Let others find what is final of it, unless the model went wrong on it."""
        sequence.extend_keys()
        if sequence.keys is not None and sequence.finish_reason != "error" and not sequence.loading:
            assert sequence.table is not None
            self.prefixes.register(sequence.table, sequence.keys, sequence.settled, rest=True)

    def _keep_promises(self, sequence: Sequence, blocks: int) -> None:
        """Whoever waits for the first `blocks` blocks of the sequence waits no longer."""
        for block in range(sequence.delivered, min(blocks, sequence.promised)):
            assert sequence.keys is not None
            if self._promised.get(sequence.keys[block]) is sequence:
                del self._promised[sequence.keys[block]]
        sequence.delivered = max(sequence.delivered, blocks)

    # ---- chunks of prompts

    def _chunk(self, work: Work, sequence: Sequence, budget: int) -> bool:
        """Add the sequence's next chunk, if it has room in the step beside those that are in it."""
        chunk = self._next_chunk(sequence, sequence.computed, budget)
        if chunk.count < 1 or not self._fits(work, chunk):
            return False
        self._add(work, chunk)
        return True

    def _next_chunk(self, sequence: Sequence, start: int, budget: int) -> Chunk:
        """What of a sequence goes into one step, from `start` on."""
        rest = len(sequence.tokens) - start
        count = min(rest, self._buckets.largest_chunk, budget)
        count = min(count, self._config.long_prefill_token_threshold or count)
        return Chunk(sequence, start, count, count == rest, self._first_scored(sequence, start, count))

    def _first_scored(self, sequence: Sequence, start: int, count: int) -> int:
        """The first row that was not scored yet; none for a sequence that does not report its prompt."""
        if not sequence.reports_prompt:
            return count
        return min(max(sequence.scored - start, 0), count)

    def _add(self, work: Work, chunk: Chunk) -> None:
        work.chunks.append(chunk)
        chunk.sequence.computed = chunk.end
        chunk.sequence.in_flight += chunk.is_last
        chunk.sequence.scored = max(chunk.sequence.scored, chunk.end)

    def _fits(self, work: Work, chunk: Chunk) -> bool:
        """One chunk of any length, or a few short ones of short prompts; a chunk that waits is not cut for them."""
        if not work.chunks:
            return True
        chunks = [*work.chunks, chunk]
        return (
            (chunk.is_last or chunk.count >= self._buckets.largest_chunk)
            and len(chunks) <= self._buckets.prefill_lines
            and self._share_a_step(chunks, mixed=bool(work.decodes))
        )

    def _share_a_step(self, chunks: list[Chunk], mixed: bool) -> bool:
        if len(chunks) < 2:
            return True
        rows, context = max(chunk.count for chunk in chunks), max(chunk.end for chunk in chunks)
        return self._buckets.lines_fit(rows, context, mixed)

    # ---- admission

    def _admit(self, work: Work, budget: int) -> None:
        for sequence in list(itertools.islice(self.waiting, _MOST_LOOKED_AT)):
            if len(self.running) >= self._config.max_num_seqs or sequence.in_flight:
                return
            leader = _leader(sequence)
            if leader is not None and not self._is_behind_its_prompt(leader, work):
                self.deferred += 1
                continue
            found = self._found(sequence, leader)
            if self._is_promised(sequence, len(found.pages)):
                self.deferred += 1
                continue
            if sequence.remote is not None and self._loading >= self._max_loads:
                self.deferred += 1
                continue  # it would take a place, and wait there
            comes = sequence.remote is not None and found.length < len(sequence.tokens) - 1
            begun = self._load(work, sequence, found) if comes else self._start(work, sequence, found, budget)
            if not begun:
                return

    def _is_behind_its_prompt(self, leader: Sequence, work: Work) -> bool:
        """Whether steps before this one compute the prompt."""
        if leader.table is None or leader.prefilling:
            return False
        return all(chunk.sequence is not leader for chunk in work.chunks)

    def _is_promised(self, sequence: Sequence, block: int) -> bool:
        """Whether one that runs is just computing the sequence's next block: it is computed once, and then shared."""
        keys = sequence.keys
        return keys is not None and block < len(keys) and keys[block] in self._promised

    def _found(self, sequence: Sequence, leader: Sequence | None) -> Match:
        """What the cache holds of a sequence that waits. Its last token is always computed: somebody must sample."""
        last = len(sequence.tokens) - 1
        if leader is not None:
            whole, rest = divmod(last, self._virtual_block)
            source = leader.pages[whole] if rest else None
            return Match(0, last, tuple(leader.pages[:whole]), (), source, rest)
        if sequence.keys is None or (sequence.reports_prompt and sequence.scored < sequence.prompt_length):
            return Match()
        sequence.extend_keys()  # steps that were under way when it lost its pages brought it tokens
        found = self.prefixes.match(sequence.keys, last)
        length = self._with_drafts(sequence, len(sequence.tokens))
        # The page that is copied is held besides the sequence's own: where that is one too many, go without.
        fits = self.prefixes.pages_needed(found, length) <= self.allocator.num_free
        return found if fits else found.without_source

    def _start(self, work: Work, sequence: Sequence, found: Match, budget: int) -> bool:
        """Give a waiting sequence its pages, and its first chunk or row, if all of that can be had."""
        left = budget - _tokens(work.chunks) - self.rows * len(work.decodes)
        decodes = len(sequence.tokens) - found.length == 1
        chunk = self._next_chunk(sequence, found.length, left)
        fits = self._share_a_step(work.chunks, mixed=True) if decodes else self._fits(work, chunk)
        if left < (self.rows if decodes else 1) or not fits:
            return False
        table = self._table(sequence, found)
        if table is None:
            return False
        self._enter(sequence, table, found)
        sequence.begin()
        if sequence.remote is not None:  # others computed the same prompt meanwhile
            sequence.remote.abandon()
            sequence.remote = None
        if table.source_page is not None:
            work.copies.append(PageCopy(table.source_page, table.pages[len(found.pages)]))
            work.copied_for.append(sequence)
        if decodes:
            self._add_decode(work, sequence, self._with_drafts(sequence, len(sequence.tokens)))
        else:
            self._add(work, chunk)
        return True

    @property
    def _loading(self) -> int:
        return sum(sequence.loading for sequence in self.running)

    def _load(self, work: Work, sequence: Sequence, found: Match) -> bool:
        """Give a waiting sequence pages for what comes from another engine, if they can be had."""
        table = self._table(sequence, whole := found.without_source)
        if table is None:
            return False
        self._enter(sequence, table, whole)
        sequence.loading = True
        work.loads.append(sequence)
        return True

    def _table(self, sequence: Sequence, found: Match) -> PageTable | None:
        """Pages for all of the sequence's tokens, beginning with those that were found; None if too few are free."""
        spare = self._spare_pages if len(self.running) else 0
        length = self._with_drafts(sequence, len(sequence.tokens))
        if self.prefixes.pages_needed(found, length) + spare > self.allocator.num_free:
            return None
        if _leader(sequence) is None:
            table = self.prefixes.acquire(found)
        else:
            table = PageTable(self.allocator, self._layout)
            table.begin(found.pages, found.source_page)
        table.grow(length)
        return table

    def _enter(self, sequence: Sequence, table: PageTable, found: Match) -> None:
        self.waiting.remove(sequence)
        self.running.add(sequence)
        sequence.table, sequence.slot = table, heapq.heappop(self._free_slots)
        sequence.computed, sequence.advanced, sequence.fed = found.length, 0, False
        if not sequence.preemptions:
            sequence.cached_tokens = found.length
        keys = sequence.keys
        if keys is not None:
            sequence.delivered, sequence.promised = len(found.pages), len(keys)
            for block in range(len(found.pages), len(keys)):
                self._promised.setdefault(keys[block], sequence)


def _leader(sequence: Sequence) -> Sequence | None:
    """Whose prompt it shares, as long as that one has not ended or lost its pages."""
    leader = sequence.leader
    gone = leader is None or leader.finish_reason is not None or leader.preemptions or sequence.preemptions
    return None if gone else leader


def _tokens(chunks: list[Chunk]) -> int:
    return sum(chunk.count for chunk in chunks)
