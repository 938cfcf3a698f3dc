"""What a producer holds for consumers: single-use keys, leases, attempts, and the acks that free the pages.

An offer ends once: finished (every reader of every producer rank has acked), failed (a negative ack), expired or
dropped. Its pages are given back when it has ended and nobody reads them. Nothing is ever counted: an ack names an
attempt and readers, so duplicates, late and reordered acks change nothing.

Keys are looked up in a dict, which is safe: a key is 128 random bits, so guessing one is hopeless, and a dict compares
seeded hashes before it compares strings, so the time of a lookup does not help to build one up piece by piece.
"""

import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf

from glm_dcp_jax.transfer.held import Ending, EndingKind, Held, Offer, Opened
from glm_dcp_jax.transfer.refused import RefusalKind, Refused, refusal

__all__ = ["Held", "OfferStats", "Offers", "Opened", "Refused"]

REMEMBERED = 4096
"""Ended keys whose later use is refused with the right kind; a key that ended before those is unknown."""
RENEWAL = 2 / 3
"""A heartbeat renews this part of a lease, so a consumer that dies soon frees the pages."""

_REFUSED_AS: Mapping[EndingKind, RefusalKind] = {
    "finished": "used",
    "failed": "used",
    "expired": "expired",
    "dropped": "dropped",
}


@dataclass(frozen=True)
class OfferStats:
    """Counts since the start, but `held`: offers whose pages are not given back yet. refused: by kind."""

    held: int
    offered: int
    finished: int
    failed: int
    expired: int
    dropped: int
    late_acks: int
    refused: Mapping[RefusalKind, int]


class Offers:
    """The producer's registry, for use from any thread.

    An offer is expired from its deadline on, whether or not `expire` has come by: nothing but `expire`, `drop` and
    `close` touches it then. Give-backs are collected in an ExitStack that is entered before the lock, so all of them
    run after the lock is released, even when the call is refused or another give-back raises.

    Errors: ValueError if `lease` (seconds) is not positive and finite.
    """

    def __init__(self, lease: float, clock: Callable[[], float] = time.monotonic) -> None:
        if not 0 < lease < inf:
            raise ValueError(f"a lease of {lease} seconds is impossible; use a positive number, such as 30")
        self.lease = lease
        self._clock = clock
        self._lock = threading.Lock()
        # A key is in one of these: while its pages are held, and afterwards.
        self._offers: dict[str, Offer] = {}
        self._past: dict[str, Ending] = {}
        self._offered = 0
        self._late_acks = 0
        self._ended: Counter[EndingKind] = Counter()
        self._refused: Counter[RefusalKind] = Counter()

    def add(self, held: Held) -> str:
        """Hold these pages for whoever brings the key that is returned; the lease starts now."""
        key = secrets.token_hex(16)
        with self._lock:
            self._offers[key] = Offer(held, self._clock() + self.lease)
            self._offered += 1
        return key

    def open(self, key: str, consumer: str, digest: bytes, readers: Mapping[int, frozenset[int]]) -> Opened:
        """Start the one load of a key, or start it over after its connection broke, which voids all acks so far.

        consumer: a secret of that load; only its owner may open the key again. digest: of the consumer's own tokens.
        readers: producer rank -> the consumer ranks whose ack it waits for. If no rank waits for anyone, there is
        nothing to load, and the offer is finished by this.

        Errors: Refused; a refused open leaves the offer as it was.
        """
        secret = consumer.encode(errors="surrogatepass")  # any text that a peer can send
        with ExitStack() as after, self._lock:
            offer = self._find(key)
            if offer.consumer is not None and not secrets.compare_digest(offer.consumer, secret):
                raise self._counted(refusal("used"))
            if digest != offer.held.digest:
                raise self._counted(refusal("other_prompt"))
            offer.consumer = secret
            offer.attempt += 1
            offer.waiting = {rank: set(consumers) for rank, consumers in readers.items()}
            self._finish_if_acked(key, offer, after)
            return Opened(offer.attempt, offer.held, self.lease)

    @contextmanager
    def reading(self, key: str, attempt: int) -> Iterator[Held]:
        """Inside, the pages stay, whatever ends the offer meanwhile; a give-back that came due happens on exit.

        Errors: Refused on entry.
        """
        with self._lock:
            offer = self._find(key, attempt)
            offer.reads += 1
        try:
            yield offer.held
        finally:
            with ExitStack() as after, self._lock:
                offer.reads -= 1
                self._give_back_if_idle(key, offer, after)

    def beat(self, keys: Iterable[str]) -> list[str]:
        """Renew the leases of these keys; returns those of them that are not held any more."""
        lost = []
        with self._lock:
            for key in keys:
                offer = self._look_up(key)
                if isinstance(offer, Refused):
                    lost.append(key)
                else:
                    offer.deadline = max(offer.deadline, self._clock() + self.lease * RENEWAL)
        return lost

    def held(self, key: str) -> Held:
        """What is held under a key.

        Errors: Refused.
        """
        with self._lock:
            return self._find(key).held

    def is_held(self, key: str) -> bool:
        """Whether it can still be opened, or read by whoever has."""
        with self._lock:
            return not isinstance(self._look_up(key), Refused)

    def confirm(self, key: str, attempt: int) -> None:
        """Say that the pages have been held until now, so whatever this attempt has read of them is right.

        Errors: Refused.
        """
        with self._lock:
            self._find(key, attempt)

    def ack(self, key: str, attempt: int, readers: Iterable[int], ok: bool) -> bool:
        """Consumer ranks are done with every producer rank; with `ok` False their load failed, which ends the offer.

        Returns whether this ack ended the offer. One for a key that is not held or for another attempt is counted as
        late and changes nothing.
        """
        with ExitStack() as after, self._lock:
            offer = self._look_up(key, attempt)
            if isinstance(offer, Refused):
                self._late_acks += 1
                return False
            if not ok:
                self._end(key, offer, "failed", "the consumer's load failed", after)
                return True
            acked = set(readers)
            for waiting in offer.waiting.values():
                waiting -= acked
            return self._finish_if_acked(key, offer, after)

    def drop(self, key: str, reason: str = "", unopened: bool = False, consumer: str = "") -> bool:
        """End an offer at once, whatever its state; returns whether there was one to end.

        unopened: only one that nobody has opened, or nobody but `consumer`, who has perhaps not heard that it has: who
        has, says by an ack that it is done, or its lease ends.
        """
        ours = (None, consumer.encode(errors="surrogatepass"))
        with ExitStack() as after, self._lock:
            offer = self._offers.get(key)
            if offer is None or offer.ending is not None or (unopened and offer.consumer not in ours):
                return False
            self._drop(key, offer, reason, after)
            return True

    def expire(self) -> list[str]:
        """End every offer whose lease is over; returns their request ids."""
        with ExitStack() as after, self._lock:
            now = self._clock()
            over = [
                (key, offer)
                for key, offer in self._offers.items()
                if offer.ending is None and now >= offer.deadline
            ]
            for key, offer in over:
                self._end(key, offer, "expired", "", after)
            return [offer.held.request_id for _, offer in over]

    def close(self) -> None:
        """Drop every offer."""
        with ExitStack() as after, self._lock:
            for key, offer in list(self._offers.items()):
                if offer.ending is None:
                    self._drop(key, offer, "the producer is shutting down", after)

    def stats(self) -> OfferStats:
        """The counts at this moment."""
        with self._lock:
            return OfferStats(
                held=len(self._offers),
                offered=self._offered,
                finished=self._ended["finished"],
                failed=self._ended["failed"],
                expired=self._ended["expired"],
                dropped=self._ended["dropped"],
                late_acks=self._late_acks,
                refused=dict(self._refused),
            )

    def released_ranks(self, key: str) -> frozenset[int]:
        """Producer ranks that wait for nobody: all readers of the last attempt have acked; none of an unknown key."""
        with self._lock:
            offer, past = self._offers.get(key), self._past.get(key)
            if offer is not None:
                return offer.released
            return past.released if past is not None else frozenset()

    # What follows runs under the lock.

    def _look_up(self, key: str, attempt: int | None = None) -> Offer | Refused:
        """The offer that is held under this key, and, unless None, in this attempt; or why there is none."""
        offer = self._offers.get(key)
        ending = self._past.get(key) if offer is None else offer.ending
        if ending is not None:
            return refusal(_REFUSED_AS[ending.kind], ending.reason)
        if offer is None:
            return refusal("unknown")
        if self._clock() >= offer.deadline:
            return refusal("expired")
        # Attempt 0 is that of a key which nobody has opened.
        if attempt is not None and (attempt < 1 or attempt != offer.attempt):
            return refusal("stale_attempt", f"attempt {attempt}; the latest is {offer.attempt}")
        return offer

    def _find(self, key: str, attempt: int | None = None) -> Offer:
        found = self._look_up(key, attempt)
        if isinstance(found, Refused):
            raise self._counted(found)
        return found

    def _counted(self, refused: Refused) -> Refused:
        self._refused[refused.kind] += 1
        return refused

    def _finish_if_acked(self, key: str, offer: Offer, after: ExitStack) -> bool:
        if any(offer.waiting.values()):
            return False
        self._end(key, offer, "finished", "", after)
        return True

    def _drop(self, key: str, offer: Offer, reason: str, after: ExitStack) -> None:
        """An offer that has been refused as expired remains so."""
        if self._clock() >= offer.deadline:
            self._end(key, offer, "expired", "", after)
        else:
            self._end(key, offer, "dropped", reason, after)

    def _end(self, key: str, offer: Offer, kind: EndingKind, reason: str, after: ExitStack) -> None:
        offer.ending = Ending(kind, reason, offer.released)
        self._ended[kind] += 1
        self._give_back_if_idle(key, offer, after)

    def _give_back_if_idle(self, key: str, offer: Offer, after: ExitStack) -> None:
        if offer.ending is None or offer.reads:
            return
        del self._offers[key]
        self._past[key] = offer.ending
        if len(self._past) > REMEMBERED:
            del self._past[next(iter(self._past))]
        after.callback(offer.held.give_back)
