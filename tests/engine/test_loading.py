"""Prompts whose cache is on another engine, as the scheduler sees them."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from fake_steps import FakeEngine, counts, kinds


class Elsewhere:
    """A cache on another engine."""

    def __init__(self) -> None:
        self.abandoned = 0

    def begin(self, start: int, end: int) -> None:
        raise AssertionError("the engine begins loads, not the scheduler")

    def abandon(self) -> None:
        self.abandoned += 1


class TestLoading:
    def test_a_prompt_from_elsewhere_takes_pages_and_a_slot_but_no_step(self):
        engine = FakeEngine()
        remote = engine.sequence(21, 3, remote=Elsewhere())
        engine.add(remote)
        assert engine.step().is_empty and engine.loads == [remote]
        assert remote.loading and remote.computed == 0 and len(remote.pages) == 3 and remote.slot == 0
        assert engine.step().is_empty, "it waits for what comes"

    def test_it_decodes_from_its_last_token_on_when_all_is_there(self):
        engine = FakeEngine()
        remote = engine.sequence(21, 3, remote=Elsewhere())
        engine.add(remote)
        engine.step()
        assert remote.began is None, "bringing it is no computation"
        engine.bring(remote)
        assert remote.began is not None
        assert remote.computed == 20 == remote.cached_tokens and remote.remote is None
        assert kinds(engine.run()) == "ddd" and remote.finish_reason == "length"

    def test_few_of_those_that_run_wait_for_what_comes(self):
        engine = FakeEngine(loads=2)
        remotes = [engine.sequence(21, 3, remote=Elsewhere()) for _ in range(4)]
        own = engine.sequence(5, 4)
        engine.add(*remotes, own)
        engine.step()
        assert engine.loads == remotes[:2] and own.table is not None, "the others are passed by"
        assert engine.scheduler.deferred == 2
        engine.bring(remotes[0])
        engine.step()
        assert engine.loads == remotes[:3]

    @pytest.mark.parametrize(("seqs", "places"), [(1, 1), (3, 1), (4, 2), (16, 4)])
    def test_half_of_the_places_at_most(self, seqs, places):
        engine = FakeEngine(loads=4, max_num_seqs=seqs)
        engine.add(*(engine.sequence(5, 3, remote=Elsewhere()) for _ in range(8)))
        engine.step()
        assert len(engine.loads) == places

    def test_others_run_meanwhile(self):
        engine = FakeEngine()
        remote, own = engine.sequence(21, 3, remote=Elsewhere()), engine.sequence(5, 4)
        engine.add(remote, own)
        while not own.finish_reason:
            assert all(work is not remote for work in engine.step().sequences)

    def test_it_computes_its_prompt_itself_when_nothing_comes(self):
        engine = FakeEngine()
        remote = engine.sequence(21, 3, remote=Elsewhere())
        engine.add(remote)
        engine.step()
        engine.scheduler.not_loaded(remote)
        assert counts(engine.run()) == [(16,), (5,)] and remote.finish_reason == "length"

    def test_what_the_cache_has_need_not_come_by_whole_blocks(self):
        engine = FakeEngine(prefix_caching=True)
        tokens = list(range(100, 121))
        engine.add(engine.sequence(tokens[:20], 1))
        engine.run()
        remote = engine.sequence([*tokens[:20], 7, 8, 9], 2, remote=Elsewhere())
        engine.add(remote)
        engine.step()
        assert remote.loading and remote.computed == 16, "blocks of 8, and no page is copied for the rest"
        engine.bring(remote)
        engine.run()
        assert remote.finish_reason == "length"

    def test_nothing_comes_where_the_cache_has_it_all(self):
        engine = FakeEngine(prefix_caching=True)
        tokens, elsewhere = list(range(100, 121)), Elsewhere()
        engine.add(engine.sequence(tokens, 1))
        engine.run()
        remote = engine.sequence(tokens, 2, remote=elsewhere)
        engine.add(remote)
        engine.run()
        assert elsewhere.abandoned == 1 and not engine.loads and remote.finish_reason == "length"

    def test_what_has_come_is_found_by_others(self):
        engine = FakeEngine(prefix_caching=True)
        tokens = list(range(100, 121))
        remote = engine.sequence(tokens, 2, remote=Elsewhere())
        engine.add(remote)
        engine.step()
        engine.bring(remote)
        other = engine.sequence([*tokens[:16], 1, 2], 1)
        engine.add(other)
        engine.step()
        assert other.cached_tokens == 16

    def test_others_wait_for_the_prefix_that_is_on_its_way(self):
        engine = FakeEngine(prefix_caching=True)
        tokens = list(range(100, 121))
        remote, other = (
            engine.sequence(tokens, 2, remote=Elsewhere()),
            engine.sequence([*tokens[:16], 1, 2], 1),
        )
        engine.add(remote, other)
        assert engine.step().is_empty
        engine.bring(remote)
        engine.run()
        assert other.cached_tokens == 16

    @pytest.mark.parametrize("loading", [False, True])
    def test_who_goes_away_abandons_it_and_leaves_nothing(self, loading):
        engine = FakeEngine(prefix_caching=True)
        elsewhere = Elsewhere()
        remote = engine.sequence(21, 3, remote=elsewhere)
        engine.add(remote)
        if loading:
            engine.step()
        remote.finish_reason = "abort"
        engine.scheduler.remove(remote)
        assert elsewhere.abandoned == 1 and engine.scheduler.allocator.num_used == 0
        other = engine.sequence(list(remote.tokens), 1)
        engine.add(other)
        engine.run()
        assert other.cached_tokens == 0, "what never came is found by nobody"

    def test_who_loses_its_pages_abandons_it_and_computes_its_prompt(self):
        engine = FakeEngine(pages=5)
        elsewhere = Elsewhere()
        first, remote = engine.sequence(8, 24), engine.sequence(21, 3, remote=elsewhere)
        engine.add(first)
        engine.step()
        engine.add(remote)
        engine.run()
        assert elsewhere.abandoned == 1 and remote.preemptions == 1
        assert first.finish_reason == remote.finish_reason == "length"

    def test_followers_wait_for_the_leader_that_brings_their_prompt(self):
        engine = FakeEngine()
        leader = engine.sequence(21, 3, remote=Elsewhere())
        follower = engine.sequence(list(leader.tokens), 3, leader=leader)
        engine.add(leader, follower)
        engine.step()
        engine.step()
        assert follower.table is None
        engine.bring(leader)
        engine.run()
        assert leader.finish_reason == follower.finish_reason == "length"

    def test_pages_that_are_kept_for_others_are_nobodys_until_they_come_back(self):
        engine = FakeEngine(prefix_caching=True)
        leaves = engine.sequence(21, 3)
        engine.add(leaves)
        engine.step()
        engine.step()
        engine.step()
        leaves.finish_reason = "stop"
        table = engine.scheduler.keep(leaves)
        assert not len(engine.scheduler.running) and leaves.table is None and leaves.slot < 0
        assert engine.scheduler.allocator.num_used == len(table.pages) == 3
        table.release()
        assert engine.scheduler.allocator.num_used == 0
