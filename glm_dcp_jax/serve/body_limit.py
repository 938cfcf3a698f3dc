"""Request bodies have a size limit, so that none is read into memory, and parsed, for nothing, and are not waited for
by a server that ends."""

import asyncio

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_dcp_jax.serve.errors import SHUTTING_DOWN, ApiError, json_response

_BYTES_PER_TOKEN = 64
"""Far more than a token takes, as text or as a number, so that several long prompts fit one request."""
_LEAST, _MOST = 2**20, 2**26


def most_bytes(max_model_len: int) -> int:
    """The largest body to take: room for several prompts of the model's length, from 1 MiB to 64 MiB."""
    return min(max(_LEAST, _BYTES_PER_TOKEN * max_model_len), _MOST)


class LimitBody:
    """ASGI middleware: a body of more than `limit` bytes is answered 413, announced or not.

    One that is not there yet when `stopping` is set is answered 503.
    """

    def __init__(self, app: ASGIApp, limit: int, stopping: asyncio.Event) -> None:
        self._app = app
        self._limit = limit
        self._stopping = stopping

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counting what comes, or refuse it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif self._announced(scope) > self._limit:
            error = ApiError(self._message, 413)
            await json_response(error.body, error.status)(scope, receive, send)
        else:
            await self._app(scope, self._counting(receive), send)

    @property
    def _message(self) -> str:
        return f"the body is too large; this server takes at most {self._limit} bytes"

    def _announced(self, scope: Scope) -> int:
        length = Headers(scope=scope).get("content-length", "")
        return int(length[:20]) if length.isascii() and length.isdecimal() else 0

    def _counting(self, receive: Receive) -> Receive:
        taken = 0
        complete = False

        async def counted() -> Message:
            nonlocal taken, complete
            message = await (receive() if complete else self._unless_stopping(receive))
            taken += len(message.get("body", b""))
            complete = not message.get("more_body", False)
            if taken > self._limit:
                raise HTTPException(413, self._message)  # within the app, which answers it like any other
            return message

        return counted

    async def _unless_stopping(self, receive: Receive) -> Message:
        part, stop = asyncio.ensure_future(receive()), asyncio.ensure_future(self._stopping.wait())
        try:
            await asyncio.wait((part, stop), return_when=asyncio.FIRST_COMPLETED)
            if not part.done():
                raise HTTPException(503, SHUTTING_DOWN)
            return part.result()
        finally:
            part.cancel()
            stop.cancel()
