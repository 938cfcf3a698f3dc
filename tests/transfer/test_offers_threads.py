"""Threads that race for one offer of the producer's registry."""

import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
from offering import ALL, ENDINGS, LEASE, Producer

from glm_dcp_jax.transfer.offers import Refused


def at_once(*calls: Callable[[], object]) -> list[object]:
    """The answers of calls that start together, each in a thread of its own.

    The threads let one another run at every function call and return, so that a race is met in a short test.
    """
    start = threading.Barrier(len(calls))

    def started(call: Callable[[], object]) -> object:
        start.wait(30)
        sys.setprofile(lambda *_: time.sleep(0))
        try:
            return call()
        finally:
            sys.setprofile(None)

    with ThreadPoolExecutor(len(calls)) as threads:
        return [each.result(30) for each in [threads.submit(started, call) for call in calls]]


@pytest.mark.parametrize("ending", ENDINGS)
def test_readers_and_those_who_end_the_offer(ending):
    """A reader that got in finds its pages until it leaves; however many threads end the offer, it ends once."""
    for _ in range(50):
        p = Producer()
        key = p.opened()

        def read(p: Producer = p, key: str = key) -> int:
            """How often pages were gone that were being read."""
            torn, give_up = 0, time.monotonic() + 10
            while time.monotonic() < give_up:
                try:
                    with p.offers.reading(key, 1):
                        for _ in range(20):
                            torn += bool(p.freed)
                except Refused:
                    break
            return torn

        def finish(p: Producer = p, key: str = key) -> bool:
            if ending == "expired":
                p.clock.now = 1000.0 + LEASE
                return p.offers.expire() == ["r"]
            return ENDINGS[ending][0](p, key)

        *torn, first, second = at_once(read, read, read, finish, finish)
        assert torn == [0, 0, 0]
        assert first != second
        assert p.freed == ["r"]
        assert getattr(p.offers.stats(), ending) == 1


def test_readers_that_leave_an_ended_offer_together():
    for _ in range(50):
        p = Producer()
        key = p.opened()
        readings = [p.offers.reading(key, 1) for _ in range(4)]
        for reading in readings:
            reading.__enter__()
        p.offers.drop(key)
        assert p.freed == []
        at_once(*[lambda r=reading: r.__exit__(None, None, None) for reading in readings])
        assert p.freed == ["r"]
        assert p.offers.stats().held == 0


def test_everybody_at_once():
    """Whichever of the ways to end comes first, the offer ends in one way, and the others are refused or late."""
    for _ in range(50):
        p = Producer()
        key = p.opened()

        def use(p: Producer = p, key: str = key) -> None:
            for _ in range(10):
                p.offers.beat([key])
                try:
                    p.offers.confirm(key, 1)
                except Refused as refused:
                    assert refused.kind in ("used", "dropped", "expired")

        def let_expire(p: Producer = p) -> bool:
            p.clock.now += LEASE
            return p.offers.expire() == ["r"]

        acks = [lambda p=p, key=key, reader=reader: p.offers.ack(key, 1, [reader], True) for reader in ALL]
        ends = [
            lambda p=p, key=key: p.offers.ack(key, 1, [], False),
            lambda p=p, key=key: p.offers.drop(key),
            let_expire,
        ]
        answers = at_once(use, *acks, *ends)
        assert answers.count(True) == 1
        assert p.freed == ["r"]
        stats = p.offers.stats()
        assert stats.held == 0
        assert sum(getattr(stats, ending) for ending in ENDINGS) == 1
