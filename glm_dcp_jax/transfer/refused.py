"""Why a producer does not serve a consumer: a kind for programs and counters, a sentence for people."""

from collections.abc import Mapping
from typing import Literal

RefusalKind = Literal[
    "unknown", "used", "expired", "wrong_engine", "other_prompt", "too_short", "stale_attempt", "dropped"
]

_SENTENCES: Mapping[RefusalKind, str] = {
    "unknown": "no pages are held under this transfer key: it is forged, was given out before this engine's last "
    "start, or ended long ago",
    "used": "this transfer key has been used: a key serves one load by one consumer; ask the producer for another",
    "expired": "the lease of this transfer key has expired: its consumer must send heartbeats from the request's "
    "arrival on",
    "wrong_engine": "this transfer key was given out by another engine: take its address and engine id from the same "
    "answer as the key",
    "other_prompt": "this transfer key belongs to another prompt: send the very tokens that the producer has seen",
    "too_short": "the producer holds fewer tokens than this: ask for no more than its answer says it holds",
    "stale_attempt": "this is not the latest attempt of the transfer: open the key again",
    "dropped": "the pages of this transfer key were released before they had been read",
}


class Refused(Exception):
    """The producer does not serve this, because of `kind`."""

    def __init__(self, kind: RefusalKind, message: str) -> None:
        super().__init__(message)
        self.kind: RefusalKind = kind


def refusal(kind: RefusalKind, detail: str = "") -> Refused:
    """A refusal that says what to change.

    detail: what is particular to this case; never a key, because logs keep it.
    """
    return Refused(kind, _SENTENCES[kind] + (f" ({detail})" if detail else ""))
