"""Listening, and stopping when told to."""

import asyncio
import logging
import math
import signal
import socket
from types import FrameType

import uvicorn

from glm_dcp_jax.serve.router.app import create_app
from glm_dcp_jax.serve.router.context import RouterContext
from glm_dcp_jax.serve.router.settings import RouterSettings
from glm_dcp_jax.serve.run import url

_LOG = logging.getLogger(__name__)
_END_SECONDS = 3
"""How long requests may take to end once they are told to."""


def serve(settings: RouterSettings, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then give running requests settings.shutdown_timeout seconds."""
    app = create_app(settings)
    graceful = math.ceil(settings.shutdown_timeout) + _END_SECONDS
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=graceful)
    # uvicorn stops on these signals and then raises them again, when there is nothing left to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    _Server(config, app.state.context, url(settings.host, listener)).run(sockets=[listener])


class _Server(uvicorn.Server):
    """Says where it listens; ends running requests when it is to stop."""

    def __init__(self, config: uvicorn.Config, context: RouterContext, url: str) -> None:
        super().__init__(config)
        self._context, self._url = context, url

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops the router; a second one ends running requests at once, and in order."""
        if self.should_exit:
            self._context.stopping.set()
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        settings = self._context.settings
        count = f"{len(settings.prefill)} prefill and {len(settings.decode)} decode servers"
        _LOG.info("the router is ready at %s/v1, %s, %s", self._url, count, settings.policy)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, wait for the running ones for a while, then end them."""
        patience = self._context.settings.shutdown_timeout
        timer = asyncio.get_running_loop().call_later(patience, self._context.stopping.set)
        await super().shutdown(sockets)
        timer.cancel()
