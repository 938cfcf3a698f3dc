"""One offer of a producer: the rows that are held for a consumer, and how far their transfer has come."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

EndingKind = Literal["finished", "failed", "expired", "dropped"]


@dataclass(frozen=True)
class Held:
    """The rows of one finished request, in pages that are kept for one consumer.

    length: tokens whose rows are held. digest: sha256 of the token ids. give_back: frees the pages; called exactly
    once, from whichever thread ends the offer or its last read, never under the registry's lock. generation: of the
    pools, which change when a failed step takes them.
    """

    request_id: str
    length: int
    digest: bytes
    pages: tuple[int, ...]
    give_back: Callable[[], None]
    generation: int = 0


@dataclass(frozen=True)
class Opened:
    """What a consumer's open gives: the number of its attempt, the rows, and the length of a lease in seconds."""

    attempt: int
    held: Held
    lease: float


@dataclass(frozen=True)
class Ending:
    """How an offer ended; released: producer ranks that waited for nobody by then."""

    kind: EndingKind
    reason: str
    released: frozenset[int]


@dataclass
class Offer:
    """The state of an offer, which its registry changes.

    deadline: when the lease is over, in seconds of the registry's clock. consumer: the secret of the load that opened
    it. attempt: 0 until then. waiting: producer rank -> consumer ranks whose ack of this attempt is missing.
    reads: how many are going on.
    """

    held: Held
    deadline: float
    consumer: bytes | None = None
    attempt: int = 0
    waiting: dict[int, set[int]] = field(default_factory=dict)
    reads: int = 0
    ending: Ending | None = None

    @property
    def released(self) -> frozenset[int]:
        """Producer ranks that wait for nobody."""
        return frozenset(rank for rank, readers in self.waiting.items() if not readers)
