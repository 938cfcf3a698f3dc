"""The producer's registry, transition by transition, with a clock that only the test moves."""

import hashlib
import threading

import pytest
from offering import ALL, ENDINGS, LEASE, PROMPT, READERS, RENEWED, Producer, end

from glm_dcp_jax.transfer import offers as registry
from glm_dcp_jax.transfer.offers import Held, Offers, Refused

each_ending = pytest.mark.parametrize("ending", ENDINGS)


@pytest.fixture
def p() -> Producer:
    return Producer()


def test_a_whole_transfer(p):
    key = p.add()
    opened = p.offers.open(key, "me", PROMPT, READERS)
    assert (opened.attempt, opened.lease) == (1, LEASE)
    with p.offers.reading(key, 1) as held:
        assert held is opened.held
        assert (held.request_id, held.length, held.pages) == ("r", 7, (1, 2))
    p.offers.confirm(key, 1)
    assert not p.offers.ack(key, 1, [0, 2, 3], True)
    assert p.freed == []
    assert p.offers.ack(key, 1, [1], True)
    assert p.freed == ["r"]


def test_a_key_is_128_bits_and_none_is_like_another(p):
    keys = {p.add() for _ in range(100)}
    assert len(keys) == 100
    assert {len(bytes.fromhex(key)) for key in keys} == {16}


@pytest.mark.parametrize("lease", [0, -1, float("inf"), float("nan")])
def test_an_impossible_lease_is_refused(lease):
    with pytest.raises(ValueError, match="positive"):
        Offers(lease)


def test_what_is_held_can_be_asked_without_opening(p):
    key = p.add()
    assert p.offers.is_held(key)
    assert p.offers.held(key).request_id == "r"
    p.offers.drop(key)
    assert not p.offers.is_held(key)
    p.refuses("dropped", lambda: p.offers.held(key))


class TestOpening:
    @pytest.mark.parametrize("forged", ["", "0" * 32, "\ud800"])
    def test_a_forged_key_is_unknown(self, p, forged):
        p.add()
        p.refuses_all_use("unknown", forged)
        assert not p.offers.ack(forged, 1, ALL, True)
        assert not p.offers.ack(forged, 1, ALL, False)
        assert not p.offers.drop(forged)
        assert p.freed == []

    def test_a_key_cut_short_or_in_capitals_is_unknown(self, p):
        key = p.add()
        for forged in (key[:-1], key + "0", key.upper() + " "):
            p.refuses("unknown", lambda forged=forged: p.offers.open(forged, "me", PROMPT, READERS))

    @pytest.mark.parametrize("other", ["you", "m", "", "\ud800"])
    def test_a_second_consumer_is_refused_and_changes_nothing(self, p, other):
        key = p.opened()
        p.refuses("used", lambda: p.offers.open(key, other, PROMPT, READERS))
        p.offers.confirm(key, 1)

    def test_another_prompt_is_refused_and_does_not_use_the_key_up(self, p):
        key = p.add()
        p.refuses("other_prompt", lambda: p.offers.open(key, "you", hashlib.sha256(b"x").digest(), READERS))
        assert p.offers.open(key, "me", PROMPT, READERS).attempt == 1

    def test_another_prompt_does_not_start_an_opened_load_over(self, p):
        key = p.opened()
        p.refuses("other_prompt", lambda: p.offers.open(key, "me", b"", READERS))
        p.offers.confirm(key, 1)

    def test_the_same_consumer_starts_over_and_its_acks_so_far_are_void(self, p):
        key = p.opened()
        p.offers.ack(key, 1, [0, 1, 2], True)
        assert p.offers.released_ranks(key) == {0}
        assert p.offers.open(key, "me", PROMPT, READERS).attempt == 2
        assert p.offers.released_ranks(key) == frozenset()
        assert not p.offers.ack(key, 2, [3], True)
        assert p.offers.ack(key, 2, [0, 1, 2], True)

    def test_starting_over_may_change_the_readers(self, p):
        key = p.opened()
        p.offers.open(key, "me", PROMPT, {0: frozenset({9})})
        assert p.offers.ack(key, 2, [9], True)

    def test_the_latest_attempt_is_the_only_one(self, p):
        key = p.opened()
        p.offers.open(key, "me", PROMPT, READERS)
        for attempt in (-1, 0, 1, 3):
            p.refuses("stale_attempt", lambda a=attempt: p.offers.confirm(key, a))
            p.refuses("stale_attempt", lambda a=attempt: p.offers.reading(key, a).__enter__())
        p.offers.confirm(key, 2)

    def test_a_key_that_nobody_has_opened_has_no_attempt(self, p):
        key = p.add()
        p.refuses("stale_attempt", lambda: p.offers.confirm(key, 0))
        assert not p.offers.ack(key, 0, [], True)
        assert not p.offers.ack(key, 0, [], False)
        assert p.freed == []

    @pytest.mark.parametrize("readers", [{}, {0: frozenset(), 1: frozenset()}])
    def test_with_nothing_to_load_it_is_finished_at_once(self, p, readers):
        key = p.add()
        p.offers.open(key, "me", PROMPT, readers)
        assert p.freed == ["r"]
        assert p.offers.stats().finished == 1
        assert p.offers.released_ranks(key) == readers.keys()


class TestAcks:
    def test_a_rank_that_nobody_reads_is_released_at_once(self, p):
        key = p.add()
        p.offers.open(key, "me", PROMPT, {0: frozenset({5}), 1: frozenset()})
        assert p.offers.released_ranks(key) == {1}
        assert p.freed == []

    def test_a_reader_of_several_ranks_acks_for_all_of_them(self, p):
        key = p.add()
        p.offers.open(key, "me", PROMPT, {0: frozenset({5, 6}), 1: frozenset({5})})
        assert not p.offers.ack(key, 1, [5], True)
        assert p.offers.released_ranks(key) == {1}
        assert p.offers.ack(key, 1, [6], True)
        assert p.offers.released_ranks(key) == {0, 1}

    def test_duplicates_and_strangers_do_not_stand_in_for_those_who_are_missing(self, p):
        key = p.opened()
        for _ in range(4):
            assert not p.offers.ack(key, 1, [0, 1, 2, 2, 77, -1], True)
        assert p.offers.stats().late_acks == 0
        assert p.freed == []

    @pytest.mark.parametrize("ok", [True, False])
    @pytest.mark.parametrize("attempt", [0, 1, 3])
    def test_an_ack_of_another_attempt_is_late_and_changes_nothing(self, p, attempt, ok):
        key = p.opened()
        p.offers.open(key, "me", PROMPT, READERS)
        assert not p.offers.ack(key, attempt, ALL, ok)
        assert p.offers.stats().late_acks == 1
        assert p.offers.released_ranks(key) == frozenset()
        assert p.freed == []

    @pytest.mark.parametrize("readers", [[0], [], [99]])
    def test_a_negative_ack_ends_the_offer_whoever_sends_it(self, p, readers):
        key = p.opened()
        assert p.offers.ack(key, 1, readers, False)
        assert p.freed == ["r"]
        assert p.offers.stats().failed == 1

    def test_an_ack_after_the_lease_is_late_even_before_the_reaper_came(self, p):
        key = p.opened()
        p.clock.now += LEASE
        assert not p.offers.ack(key, 1, ALL, True)
        assert p.freed == []
        assert p.offers.expire() == ["r"]
        assert p.freed == ["r"]


class TestEndings:
    @each_ending
    def test_it_gives_the_pages_back_once_and_nothing_changes_that(self, p, ending):
        key = p.opened()
        kind = end(p, key, ending)
        assert p.freed == ["r"]
        p.refuses_all_use(kind, key)
        assert not p.offers.ack(key, 1, ALL, True)
        assert not p.offers.ack(key, 1, ALL, False)
        assert not p.offers.drop(key)
        p.clock.now += 10 * LEASE
        assert p.offers.expire() == []
        p.offers.close()
        assert p.freed == ["r"]

        stats = p.offers.stats()
        assert (stats.held, stats.offered, stats.late_acks) == (0, 1, 2)
        assert stats.refused == {kind: 3}
        for each in ENDINGS:
            assert getattr(stats, each) == (each == ending)

    @each_ending
    def test_during_a_read_the_pages_come_back_when_the_last_one_ends(self, p, ending):
        key = p.opened()
        with p.offers.reading(key, 1):
            with p.offers.reading(key, 1):
                kind = end(p, key, ending)
                p.refuses_all_use(kind, key)
                assert not p.offers.drop(key)
                assert not p.offers.ack(key, 1, ALL, True)
                assert p.offers.expire() == []
                p.offers.close()
            assert p.freed == []
            assert p.offers.stats().held == 1
        assert p.freed == ["r"]
        assert p.offers.stats().held == 0
        assert getattr(p.offers.stats(), ending) == 1

    @each_ending
    def test_pages_are_given_back_without_the_lock(self, p, ending):
        """Whoever frees pages may ask the registry, and another thread that holds the allocator's lock may, too."""
        answered = []

        def give_back() -> None:
            asking = threading.Thread(target=lambda: answered.append(p.offers.stats().held), daemon=True)
            asking.start()
            asking.join(5)

        key = p.offers.add(Held("r", 7, PROMPT, (1,), give_back))
        p.offers.open(key, "me", PROMPT, READERS)
        with p.offers.reading(key, 1):
            end(p, key, ending)
        key = p.offers.add(Held("r", 7, PROMPT, (1,), give_back))
        p.offers.open(key, "me", PROMPT, READERS)
        end(p, key, ending)
        assert answered == [0, 0]

    def test_a_read_that_fails_keeps_no_pages(self, p):
        key = p.opened()
        with pytest.raises(OSError), p.offers.reading(key, 1):
            p.offers.drop(key)
            raise OSError
        assert p.freed == ["r"]

    def test_a_read_ends_nothing(self, p):
        key = p.opened()
        with p.offers.reading(key, 1):
            pass
        assert p.freed == []
        p.offers.confirm(key, 1)

    def test_a_read_of_an_attempt_that_was_given_up_keeps_the_pages_too(self, p):
        key = p.opened()
        with p.offers.reading(key, 1):
            p.offers.open(key, "me", PROMPT, READERS)
            assert p.offers.ack(key, 2, ALL, True)
            assert p.freed == []
        assert p.freed == ["r"]

    def test_the_reason_of_a_drop_is_told(self, p):
        key = p.add()
        assert p.offers.drop(key, "the client has gone")
        with pytest.raises(Refused, match="the client has gone"):
            p.offers.open(key, "me", PROMPT, READERS)

    def test_a_drop_of_what_is_unopened_leaves_what_is_opened(self, p):
        opened, unopened = p.opened("opened"), p.add("unopened")
        assert not p.offers.drop(opened, unopened=True)
        assert p.offers.drop(unopened, unopened=True)
        assert p.freed == ["unopened"]
        p.offers.confirm(opened, 1)

    def test_closing_drops_all(self, p):
        p.add("a")
        p.opened("b")
        p.offers.close()
        assert sorted(p.freed) == ["a", "b"]
        assert p.offers.stats().dropped == 2

    def test_pages_that_fail_to_come_back_do_not_keep_those_of_others(self, p):
        def fail() -> None:
            raise RuntimeError("no such page")

        p.add("a")
        p.offers.add(Held("b", 7, PROMPT, (3,), fail))
        p.add("c")
        with pytest.raises(RuntimeError, match="no such page"):
            p.offers.close()
        assert sorted(p.freed) == ["a", "c"]
        assert p.offers.stats().held == 0

    def test_only_so_many_ended_keys_are_remembered(self, p, monkeypatch):
        monkeypatch.setattr(registry, "REMEMBERED", 3)
        keys = [p.add() for _ in range(5)]
        for key in keys:
            p.offers.drop(key)
        for key, kind in zip(keys, ["unknown"] * 2 + ["dropped"] * 3, strict=True):
            p.refuses(kind, lambda key=key: p.offers.open(key, "me", PROMPT, READERS))

    def test_no_message_tells_a_key(self, p):
        for ending in ENDINGS:
            key = p.opened()
            end(p, key, ending)
            with pytest.raises(Refused) as refused:
                p.offers.confirm(key, 1)
            assert key not in str(refused.value)


class TestLeases:
    @pytest.mark.parametrize("opened", [False, True])
    def test_from_its_deadline_on_a_lease_is_over_without_the_reaper(self, p, opened):
        key = p.opened() if opened else p.add()
        p.clock.now += LEASE - 0.001
        assert p.offers.expire() == []
        assert p.offers.beat([]) == []
        if opened:
            p.offers.confirm(key, 1)
        p.clock.now += 0.001
        p.refuses_all_use("expired", key)
        assert p.freed == []
        assert p.offers.expire() == ["r"]
        assert p.freed == ["r"]

    def test_a_heartbeat_renews_two_thirds_of_a_lease_and_never_shortens_it(self, p):
        key = p.opened()
        deadline = p.clock.now + LEASE
        p.clock.now += 5
        assert p.offers.beat([key, key]) == []
        p.clock.now = deadline - 1
        p.offers.confirm(key, 1)
        assert p.offers.beat([key]) == []
        p.clock.now += RENEWED - 1
        p.offers.confirm(key, 1)
        p.clock.now += 1
        p.refuses("expired", lambda: p.offers.confirm(key, 1))

    def test_a_heartbeat_tells_which_keys_are_not_held(self, p):
        kept, ended, over = p.add(), p.add(), p.add()
        p.offers.drop(ended)
        p.clock.now += LEASE - 1
        assert p.offers.beat([kept]) == []
        p.clock.now += 1
        assert p.offers.beat(["forged", kept, over, ended]) == ["forged", over, ended]
        assert p.offers.stats().refused == {}

    def test_a_lease_that_is_over_is_not_renewed(self, p):
        key = p.opened()
        p.clock.now += LEASE
        p.offers.beat([key])
        p.refuses("expired", lambda: p.offers.confirm(key, 1))

    def test_the_reaper_visits_all(self, p):
        """Deadlines are not in the order of the offers."""
        first, _, third, _ = (p.add(name) for name in "abcd")
        p.clock.now += LEASE - 1
        p.offers.beat([first, third])
        p.clock.now += 1
        assert p.offers.expire() == ["b", "d"]
        assert sorted(p.freed) == ["b", "d"]
        assert p.offers.stats().expired == 2

    @pytest.mark.parametrize("by", ["drop", "close"])
    def test_what_is_over_counts_as_expired_whoever_ends_it(self, p, by):
        key = p.add()
        p.clock.now += LEASE
        if by == "drop":
            assert p.offers.drop(key)
        else:
            p.offers.close()
        assert p.freed == ["r"]
        p.refuses_all_use("expired", key)
        assert (p.offers.stats().expired, p.offers.stats().dropped) == (1, 0)
