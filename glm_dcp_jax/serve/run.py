"""Listening, serving, and stopping when told to."""

import asyncio
import logging
import signal
import socket
from types import FrameType

from fastapi import FastAPI

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.app import create_app
from glm_dcp_jax.serve.context import Context
from glm_dcp_jax.serve.draining import DrainingServer
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.settings import ServerSettings

_LOG = logging.getLogger(__name__)
_READY_POLL_SECONDS = 0.1


def bind(host: str, port: int) -> socket.socket:
    """Take the port before a model is loaded for nothing. Raises ConfigError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
    except UnicodeError:
        raise ConfigError(
            f"cannot listen on {host!r}: that is no host's name; choose another --host"
        ) from None
    except OSError as error:
        raise ConfigError(f"cannot listen on {host}: {error.strerror}; choose another --host") from None
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        reason = f"cannot listen on {host} port {port} ({error.strerror})"
        raise ConfigError(f"{reason}; choose another --port or --host") from None
    return listener


class WarmUpFailed(RuntimeError):
    """The engine died before it could serve anything."""


def serve(engine: Engine, settings: ServerSettings, listener: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM, then give what runs settings.shutdown_timeout seconds and shut the engine down.

    Raises WarmUpFailed. An engine that dies later leaves the server up, to tell its clients and health checks.
    """
    greeting = f"{settings.served_model_names[0]} is ready at {url(settings.host, listener)}/v1"
    server = _Server(create_app(engine, settings), greeting)
    server.run(sockets=[listener])
    if server.died_early:
        raise WarmUpFailed("the engine failed before it was ready; the log above says why")


def leave_signals_to_process_0() -> None:
    """A terminal's Ctrl-C reaches all processes of an engine: process 0 ends what runs, then the others end.

    A second signal ends this process at once.
    """

    def wait(number: int, frame: FrameType | None) -> None:
        _LOG.info("waiting for process 0 to stop; a second signal ends this process at once")
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.default_int_handler)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, wait)


def url(host: str, listener: socket.socket) -> str:
    """Where clients find the server."""
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}" if listener.family == socket.AF_INET6 else f"http://{host}:{port}"


class _Server(DrainingServer):
    """Logs `greeting` once it listens and the engine has warmed up; keeps caches that others have yet to read."""

    def __init__(self, app: FastAPI, greeting: str) -> None:
        context: Context = app.state.context
        super().__init__(
            app, context.drain, self._held_caches, not context.settings.disable_uvicorn_access_log
        )
        self._engine, self._greeting = context.engine, greeting
        self.died_early = False

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._greeter = asyncio.create_task(self._greet())

    def _held_caches(self) -> str | None:
        """An engine that has failed has nothing for others any more."""
        transfers = None if self._engine.is_dead else self._engine.stats().transfers
        offers = None if transfers is None or transfers.sent is None else transfers.sent.offers
        held = 0 if offers is None else offers.held
        requests = "1 request" if held == 1 else f"{held} requests"
        return f"the caches of {requests}, which nobody has read yet" if held else None

    async def _greet(self) -> None:
        while not (self._engine.is_ready or self._engine.is_dead):
            await asyncio.sleep(_READY_POLL_SECONDS)
        if self._engine.is_ready:
            _LOG.info(self._greeting)
        elif not self._drain.begun:
            self.died_early = self.should_exit = True
