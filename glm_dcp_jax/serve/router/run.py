"""Listening, and stopping when told to."""

import logging
import socket

from fastapi import FastAPI

from glm_dcp_jax.serve.draining import DrainingServer
from glm_dcp_jax.serve.router.app import create_app
from glm_dcp_jax.serve.router.context import RouterContext
from glm_dcp_jax.serve.router.settings import RouterSettings
from glm_dcp_jax.serve.run import url

_LOG = logging.getLogger(__name__)


def serve(settings: RouterSettings, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then give running requests settings.shutdown_timeout seconds."""
    _Server(create_app(settings), url(settings.host, listener)).run(sockets=[listener])


class _Server(DrainingServer):
    """Says where it listens."""

    def __init__(self, app: FastAPI, url: str) -> None:
        self._context: RouterContext = app.state.context
        super().__init__(app, self._context.drain)
        self._url = url

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        settings = self._context.settings
        count = f"{len(settings.prefill)} prefill and {len(settings.decode)} decode servers"
        _LOG.info("the router is ready at %s/v1, %s, %s", self._url, count, settings.policy)
