"""A producer's registry for tests: a clock that only the test moves, and a list of what has been given back."""

import hashlib
from collections.abc import Callable

import pytest

from glm_dcp_jax.transfer.offers import Held, Offers, Refused

LEASE = 30.0
RENEWED = 20.0  # two thirds of it
PROMPT = hashlib.sha256(b"prompt").digest()
READERS = {0: frozenset({0, 1}), 1: frozenset({2, 3})}
ALL = [0, 1, 2, 3]


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


class Producer:
    """Offers over a fake clock; `freed` lists the requests whose pages have come back."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.offers = Offers(LEASE, self.clock)
        self.freed: list[str] = []

    def add(self, name: str = "r") -> str:
        return self.offers.add(Held(name, 7, PROMPT, (1, 2), lambda: self.freed.append(name)))

    def opened(self, name: str = "r") -> str:
        key = self.add(name)
        self.offers.open(key, "me", PROMPT, READERS)
        return key

    def refuses(self, kind: str, call: Callable[[], object]) -> None:
        before = self.offers.stats().refused.get(kind, 0)
        with pytest.raises(Refused) as refused:
            call()
        assert refused.value.kind == kind
        assert self.offers.stats().refused[kind] == before + 1

    def refuses_all_use(self, kind: str, key: str, attempt: int = 1) -> None:
        self.refuses(kind, lambda: self.offers.open(key, "me", PROMPT, READERS))
        self.refuses(kind, lambda: self.offers.reading(key, attempt).__enter__())
        self.refuses(kind, lambda: self.offers.confirm(key, attempt))
        assert self.offers.beat([key]) == [key]


def expire(p: Producer, key: str) -> None:
    p.clock.now += LEASE
    assert p.offers.expire() == ["r"]


ENDINGS = {
    "finished": (lambda p, key: p.offers.ack(key, 1, ALL, True), "used"),
    "failed": (lambda p, key: p.offers.ack(key, 1, [], False), "used"),
    "dropped": (lambda p, key: p.offers.drop(key), "dropped"),
    "expired": (expire, "expired"),
}
"""How an opened offer ends: the call, and the kind that later use is refused with."""


def end(p: Producer, key: str, ending: str) -> str:
    call, kind = ENDINGS[ending]
    call(p, key)
    return kind
