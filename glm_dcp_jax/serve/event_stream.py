"""Server-sent events that can still fail properly: the status line waits for the first event."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from glm_dcp_jax.serve.disconnect import while_connected
from glm_dcp_jax.serve.errors import ApiError, ClientGone, internal_error

_LOG = logging.getLogger(__name__)
_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
_COMMENT = b": keep-alive\n\n"


class EventStream(Response):
    """Sends each object of `events` as one `data:` line, then `data: [DONE]`.

    An error before the first event is an ordinary error answer; later it is an event, and the stream ends. When the
    client goes away or `stopping` is set, `events` is closed, which aborts what it runs. However it ends, `ended` is
    called.

    keep_alive: seconds without an event after which a comment is sent, which clients ignore and proxies count; 0 for
    never. A stream that is idle before its first event begins with one, so that a later error is an event.
    """

    _last = b"data: [DONE]\n\n"

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        stopping: asyncio.Event,
        ended: Callable[[], None] = lambda: None,
        keep_alive: float = 0.0,
    ) -> None:
        super().__init__(media_type="text/event-stream")
        self._events = events
        self._stopping = stopping
        self._ended, self._keep_alive = ended, keep_alive
        self._started = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Stream until the events or the client are gone."""
        try:
            await while_connected(receive, self._stopping, self._send_events(send))
        except ClientGone:
            return
        except ApiError as error:
            await self._fail(error, scope, receive, send)
        except Exception:
            _LOG.exception("a streamed request failed")
            await self._fail(internal_error(), scope, receive, send)
        else:
            await self._end(send)
        finally:
            self._ended()

    async def _send_events(self, send: Send) -> None:
        async with aclosing(self._events) as events, aclosing(_or_idle(events, self._keep_alive)) as steps:
            async for event in steps:
                if not self._started:
                    self._started = True
                    await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
                await _send(send, _COMMENT if event is None else self._lines(event))

    async def _fail(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        if self._started:
            for event in self._failure(error):
                await _send(send, self._lines(event))
            await self._end(send)
        else:
            await error.response()(scope, receive, send)

    async def _end(self, send: Send) -> None:
        if self._last:
            await _send(send, self._last)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    def _lines(self, event: dict[str, Any]) -> bytes:
        return _data(orjson.dumps(event))

    def _failure(self, error: ApiError) -> list[dict[str, Any]]:
        return [error.body]


class TypedEventStream(EventStream):
    """Events that are named by their `type` and numbered by `sequence_number`, from 0, as /v1/responses has them."""

    _last = b""

    def __init__(
        self,
        events: AsyncGenerator[dict[str, Any], None],
        stopping: asyncio.Event,
        failure: Callable[[ApiError], list[dict[str, Any]]],
        ended: Callable[[], None] = lambda: None,
        keep_alive: float = 0.0,
    ) -> None:
        """failure: the events that an error is, once others were sent."""
        super().__init__(events, stopping, ended, keep_alive)
        self._failure_events = failure
        self._sent = 0

    def _lines(self, event: dict[str, Any]) -> bytes:
        numbered = {**event, "sequence_number": self._sent}
        self._sent += 1
        return b"event: " + event["type"].encode() + b"\n" + _data(orjson.dumps(numbered))

    def _failure(self, error: ApiError) -> list[dict[str, Any]]:
        return self._failure_events(error)


def _data(data: bytes) -> bytes:
    return b"data: " + data + b"\n\n"


async def _send(send: Send, lines: bytes) -> None:
    await send({"type": "http.response.body", "body": lines, "more_body": True})


async def _or_idle(
    events: AsyncGenerator[dict[str, Any], None], seconds: float
) -> AsyncGenerator[dict[str, Any] | None, None]:
    """The events, and None whenever none has come for so long; 0 for never."""
    if not seconds:
        async for event in events:
            yield event
        return
    step: asyncio.Future[dict[str, Any] | None] | None = None
    try:
        while True:
            step = step or asyncio.ensure_future(_next(events))
            done, _ = await asyncio.wait((step,), timeout=seconds)
            if not done:
                yield None
                continue
            found, step = step.result(), None
            if found is None:
                return
            yield found
    finally:
        if step is not None:  # `events` cannot be closed while it runs
            step.cancel()
            await asyncio.gather(step, return_exceptions=True)


async def _next(events: AsyncGenerator[dict[str, Any], None]) -> dict[str, Any] | None:
    return await anext(events, None)
