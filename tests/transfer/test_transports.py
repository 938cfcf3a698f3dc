"""One suite over the transports that cross processes, with two real ones: what arrives, fails and is left behind.

Only processes that a test started are stopped or killed, by their id.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
from transport_peer import PeerProcess, Shape

from glm_dcp_jax.transfer import transports

MIB = 1 << 20
GRACE_SECONDS = 0.5
WAYS = {
    "tcp": ("tcp", {}, {}),
    "jax": ("jax", {}, {}),
    "nixl-tcp": ("nixl", {"grace_seconds": GRACE_SECONDS}, {"UCX_TLS": "tcp"}),
    "nixl-shm": ("nixl", {"grace_seconds": GRACE_SECONDS}, {}),
}
"""Name -> transport, its options, environment. NIXL takes shared memory between processes of one machine if it may."""
BIG: list[Shape] = [(2048, 2048, 8192)]
SMALL: list[Shape] = [(64, 64, 1152)]


@dataclass
class Pair:
    """A producer and a consumer that tests share; `start` makes a further process."""

    way: str
    start: Callable[..., PeerProcess]
    producer: PeerProcess
    consumer: PeerProcess

    def publish_and_fetch(self, shapes: list[Shape], seed: int, **how) -> str:
        ticket = self.producer.publish(shapes, seed)
        try:
            return self.consumer.fetch(ticket, shapes, seed, **how)
        finally:
            self.producer.call("retire", ticket_id=ticket["id"])

    def assert_nothing_is_held(self, *processes: PeerProcess) -> None:
        for process in processes or (self.producer, self.consumer):
            until(lambda one=process: set(one.call("usage").values()) == {0})


@pytest.fixture(scope="module", params=WAYS)
def pair(request) -> Iterator[Pair]:
    name, options, environment = WAYS[request.param]
    if name not in transports.available():
        pytest.skip("NIXL is not installed: pip install --no-deps nixl-cu12==1.5.1")
    started: list[PeerProcess] = []

    def start(**more) -> PeerProcess:
        started.append(PeerProcess(name, options | more, environment))
        return started[-1]

    yield Pair(request.param, start, start(), start())
    for process in started:
        process.kill()


def until(true: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.02)


@pytest.mark.parametrize(
    "shapes",
    [
        [(1, 1, 1)],
        [(3, 8, 5)],
        [(0, 8, 1152)],
        [(7, 8, 1152), (0, 16, 132), (16, 16, 132), (1, 8, 1152), (0, 4, 1)],
        [(1000, 1024, 8192)] * 8,
        [(1024, 1024, 8192)],
    ],
    ids=["one byte", "odd", "no rows", "some without rows", "many", "8 MiB"],
)
def test_the_real_rows_arrive(pair, shapes):
    assert pair.publish_and_fetch(shapes, seed=len(shapes)) == "right"


def test_fetches_run_beside_one_another(pair):
    shapes = [(500, 512, 4096), (100, 128, 132)]
    tickets = [pair.producer.publish(shapes, seed) for seed in range(8)]
    fetches = [pair.consumer.begin_fetch(ticket, shapes, seed) for seed, ticket in enumerate(tickets)]
    assert [fetch.result(timeout=30) for fetch in fetches] == ["right"] * 8
    for ticket in tickets:
        pair.producer.call("retire", ticket_id=ticket["id"])
    pair.assert_nothing_is_held()


def test_two_fetchers_of_one_ticket_get_the_rows_or_a_plain_no(pair):
    ticket = pair.producer.publish(SMALL)
    other = pair.consumer.begin_fetch(ticket, SMALL)
    results = sorted([pair.consumer.fetch(ticket, SMALL), other.result(timeout=30)])
    assert results == (["right", "unknown_ticket"] if pair.way == "jax" else ["right", "right"])
    pair.producer.call("retire", ticket_id=ticket["id"])


def test_an_unknown_ticket_is_refused(pair):
    ticket = pair.producer.publish(SMALL)
    result = pair.consumer.fetch(ticket | {"id": "0" * 32, "uuid": 12345}, SMALL, seconds=0.5)
    pair.producer.call("retire", ticket_id=ticket["id"])
    # jax's library waits for what may still be offered.
    assert result == ("timeout" if pair.way == "jax" else "unknown_ticket")


def test_a_retired_ticket_is_refused_at_once_and_retiring_is_idempotent(pair):
    ticket = pair.producer.publish(SMALL)
    for _ in range(2):
        pair.producer.call("retire", ticket_id=ticket["id"])
    assert pair.consumer.fetch(ticket, SMALL, seconds=20) == "unknown_ticket"
    assert pair.publish_and_fetch(SMALL, seed=1) == "right"


@pytest.mark.parametrize(
    "change",
    [
        {"rows": [65]},
        {"rows": "all"},
        {"row_bytes": [-1]},
        {"transport": "x"},
        {"host": None, "port": "1", "uuid": "1", "address": -1},
    ],
    ids=str,
)
def test_what_is_not_a_ticket_is_refused(pair, change):
    ticket = pair.producer.publish(SMALL)
    assert pair.consumer.fetch(ticket | change, SMALL) == "corrupt"
    pair.producer.call("retire", ticket_id=ticket["id"])


@pytest.mark.parametrize("delay", [0.0, 0.005, 0.03])
def test_a_ticket_retired_during_a_fetch_gives_the_rows_or_an_error(pair, delay):
    ticket = pair.producer.publish(BIG)
    fetch = pair.consumer.begin_fetch(ticket, BIG)
    time.sleep(delay)
    pair.producer.call("retire", ticket_id=ticket["id"])
    assert fetch.result(timeout=30) in ("right", "unknown_ticket", "lost")
    pair.assert_nothing_is_held()


def test_a_stopped_producer_is_a_timeout_when_due_and_nothing_is_written_late(pair):
    assert pair.publish_and_fetch(BIG, seed=7) == "right"  # what the consumer keeps, and looks at again below
    # Four at once, and as much as the transport jax publishes: given up together, they must not clog the producer.
    tickets = [pair.producer.publish(BIG, seed) for seed in range(4)]
    pair.producer.stop()
    try:
        start = time.monotonic()
        given_up = pair.consumer.begin_fetch(tickets[3], BIG, 3, seconds=30.0, give_up=0.5)
        due = [pair.consumer.begin_fetch(tickets[seed], BIG, seed, seconds=1.0) for seed in range(3)]
        results = {fetch.result(timeout=20) for fetch in due}
        took = time.monotonic() - start
        cancelled = given_up.result(timeout=20)
        unfinished = pair.consumer.call("usage")["quarantined_bytes"]
    finally:
        pair.producer.go_on()
    if pair.way == "nixl-shm":  # the consumer reads a stopped process's memory all the same
        assert results <= {"right", "timeout"}
        assert cancelled in ("right", "cancelled")
    else:
        assert (results, cancelled) == ({"timeout"}, "cancelled")
        assert 1.0 <= took < 2.0
    if pair.way in ("jax", "nixl-tcp"):
        assert unfinished >= 4 * 16 * MIB, "a read that may still write must keep its landing place"
    for ticket in tickets:
        pair.producer.call("retire", ticket_id=ticket["id"])
    pair.assert_nothing_is_held()
    assert pair.consumer.call("untouched")
    assert pair.publish_and_fetch(BIG, seed=3) == "right"


def test_a_killed_producer_is_lost_at_once_and_its_successor_is_another(pair):
    victim = pair.start()
    tickets = [victim.publish(SMALL, seed) for seed in range(7)]
    assert pair.consumer.fetch(tickets[0], SMALL, 0) == "right"

    victim.stop()
    waiting = [pair.consumer.begin_fetch(tickets[seed], SMALL, seed) for seed in (1, 4, 5)]
    due = pair.consumer.fetch(tickets[6], SMALL, 6, seconds=0.3)
    assert pair.publish_and_fetch(SMALL, seed=5) == "right", (
        "one stopped producer must not hold up another's fetch"
    )
    start = time.monotonic()
    victim.kill()
    during = {fetch.result(timeout=30) for fetch in waiting}
    after = pair.consumer.fetch(tickets[2], SMALL, 2, seconds=1.0)
    assert time.monotonic() - start < 3
    # What is already in shared memory can be read of a stopped process, too.
    assert (during, due) == ({"lost"}, "timeout") or (
        pair.way == "nixl-shm" and during <= {"right", "lost"} and due in ("right", "timeout")
    )
    assert after == "lost"
    pair.assert_nothing_is_held(pair.consumer)

    address = str(tickets[0].get("port") or tickets[0].get("address"))
    port = {} if pair.way.startswith("nixl") else {"port": int(address.rpartition(":")[2])}
    successor = pair.start(**port)
    ticket = successor.publish(SMALL, 9)
    old = {"tcp": "unknown_ticket", "jax": "timeout"}.get(pair.way, "lost")
    assert pair.consumer.fetch(tickets[3], SMALL, 3, seconds=0.5) == old
    assert pair.consumer.fetch(ticket, SMALL, 9) == "right"
    successor.kill()


def test_a_producer_killed_while_bytes_flow_never_gives_wrong_ones(pair):
    victim = pair.start()
    ticket = victim.publish(BIG)
    fetch = pair.consumer.begin_fetch(ticket, BIG)
    time.sleep(0.03)
    victim.kill()
    assert fetch.result(timeout=30) in ("right", "lost")
    pair.assert_nothing_is_held(pair.consumer)


def test_a_killed_consumer_costs_the_producer_nothing(pair):
    victim = pair.start()
    tickets = [pair.producer.publish(BIG, seed) for seed in range(2)]
    assert victim.fetch(tickets[0], BIG, 0) == "right"
    victim.begin_fetch(tickets[1], BIG, 1)
    time.sleep(0.01)
    victim.kill()
    for ticket in tickets:
        pair.producer.call("retire", ticket_id=ticket["id"])
    pair.assert_nothing_is_held()
    assert pair.publish_and_fetch(BIG, seed=2) == "right"


@pytest.mark.parametrize("pauses", [10, pytest.param(200, marks=pytest.mark.slow)])
def test_a_producer_that_often_pauses_still_serves(pair, pauses):
    """What is given up meanwhile must not use up what it serves with."""
    pair.publish_and_fetch(SMALL, 0)
    for seed in range(pauses):
        tickets = [pair.producer.publish(SMALL, seed) for _ in range(6)]
        pair.producer.stop()
        try:
            fetches = [pair.consumer.begin_fetch(ticket, SMALL, seed, seconds=0.1) for ticket in tickets]
            assert {fetch.result(timeout=20) for fetch in fetches} <= {"timeout", "right"}
        finally:
            pair.producer.go_on()
        for ticket in tickets:
            pair.producer.call("retire", ticket_id=ticket["id"])
    assert pair.publish_and_fetch(SMALL, seed=1, seconds=5.0) == "right"
    pair.assert_nothing_is_held()


@pytest.mark.parametrize("transfers", [200, pytest.param(3000, marks=pytest.mark.slow)])
def test_transfers_leave_nothing_behind(pair, transfers):
    shapes = [(120, 128, 1152), (0, 128, 132), (128, 128, 132)]

    def footprints():
        return [process.call("footprint") for process in (pair.producer, pair.consumer)]

    for seed in range(30):
        pair.publish_and_fetch(shapes, seed)
    before = footprints()
    assert {pair.publish_and_fetch(shapes, seed) for seed in range(transfers)} == {"right"}
    pair.assert_nothing_is_held()
    for was, now in zip(before, footprints(), strict=True):
        assert now["kib"] - was["kib"] < 16 * 1024  # all that travelled is 30 MiB or more
        assert now["files"] <= was["files"] + 4
        assert now["threads"] <= was["threads"] + 2
