"""One suite over the transports that cross processes, with two real ones: what arrives, fails and is left behind.

Only processes that a test started are stopped or killed, by their id.
"""

import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transport_peer import HOST, SECRET, PeerProcess, Shape, content

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer import transports
from glm_dcp_jax.transfer.transports import TransportError, jax_pull, make_transport, nixl
from glm_dcp_jax.transfer.transports.slab import Region, Slab

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
    if pair.way == "nixl-tcp":
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
    # jax's library goes on trying to connect to where nobody is.
    assert after == ("timeout" if pair.way == "jax" else "lost")
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


def due(seconds: float = 10.0) -> float:
    return time.monotonic() + seconds


@pytest.fixture
def make() -> Iterator[Callable[..., transports.Transport]]:
    """Transports in this process, closed at the end."""
    made = []

    def one(name: str, secret: bytes = SECRET, **options) -> transports.Transport:
        made.append(make_transport(name, host=HOST, secret=secret, options=options))
        return made[-1]

    yield one
    for transport in made:
        transport.close()
        transport.close()


@pytest.mark.parametrize("name", ["inproc", "tcp"])
def test_one_process_may_be_both_sides(make, name):
    producer, consumer = make(name), make(name)
    shapes = [(5, 8, 1152), (0, 8, 132), (8, 8, 132)]
    arrays = [jnp.asarray(content(0, index, shape)) for index, shape in enumerate(shapes)]
    ticket = producer.publish(arrays, [5, 0, 8])
    assert producer.usage() == {"tickets": 1, "bytes": 8 * 1152 + 16 * 132, "quarantined_bytes": 0}
    for _ in range(2):
        fetched = consumer.fetch(ticket, due())
        for array, got, rows in zip(arrays, fetched, [5, 0, 8], strict=True):
            np.testing.assert_array_equal(got, array[:rows])
            got += 1  # the caller's own: neither the published array nor the next fetch's
    producer.retire(ticket["id"])
    assert set(producer.usage().values()) == {0}
    with pytest.raises(TransportError, match="no ticket") as error:
        consumer.fetch(ticket, due())
    assert error.value.kind == "unknown_ticket"


def test_jax_publishes_no_more_than_its_staging_buffers(make, monkeypatch):
    monkeypatch.setattr(jax_pull, "PUBLISH_SECONDS", 0.2)
    producer, size = make("jax"), jax_pull.MOST_PUBLISHED_BYTES // 2
    first = producer.publish([jnp.zeros((1, size), jnp.uint8)], [1])
    producer.publish([jnp.zeros((1, size), jnp.uint8)], [1])
    producer.publish([jnp.zeros((1, size), jnp.uint8)], [0])  # without rows it takes no room
    with pytest.raises(TransportError, match="no room") as error:
        producer.publish([jnp.zeros((1, size), jnp.uint8)], [1])
    assert error.value.kind == "timeout"
    timer = threading.Timer(0.05, producer.retire, [first["id"]])
    timer.start()
    producer.publish([jnp.zeros((1, size), jnp.uint8)], [1])
    timer.join()


def test_a_transport_that_closes_takes_its_tickets_along(make):
    producer, consumer = make("inproc"), make("inproc")
    ticket = producer.publish([jnp.zeros((4, 4), jnp.uint8)], [4])
    producer.close()
    with pytest.raises(TransportError):
        consumer.fetch(ticket, due())


@pytest.mark.parametrize("name", ["inproc", "tcp"])
def test_no_time_and_no_wish_are_told_apart(make, name):
    transport = make(name)
    ticket = transport.publish([jnp.zeros((4, 4), jnp.uint8)], [4])
    with pytest.raises(TransportError) as error:
        transport.fetch(ticket, due(-1))
    assert error.value.kind == "timeout"
    with pytest.raises(TransportError) as error:
        transport.fetch(ticket, due(), lambda: True)
    assert error.value.kind == "cancelled"


def test_tcp_is_only_for_those_who_know_the_secret(make):
    ticket = make("tcp").publish([jnp.zeros((4, 4), jnp.uint8)], [4])
    with pytest.raises(TransportError, match="give both engines the same one") as error:
        make("tcp", secret=b"another").fetch(ticket, due())
    assert error.value.kind == "unsupported"


@pytest.mark.parametrize("rows", [3, 5])
def test_a_ticket_whose_sizes_are_not_the_producers_is_corrupt(make, rows):
    producer, consumer = make("tcp"), make("tcp")
    ticket = producer.publish([jnp.zeros((8, 4), jnp.uint8)], [4])
    with pytest.raises(TransportError) as error:
        consumer.fetch(ticket | {"rows": [rows]}, due())
    assert error.value.kind == "corrupt"


def test_only_rows_of_bytes_on_one_device_are_published(make, devices):
    transport = make("inproc")
    two = jax.sharding.NamedSharding(jax.sharding.Mesh(devices(2), "x"), jax.sharding.PartitionSpec("x"))
    for array, rows, complaint in [
        (jnp.zeros((4, 4), jnp.int8), 4, "moves uint8"),
        (jnp.zeros(4, jnp.uint8), 4, "moves uint8"),
        (jnp.zeros((4, 4), jnp.uint8), 5, "5 rows of an array that has 4"),
        (jax.device_put(np.zeros((4, 4), np.uint8), two), 4, "one array per device"),
    ]:
        with pytest.raises(ValueError, match=complaint):
            transport.publish([array], [rows])
    with pytest.raises(ValueError, match="one number per array"):
        transport.publish([], [1])
    assert set(transport.usage().values()) == {0}


@pytest.mark.parametrize(
    ("name", "host", "options", "complaint"),
    [
        ("udp", HOST, {}, "there is no transport 'udp'; use inproc, tcp, jax, nixl"),
        ("tcp", HOST, {"size": 1}, "no option 'size'; its options: port, advertise"),
        ("inproc", HOST, {"port": 1}, "its options: none"),
        ("tcp", HOST, {"port": "1"}, "give a value of type int"),
        ("tcp", HOST, {"port": 70000}, "choose an address of this machine and a free port"),
        ("jax", HOST, {"port": 70000}, "choose an address of this machine and a free port"),
        ("tcp", "192.0.2.1", {}, "choose an address of this machine"),
        ("jax", "192.0.2.1", {}, "choose an address of this machine"),
        ("tcp", "0.0.0.0", {}, "or say which by option `advertise`"),
        ("nixl", "::", {}, "others cannot connect to that"),
        ("nixl", HOST, {"slab_bytes": 0}, "give at least 64"),
    ],
)
def test_a_transport_that_cannot_be_is_refused(name, host, options, complaint):
    with pytest.raises(ConfigError, match=complaint):
        make_transport(name, host=host, secret=SECRET, options=options)


def test_a_missing_nixl_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(nixl, "installed", lambda: None)
    assert transports.available() == ["inproc", "tcp", "jax"]
    with pytest.raises(ConfigError, match="pip install --no-deps nixl-cu12"):
        make_transport("nixl", host=HOST, secret=SECRET, options={})


def test_regions_of_a_slab_never_overlap_and_all_come_back():
    slab, draw = Slab(1 << 16), random.Random(0)
    taken: list[Region] = []
    for _ in range(3000):
        if taken and draw.random() < 0.5:
            slab.give(taken.pop(draw.randrange(len(taken))))
        else:
            try:
                taken.append(slab.take(draw.randrange(0, 5000), due(-1), lambda: False, "a test"))
            except TransportError as error:
                assert error.kind == "timeout"
        ends = [
            0,
            *(
                end
                for one in sorted(taken, key=lambda one: one.start)
                for end in (one.start, one.start + one.size)
            ),
        ]
        assert ends == sorted(ends) and ends[-1] <= 1 << 16
        assert slab.used == sum(region.size for region in taken)
    for region in taken:
        slab.give(region)
    assert slab.take(1 << 16, due(), lambda: False, "a test") == Region(0, 1 << 16)
    with pytest.raises(TransportError, match="raise option slab_bytes") as error:
        slab.take((1 << 16) + 1, due(), lambda: False, "a test")
    assert error.value.kind == "unsupported"
