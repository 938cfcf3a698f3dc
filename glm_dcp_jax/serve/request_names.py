"""What a request is called, in its answer and in the log: as its client, or a router before us, calls it."""

import re
import uuid
from typing import NamedTuple

from fastapi import Request
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.logs import REQUEST_ID

HEADER = "x-request-id"
_SPEAKABLE = re.compile(r"[\x21-\x7e]{1,128}")


class Names(NamedTuple):
    """answer: the id that the answer has. engine: the engine's own, which no other request has."""

    answer: str
    engine: str


class NameRequests:
    """ASGI middleware: the log calls a request by its X-Request-Id, or one that is made, and so does its answer."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on under its name."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        name = _given(Headers(scope=scope)) or uuid.uuid4().hex
        # Left as it is at the end: what is said after that, in this task, is about this request too.
        REQUEST_ID.set(name)

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [*message.get("headers", ()), (HEADER.encode(), name.encode())]
                message = {**message, "headers": headers}
            await send(message)

        await self._app(scope, receive, send_named)


def names_of(request: Request, kind: str, wanted: str | None = None) -> Names:
    """kind: what ids of this endpoint begin with. wanted: the body's `request_id`, if the header gives none.

    Of X-Request-Id only what can stand in a log is taken. Raises ApiError 400 for a `request_id` that cannot.
    """
    if wanted is not None and not _SPEAKABLE.fullmatch(wanted):
        raise ApiError("request_id must be 1 to 128 visible ASCII characters", param="request_id")
    given = _given(request.headers) or wanted
    if given is None:
        name = kind + (REQUEST_ID.get() or uuid.uuid4().hex)
        return Names(name, name)
    # A client may say the same name twice, at once even.
    return Names(kind + given, f"{kind}{given}-{uuid.uuid4().hex[:8]}")


def _given(headers: Headers) -> str | None:
    given = headers.get(HEADER, "")
    return given if _SPEAKABLE.fullmatch(given) else None
