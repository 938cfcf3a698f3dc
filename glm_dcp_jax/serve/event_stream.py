"""Server-sent events that can still fail properly: the status line waits for the first event."""

import logging
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm_dcp_jax.serve.disconnect import while_connected
from glm_dcp_jax.serve.errors import ApiError, ClientGone, internal_error, json_response

_LOG = logging.getLogger(__name__)
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


class EventStream(Response):
    """Sends each object of `events` as one `data:` line, then `data: [DONE]`.

    An ApiError before the first event is an ordinary error answer; later it is an event, and the stream ends. When
    the client goes away, `events` is closed, which aborts what it runs.
    """

    def __init__(self, events: AsyncGenerator[dict[str, Any], None]) -> None:
        super().__init__(media_type="text/event-stream")
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the events or the client are gone."""
        try:
            await while_connected(receive, self._stream(scope, receive, send))
        except ClientGone:
            pass  # the generator is closed by now, and there is nobody to tell

    async def _stream(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False
        try:
            async with aclosing(self._events) as events:
                async for event in events:
                    if not started:
                        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                        started = True
                    await _send(send, orjson.dumps(event))
        except Exception as error:
            if not isinstance(error, ApiError):
                _LOG.exception("a streamed request failed")
            answer = error if isinstance(error, ApiError) else internal_error()
            if not started:
                await json_response(answer.body, answer.status)(scope, receive, send)
                return
            await _send(send, orjson.dumps(answer.body))
        await _send(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _send(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
