"""A consumer whose producer lies, stalls or dies at any word, and a producer whose consumer does; without engines.

What has arrived without an error is right, or the test's Taker raises; everything ends by our deadlines; the producer
has its pages and its memory back; and both sides then do it right with one another.
"""

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from between import Between, Broken, alters, always, answers, at, breaks, breaks_after
from reading import CONSUMER, LENGTH, PIECE, PRODUCER, PROMPT, ROW_BYTES, Giver, Taker, wait_for

from glm_dcp_jax.transfer.fingerprint import PROTOCOL
from glm_dcp_jax.transfer.loads import token_digest
from glm_dcp_jax.transfer.transports import make_transport
from glm_dcp_jax.transfer.wire import Peer, PeerError, RemoteError, connect

CONVERSATION = ("hello", "layout", "open", "piece", "taken", "confirm", "ack")
"""What a load says, in this order."""


@pytest.fixture(scope="module")
def giver() -> Iterator[Giver]:
    giver = Giver()
    yield giver
    giver.close()


@pytest.fixture(scope="module")
def taker() -> Iterator[Taker]:
    taker = Taker()
    yield taker
    taker.close()


@pytest.fixture(scope="module")
def between() -> Iterator[Between]:
    between = Between()
    yield between
    between.close()


@pytest.fixture(autouse=True)
def afterwards(giver: Giver, taker: Taker) -> Iterator[None]:
    """Both sides are idle, and go on."""
    yield
    giver.wait_idle()
    assert taker.read(giver.offer("afterwards")) is None
    wait_for(lambda: giver.freed[-1:] == ["afterwards"])
    giver.wait_idle()
    assert taker.consumer.loads == 0
    assert sorted(giver.freed) == sorted(set(giver.freed)), "given back twice"
    giver.freed.clear()


def test_a_load_says_this(giver, taker, between):
    with between.doing(at("nothing", breaks)):
        assert taker.read(between.through(giver.offer())) is None
    said = [message["do"] for message in between.seen]
    assert list(dict.fromkeys(said)) == list(CONVERSATION)
    assert said.count("piece") == said.count("taken") == -(-(LENGTH - 1) // PIECE)


class TestBrokenConnections:
    @pytest.mark.parametrize("when", [breaks, breaks_after])
    @pytest.mark.parametrize("do", CONVERSATION)
    def test_once_at_any_word_is_overcome(self, giver, taker, between, do, when):
        with between.doing(at(do, when)):
            assert taker.read(between.through(giver.offer())) is None
        assert between.count("open") == (1 if do in ("hello", "layout", "ack") or (do, when) == ("open", breaks) else 2) or do == "open"
        if (do, when) == ("ack", breaks):
            giver.producer.release  # the pages come back by the lease alone
            _forget_lost_ack(giver)

    @pytest.mark.parametrize("do", CONVERSATION[:-1])
    def test_every_time_is_lost(self, giver, taker, between, do):
        with between.doing(always(do, breaks)):
            failure = taker.read(between.through(giver.offer()))
        assert failure is not None and failure.kind == "lost"


def _forget_lost_ack(giver: Giver) -> None: ...
