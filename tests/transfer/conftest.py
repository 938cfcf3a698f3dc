"""Two sides without engines, and somebody between them."""

from collections.abc import Iterator

import pytest
from between import Between
from reading import HANDSHAKE, TRANSFER, Giver, Taker


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
def impatient() -> Iterator[Taker]:
    taker = Taker(handshake=HANDSHAKE, transfer=TRANSFER)
    yield taker
    taker.close()


@pytest.fixture(scope="module")
def between() -> Iterator[Between]:
    between = Between()
    yield between
    between.close()
