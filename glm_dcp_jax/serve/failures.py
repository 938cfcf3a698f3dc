"""Errors that nobody foresaw, answered where what is around the app still has its part in the answer."""

import logging

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from glm_dcp_jax.serve.errors import internal_error

_LOG = logging.getLogger(__name__)


class AnswerFailures:
    """ASGI middleware: an exception is logged and answered 500, with the headers that pages of other origins need.

    Starlette's own answer to it comes from outside of all middleware. An answer that has begun is broken off.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        started = False

        async def noting(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, noting)
        except Exception:
            if started or scope["type"] != "http":
                raise
            _LOG.exception("a request failed")
            await internal_error().response()(scope, receive, send)
