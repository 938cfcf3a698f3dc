"""What a request is called, in its answer and in the log: as its client, or a router before us, calls it."""

import re
import uuid
from typing import NamedTuple

from fastapi import Request

HEADER = "x-request-id"
_SPEAKABLE = re.compile(r"[\x21-\x7e]{1,128}")


class Names(NamedTuple):
    """answer: the id that the answer has. engine: the engine's own, which no other request has."""

    answer: str
    engine: str


def names_of(request: Request, kind: str) -> Names:
    """kind: what ids of this endpoint begin with. Of X-Request-Id only what can stand in a log is taken."""
    given, fresh = request.headers.get(HEADER, ""), uuid.uuid4().hex
    if not _SPEAKABLE.fullmatch(given):
        return Names(kind + fresh, kind + fresh)
    # A client may say the same name twice, at once even.
    return Names(kind + given, f"{kind}{given}-{fresh[:8]}")
