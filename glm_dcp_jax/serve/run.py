"""Listening, serving, and stopping when told to."""

import asyncio
import logging
import signal
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import uvicorn
from fastapi import FastAPI

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.app import create_app
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.settings import ServerSettings

_LOG = logging.getLogger(__name__)
_DRAIN_SECONDS = 5
"""How long running requests may go on after SIGINT or SIGTERM; a second signal ends them at once."""


def bind(host: str, port: int) -> socket.socket:
    """Take the port before a model is loaded for nothing. Raises ConfigError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise ConfigError(f"cannot listen on {host} port {port} ({error.strerror}); choose another --port or --host")
    return listener


def serve(engine: Engine, settings: ServerSettings, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then let running requests finish for a few seconds and shut the engine down."""
    app = create_app(engine, settings)
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=_DRAIN_SECONDS)
    server = _Server(config, engine, _url(settings.host, listener))
    # uvicorn raises the signal again when it is done; by then it has done its work.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    server.run(sockets=[listener])
