"""Listening, serving, and stopping when told to."""

import asyncio
import logging
import signal
import socket
from types import FrameType

import uvicorn

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.app import create_app
from glm_dcp_jax.serve.context import Context
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.settings import ServerSettings

_LOG = logging.getLogger(__name__)
_READY_POLL_SECONDS = 0.1
_DRAIN_SECONDS = 5
"""How long running requests may go on after SIGINT or SIGTERM; a second signal ends them at once."""
_ABORT_SECONDS = 3
"""How long the engine may take to let go of the rest."""


def bind(host: str, port: int) -> socket.socket:
    """Take the port before a model is loaded for nothing. Raises ConfigError when it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, protocol)
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
    """Serve until SIGINT or SIGTERM, then give running requests a few seconds and shut the engine down.

    Raises WarmUpFailed. An engine that dies later leaves the server up, to tell its clients and health checks.
    """
    app = create_app(engine, settings)
    config = uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=_DRAIN_SECONDS + _ABORT_SECONDS)
    # uvicorn stops on these signals and then raises them again, when there is nothing left to do.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    greeting = f"{settings.served_model_names[0]} is ready at {url(settings.host, listener)}/v1"
    server = _Server(config, app.state.context, greeting)
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


class _Server(uvicorn.Server):
    """Logs `greeting` once it listens and the engine has warmed up; ends running requests when it is to stop."""

    def __init__(self, config: uvicorn.Config, context: Context, greeting: str) -> None:
        super().__init__(config)
        self._context = context
        self._greeting = greeting
        self.died_early = False

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """The first signal stops the server; a second one ends running requests at once, and in order."""
        if self.should_exit:
            self._context.stopping.set()
        else:
            super().handle_exit(sig, frame)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        self._greeter = asyncio.create_task(self._greet())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Take no more requests, wait for the running ones for a while, then end them."""
        timer = asyncio.get_running_loop().call_later(_DRAIN_SECONDS, self._context.stopping.set)
        await super().shutdown(sockets)
        timer.cancel()

    async def _greet(self) -> None:
        engine = self._context.engine
        while not (engine.is_ready or engine.is_dead):
            await asyncio.sleep(_READY_POLL_SECONDS)
        if engine.is_ready:
            _LOG.info(self._greeting)
        elif not self.should_exit:
            self.died_early = self.should_exit = True
