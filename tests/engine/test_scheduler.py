"""The scheduler with a fake model behind it: order, reservation, fairness, and pages that always come back."""

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import SchedulerConfig
from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.scheduler import Scheduler, Work
from glm_dcp_jax.engine.sequence import Sequence

MAX_MODEL_LEN = 64
LAYOUT = Layout(block_size=4, world=2)  # pages of 8 tokens


def sequence(prompt: int, output: int = 4) -> Sequence:
    """A sequence of this many prompt and output tokens."""
    return Sequence(0, [7] * prompt, prompt, prompt + output, 0, SamplingParams(), None)


class FakeEngine:
    """Runs the scheduler's work without computing anything: every finished prompt and every decode gives a token."""

    def __init__(self, pages: int = 100, max_num_seqs: int = 4, chunk: int = 16) -> None:
        config = SchedulerConfig(max_num_seqs=max_num_seqs, max_num_batched_tokens=chunk)
        buckets = Buckets.of(config, MAX_MODEL_LEN, LAYOUT)
        self.scheduler = Scheduler(buckets, LAYOUT, pages + 1, max_num_seqs)
        self.max_num_seqs, self.chunk, self.pages = max_num_seqs, chunk, pages
        self.works: list[Work] = []
        self.finished: list[Sequence] = []

    def add(self, *sequences: Sequence) -> None:
        for each in sequences:
            self.scheduler.add(each)

    def step(self) -> Work | None:
        work = self.scheduler.next()
        self.check(work)
        if work is None:
            return None
        self.works.append(work)
        for each, chunk in zip(work.sequences, work.chunks, strict=True):
            each.computed += chunk
            assert each.computed <= len(each.tokens)
            if each.computed == len(each.tokens):
                each.append(9, frozenset())
                if each.finish_reason:
                    self.scheduler.remove(each)
                    self.finished.append(each)
        return work

    def run(self) -> list[Work]:
        """Steps until there is no work; all of them so far."""
        while self.step() is not None:
            assert len(self.works) < 10_000, "no end of work"
        return self.works

    def check(self, work: Work | None) -> None:
        """What holds before every step."""
        running, allocator = self.scheduler.running, self.scheduler.allocator
        allocator.check()
        assert len(running) <= self.max_num_seqs
        held = [page for each in running for page in each.pages]
        assert len(held) == len(set(held)) == allocator.num_used, "pages are shared or lost"
        for each in running:
            assert len(each.pages) == LAYOUT.pages_for(each.limit), "room for its longest length, and no more"
        if work is None:
            assert not running and not self.scheduler.waiting
            return
        assert work.sequences and set(work.sequences) <= set(running)
        assert len(set(work.sequences)) == len(work.sequences) == len(work.chunks)
        assert min(work.chunks) >= 1
        if work.kind == "decode":
            assert set(work.chunks) == {1}
        else:
            assert sum(work.chunks) <= self.chunk


def kinds(works: list[Work]) -> str:
    return "".join(work.kind[0] for work in works)


class TestOrder:
    def test_first_come_first_served(self):
        engine = FakeEngine(max_num_seqs=1)
        requests = [sequence(3) for _ in range(4)]
        engine.add(*requests)
        engine.run()
        assert engine.finished == requests

    def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones_behind_it(self):
        engine = FakeEngine(pages=6)
        running, large, small = sequence(20, 12), sequence(30, 10), sequence(2, 2)
        engine.add(running, large, small)
        engine.step()
        assert engine.scheduler.running == [running] and list(engine.scheduler.waiting) == [large, small]
        engine.run()
        first_step = {
            id(each): number
            for number, work in reversed(list(enumerate(engine.works)))
            for each in work.sequences
        }
        assert first_step[id(running)] < first_step[id(large)] <= first_step[id(small)]

    def test_all_that_run_decode_together(self):
        engine = FakeEngine(chunk=64)
        engine.add(*(sequence(2, 3) for _ in range(4)))
        assert kinds(engine.run()) == "pdd"
        assert [len(work.sequences) for work in engine.works] == [4, 4, 4]

    def test_there_is_no_work_without_requests(self):
        assert FakeEngine().step() is None


class TestPrefill:
    def test_long_prompts_come_in_chunks(self):
        engine = FakeEngine(chunk=16)
        engine.add(sequence(40, 1))
        assert [work.chunks for work in engine.run()] == [(16,), (16,), (8,)]

    @pytest.mark.parametrize("prompt", [1, 15, 16, 17, 33])
    def test_every_prompt_token_is_computed_once_and_every_output_token_but_the_last(self, prompt):
        engine = FakeEngine(chunk=16)
        one = sequence(prompt, 3)
        engine.add(one)
        assert sum(sum(work.chunks) for work in engine.run()) == prompt + 2
        assert one.output_ids == [9, 9, 9] and one.finish_reason == "length"

    def test_short_prompts_share_a_step_within_the_token_budget(self):
        engine = FakeEngine(chunk=64, max_num_seqs=8)
        engine.add(*(sequence(length, 1) for length in (5, 16, 1, 9, 3)))
        assert [work.chunks for work in engine.run()] == [(5, 16, 1, 9), (3,)]

    def test_a_long_prompt_is_not_padded_into_a_step_of_short_ones(self):
        engine = FakeEngine(chunk=64, max_num_seqs=8)
        engine.add(sequence(5, 1), sequence(40, 1), sequence(5, 1))
        assert [work.chunks for work in engine.run()] == [(5,), (40,), (5,)]


class TestFairness:
    def test_decode_goes_on_between_the_chunks_of_a_long_prompt(self):
        engine = FakeEngine(chunk=8)
        short = sequence(2, 6)
        engine.add(short)
        engine.step()
        engine.add(sequence(60, 1))
        engine.run()
        decodes = [number for number, work in enumerate(engine.works) if short in work.sequences]
        assert all(later - earlier <= 2 for earlier, later in pairwise(decodes)), kinds(engine.works)

    def test_a_stream_of_new_prompts_does_not_stop_those_that_decode(self):
        engine = FakeEngine(max_num_seqs=3)
        first = sequence(2, 20)
        engine.add(first)
        for _ in range(45):
            engine.add(sequence(16, 1))
            engine.step()
        assert first.finish_reason == "length"

    def test_nor_do_decodes_stop_a_new_prompt(self):
        engine = FakeEngine()
        engine.add(*(sequence(2, 40) for _ in range(3)))
        for _ in range(5):
            engine.step()
        late = sequence(16, 2)
        engine.add(late)
        engine.step()
        engine.step()
        assert late.output_ids


class TestPages:
    def test_a_request_waits_until_its_longest_length_fits(self):
        engine = FakeEngine(pages=5)
        first, second = sequence(10, 14), sequence(10, 14)  # 3 pages each
        engine.add(first, second)
        while not first.finish_reason:
            engine.step()
            assert second.table is None and second.computed == 0
        engine.run()
        assert engine.finished == [first, second] and len(second.output_ids) == 14

    def test_usage_counts_reserved_pages(self):
        engine = FakeEngine(pages=10)
        assert engine.scheduler.cache_usage == 0
        engine.add(sequence(10, 14), sequence(1, 1))
        engine.step()
        assert engine.scheduler.cache_usage == pytest.approx(0.4)  # 3 pages and 1
        engine.run()
        assert engine.scheduler.cache_usage == 0

    @pytest.mark.parametrize("steps", [0, 1, 2, 5])
    def test_removing_a_request_frees_its_pages_wherever_it_is(self, steps):
        engine = FakeEngine(pages=8, chunk=8)
        requests = [sequence(20, 8), sequence(20, 8), sequence(20, 8)]  # 4 pages each: the third waits
        engine.add(*requests)
        for _ in range(steps):
            engine.step()
        for count, each in enumerate(requests):
            engine.scheduler.remove(each)
            assert each.pages == [] and each not in engine.scheduler.running
            assert each not in engine.scheduler.waiting
            assert engine.scheduler.allocator.num_used <= 8 - 4 * count
        assert engine.scheduler.allocator.num_used == 0
        engine.scheduler.remove(requests[0])  # once more does no harm
        assert engine.step() is None

    def test_a_removed_requests_pages_let_the_next_one_in(self):
        engine = FakeEngine(pages=4)
        first, second = sequence(20, 8), sequence(20, 8)
        engine.add(first, second)
        engine.step()
        engine.scheduler.remove(first)
        engine.run()
        assert engine.finished == [second]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 50), st.integers(1, 14), st.integers(0, 6)), max_size=12),
    st.integers(8, 20),
    st.integers(1, 6),
    st.integers(1, 70),
)
def test_any_load_is_served_to_its_end_and_leaves_no_page_behind(load, pages, max_num_seqs, chunk):
    """load: prompt and output lengths, and how many steps pass before the next request comes."""
    engine = FakeEngine(pages, max_num_seqs, chunk)
    requests = []
    for prompt, output, pause in load:
        requests.append(sequence(prompt, output))
        engine.add(requests[-1])
        for _ in range(pause):
            engine.step()
    engine.run()
    assert sorted(map(id, engine.finished)) == sorted(map(id, requests))
    assert all(len(each.tokens) == each.limit for each in requests)
    assert engine.scheduler.allocator.num_used == 0
    starts = [next(n for n, work in enumerate(engine.works) if each in work.sequences) for each in requests]
    assert starts == sorted(starts)
