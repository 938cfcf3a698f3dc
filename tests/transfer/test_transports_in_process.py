"""Transports inside one process: what they give, refuse and hold; and the slab that nixl's tickets live in."""

import os
import random
import time
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transport_peer import HOST, SECRET, content

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.transfer import transports
from glm_dcp_jax.transfer.transports import TransportError, jax_pull, make_transport, nixl_agent
from glm_dcp_jax.transfer.transports.slab import Region, Slab


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
    end = due()
    while set(producer.usage().values()) != {
        0
    }:  # tcp's other half ends its sending a moment after we have all
        assert time.monotonic() < end
    with pytest.raises(TransportError, match="no ticket") as error:
        consumer.fetch(ticket, due())
    assert error.value.kind == "unknown_ticket"


def test_jax_publishes_no_more_than_its_staging_buffers(make):
    producer, size = make("jax"), jax_pull.MOST_PUBLISHED_BYTES // 2
    first = producer.publish([jnp.zeros((1, size), jnp.uint8)], [1])
    producer.publish([jnp.zeros((1, size), jnp.uint8)], [1])
    producer.publish([jnp.zeros((1, size), jnp.uint8)], [0])  # without rows it takes no room
    with pytest.raises(TransportError, match="no room") as error:
        producer.publish([jnp.zeros((1, size), jnp.uint8)], [1])
    assert error.value.kind == "busy"
    producer.retire(first["id"])
    producer.publish([jnp.zeros((1, size), jnp.uint8)], [1])


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
    monkeypatch.setattr(nixl_agent, "installed", lambda: None)
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


def test_nixl_is_installed_where_it_must_not_be_missing():
    """Elsewhere its tests skip, by name; where all of them are to run, this is what says that they did not."""
    if "NIXL_REQUIRED" in os.environ:
        assert "nixl" in transports.available()
