"""The scheduler with a fake model behind it: order, budget, sharing, preemption, and pages that always come back."""

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm_dcp_jax.config import ConfigError, SchedulerConfig

sys.path.append(str(Path(__file__).parent))

from fake_steps import FakeEngine, counts, kinds


class TestOrder:
    def test_first_come_first_served(self):
        engine = FakeEngine(max_num_seqs=1)
        requests = [engine.sequence(3) for _ in range(4)]
        engine.add(*requests)
        engine.run()
        assert engine.finished == requests

    def test_a_large_request_at_the_head_is_not_overtaken_by_small_ones_behind_it(self):
        engine = FakeEngine(pages=6)
        running, large, small = engine.sequence(30, 10), engine.sequence(30, 10), engine.sequence(2, 2)
        engine.add(running, large, small)
        engine.step()
        assert list(engine.scheduler.running) == [running]
        assert list(engine.scheduler.waiting) == [large, small]
        engine.run()
        assert engine.finished[0] is running

    def test_the_lowest_priority_number_runs_first_and_of_equals_the_earlier(self):
        engine = FakeEngine(max_num_seqs=1, scheduling_policy="priority")
        requests = [engine.sequence(3, priority=priority) for priority in (2, 1, 1, 0)]
        engine.add(*requests)
        engine.run()
        assert engine.finished == [requests[3], requests[1], requests[2], requests[0]]

    def test_without_that_policy_priorities_say_nothing(self):
        engine = FakeEngine(max_num_seqs=1)
        requests = [engine.sequence(3, priority=priority) for priority in (2, 1, 0)]
        engine.add(*requests)
        engine.run()
        assert engine.finished == requests

    def test_all_that_run_decode_together(self):
        engine = FakeEngine(max_num_batched_tokens=64)
        engine.add(*(engine.sequence(2, 3) for _ in range(4)))
        assert kinds(engine.run()) == "pdd"
        assert [len(work.decodes) for work in engine.works] == [0, 4, 4]

    def test_there_is_no_work_without_requests(self):
        assert FakeEngine().step().is_empty

    def test_what_waits_for_room_is_not_deferred(self):
        engine = FakeEngine(max_num_seqs=1)
        engine.add(*(engine.sequence(3) for _ in range(3)))
        engine.step()
        assert (len(engine.scheduler.waiting), engine.scheduler.deferred) == (2, 0)

    def test_a_sequence_begins_with_its_first_step_and_only_once(self):
        engine = FakeEngine(pages=5)
        first, second = engine.sequence(14, 20), engine.sequence(14, 20)
        engine.add(first, second)
        assert first.began is second.began is None
        engine.step()
        began = first.began
        assert began is not None and second.began is None
        engine.step()
        then = second.began
        engine.run()
        assert second.preemptions and (first.began, second.began) == (began, then)
        assert began < then

    def test_an_unknown_policy_is_refused(self):
        with pytest.raises(ConfigError, match="use one of fcfs, priority"):
            SchedulerConfig(scheduling_policy="lpm")


class TestPrefill:
    def test_long_prompts_come_in_chunks(self):
        engine = FakeEngine()
        engine.add(engine.sequence(40, 1))
        assert counts(engine.run()) == [(16,), (16,), (8,)]

    def test_a_threshold_makes_them_shorter(self):
        engine = FakeEngine(long_prefill_token_threshold=6)
        engine.add(engine.sequence(15, 1))
        assert counts(engine.run()) == [(6,), (6,), (3,)]

    @pytest.mark.parametrize("prompt", [1, 15, 16, 17, 33])
    def test_every_prompt_token_is_computed_once_and_every_output_token_but_the_last(self, prompt):
        engine = FakeEngine()
        one = engine.sequence(prompt, 3)
        engine.add(one)
        works = engine.run()
        assert sum(sum(chunks) for chunks in counts(works)) + sum(len(work.decodes) for work in works) == (
            prompt + 2
        )
        assert one.output_ids == [9, 9, 9] and one.finish_reason == "length"

    def test_short_prompts_share_a_step_within_the_token_budget(self):
        engine = FakeEngine(max_num_batched_tokens=64, max_num_seqs=8)
        engine.add(*(engine.sequence(length, 1) for length in (5, 16, 2, 9, 3)))
        assert counts(engine.run()) == [(5, 16, 2, 9), (3,)]

    def test_a_long_prompt_is_not_padded_into_a_step_of_short_ones(self):
        engine = FakeEngine(max_num_batched_tokens=64, max_num_seqs=8)
        engine.add(engine.sequence(5, 1), engine.sequence(40, 1), engine.sequence(5, 1))
        assert counts(engine.run()) == [(5,), (40,), (5,)]


class TestMixing:
    def test_those_that_decode_come_first_and_chunks_take_the_rest_of_the_budget(self):
        engine = FakeEngine(max_num_batched_tokens=8)
        short = engine.sequence(2, 20)
        engine.add(short)
        engine.step()
        engine.add(engine.sequence(60, 1))
        works = engine.run()
        assert kinds(works[1:9]) == "mmmmmmmm" and counts(works[1:9]) == [(7,)] * 8
        assert all(work.decodes for work in works[1:20]), "decode goes on beside the chunks of a long prompt"

    def test_drafts_count(self):
        engine = FakeEngine(max_num_batched_tokens=16, drafts=3)
        first = engine.sequence(2, 40)
        engine.add(first)
        engine.step()
        engine.add(engine.sequence(40, 1))
        assert [chunk.count for chunk in engine.step().chunks] == [12]

    def test_what_the_budget_does_not_hold_waits_for_its_turn(self):
        engine = FakeEngine(max_num_batched_tokens=8, drafts=3)
        requests = [engine.sequence(2, 9) for _ in range(4)]
        engine.add(*requests)
        engine.run()
        assert max(len(work.decodes) for work in engine.works) == 2
        assert sorted(map(id, engine.finished)) == sorted(map(id, requests))

    def test_a_stream_of_new_prompts_does_not_stop_those_that_decode(self):
        engine = FakeEngine(max_num_seqs=3)
        first = engine.sequence(2, 20)
        engine.add(first)
        for _ in range(22):
            engine.add(engine.sequence(16, 1))
            engine.step()
        assert first.finish_reason == "length"


class TestAhead:
    def test_a_sequence_that_certainly_ends_is_not_decoded_again(self):
        engine = FakeEngine(ahead=1)
        engine.add(engine.sequence(5, 3))
        assert kinds(engine.run()) == "pdd"

    def test_the_tokens_are_those_of_steps_that_are_read_at_once(self):
        outputs = []
        for ahead in (0, 1):
            engine = FakeEngine(ahead=ahead, pages=12)
            requests = [engine.sequence(prompt, 9) for prompt in (3, 17, 20, 1)]
            engine.add(*requests)
            engine.run()
            outputs.append([each.output_ids for each in requests])
        assert outputs[0] == outputs[1]


class TestPreemption:
    def test_the_last_in_rank_loses_its_pages_and_is_computed_anew(self):
        engine = FakeEngine(pages=5)
        first, second = engine.sequence(14, 20), engine.sequence(14, 20)
        engine.add(first, second)
        engine.run()
        assert (first.preemptions, second.preemptions) == (0, 1) == (0, engine.scheduler.preemptions)
        assert engine.finished == [first, second] and len(second.output_ids) == 20

    def test_by_priority_the_least_important_one(self):
        engine = FakeEngine(pages=5, scheduling_policy="priority")
        first, second = engine.sequence(14, 20, priority=1), engine.sequence(14, 20, priority=0)
        engine.add(first, second)
        engine.run()
        assert (first.preemptions > 0, second.preemptions) == (True, 0)

    def test_a_reserve_keeps_a_new_one_out_while_others_need_pages(self):
        engine = FakeEngine(pages=10, watermark=0.3)
        first, second = engine.sequence(30, 20), engine.sequence(30, 20)  # 4 pages each, later 7
        engine.add(first, second)
        engine.run()
        assert engine.scheduler.preemptions == 0 and engine.finished == [first, second]

    @pytest.mark.parametrize("steps", [0, 1, 2, 5])
    @pytest.mark.parametrize("ahead", [0, 1])
    def test_removing_a_request_frees_its_pages_wherever_it_is(self, steps, ahead):
        engine = FakeEngine(pages=8, ahead=ahead)
        requests = [engine.sequence(20, 8) for _ in range(3)]
        engine.add(*requests)
        for _ in range(steps):
            engine.step()
        for each in requests:
            engine.scheduler.remove(each)
            each.finish_reason = each.finish_reason or "abort"
            assert not each.pages and each not in engine.scheduler.running
            assert each not in engine.scheduler.waiting
        assert engine.scheduler.allocator.num_used == 0
        engine.scheduler.remove(requests[0])  # once more does no harm
        assert engine.step().is_empty


class TestSharing:
    PREFIX = list(range(40))

    def test_a_prefix_is_computed_once_for_requests_that_come_together(self):
        engine = FakeEngine(prefix_caching=True, max_num_seqs=32, pages=200)
        requests = [engine.sequence([*self.PREFIX, 100 + number], 2) for number in range(32)]
        engine.add(*requests)
        works = engine.run()
        computed = sum(sum(chunks) for chunks in counts(works))
        assert computed == 41, "all others have one token left, which is a row that decodes"
        assert [each.cached_tokens for each in requests] == [0] + [40] * 31

    def test_those_whose_prefix_is_promised_do_not_hold_up_others(self):
        engine = FakeEngine(prefix_caching=True, max_num_batched_tokens=64, long_prefill_token_threshold=8)
        one, same = (engine.sequence([*self.PREFIX, number], 2) for number in (100, 101))
        other = engine.sequence(3, 2)
        engine.add(one, same, other)
        engine.step()
        assert (engine.scheduler.deferred, same.began) == (1, None)
        engine.run()
        assert (
            engine.scheduler.deferred == 0
            and same.cached_tokens == 40
            and engine.finished.index(other) < engine.finished.index(same)
        )

    def test_a_promise_ends_with_the_one_who_made_it(self):
        engine = FakeEngine(prefix_caching=True)
        one, same = (engine.sequence([*self.PREFIX, number], 2) for number in (100, 101))
        engine.add(one, same)
        engine.step()
        engine.scheduler.remove(one)
        one.finish_reason = "abort"
        engine.run()
        assert engine.finished == [same] and same.cached_tokens == 16, "the chunk that it did compute"

    @pytest.mark.parametrize("prompt", [1, 7, 8, 9, 30])
    @pytest.mark.parametrize("prefix_caching", [False, True])
    @pytest.mark.parametrize("drafts", [0, 2])
    def test_followers_share_their_leaders_prompt(self, prompt, prefix_caching, drafts):
        engine = FakeEngine(prefix_caching=prefix_caching, drafts=drafts)
        leader = engine.sequence(prompt, 6)
        followers = [engine.sequence(leader.tokens, 6, leader=leader) for _ in range(3)]
        engine.add(leader, *followers)
        works = engine.run()
        assert sum(sum(chunks) for chunks in counts(works)) == (prompt if prompt > 1 else 0)
        assert [each.cached_tokens for each in followers] == [prompt - 1] * 3

    def test_a_preempted_sequence_gets_back_what_is_still_there(self):
        engine = FakeEngine(pages=6, prefix_caching=True)
        first, second = engine.sequence(14, 26), engine.sequence(14, 20)
        engine.add(first, second)
        engine.run()
        assert second.preemptions >= 1 and engine.prefixes.stats.hits > 0
        assert len(second.output_ids) == 20


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_any_load_is_served_to_its_end_and_leaves_no_page_behind(data):
    drafts = data.draw(st.sampled_from([0, 0, 1, 3]), "drafts")
    engine = FakeEngine(
        pages=data.draw(st.integers(8, 20), "pages"),
        drafts=drafts,
        ahead=data.draw(st.integers(0, 1), "ahead"),
        prefix_caching=data.draw(st.booleans(), "prefix caching"),
        max_num_seqs=data.draw(st.integers(1, 6), "running"),
        max_num_batched_tokens=data.draw(st.integers(1 + drafts, 70), "budget"),
        watermark=data.draw(st.sampled_from([0.0, 0.2]), "watermark"),
        long_prefill_token_threshold=data.draw(st.sampled_from([0, 5]), "threshold"),
        scheduling_policy=data.draw(st.sampled_from(["fcfs", "priority"]), "policy"),
    )
    requests = []
    for _ in range(data.draw(st.integers(0, 12), "requests")):
        start, prompt, output = (data.draw(st.integers(*bounds)) for bounds in ((0, 1), (1, 45), (1, 14)))
        priority, n = data.draw(st.integers(0, 2)), data.draw(st.sampled_from([1, 1, 3]))
        tokens = [start, *range(prompt - 1)]
        leader = engine.sequence(tokens, output, priority=priority)
        followers = [engine.sequence(tokens, output, priority=priority, leader=leader) for _ in range(n - 1)]
        requests += [leader, *followers]
        engine.add(leader, *followers)
        for _ in range(data.draw(st.integers(0, 5), "pause")):
            engine.step()
        if data.draw(st.integers(0, 9), "abort") == 0:
            gone = requests.pop(data.draw(st.integers(0, len(requests) - 1)))
            engine.scheduler.remove(gone)
            gone.finish_reason = gone.finish_reason or "abort"
    engine.run()
    ended = {id(each) for each in engine.finished}
    assert all(id(each) in ended and len(each.tokens) == each.limit for each in requests)
    assert engine.scheduler.allocator.num_used == 0 and not engine.scheduler._promised
    engine.prefixes.check()
