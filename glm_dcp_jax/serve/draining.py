"""Stopping in order: no new requests, some time for those that run, and a listener that stays open to say so."""

import asyncio
import logging
import math
import signal
import socket
import time
from collections.abc import Callable
from types import FrameType

import uvicorn
from starlette.types import ASGIApp

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.serve.errors import ApiError

_LOG = logging.getLogger(__name__)
_ABORT_SECONDS = 3
"""How long requests may take to end once they are told to."""
_RETRY_SECONDS = 1
"""After which a client may try again: another server behind the same address may take its request at once."""


class Drain:
    """Whether a server is about to stop, and how long what runs may go on.

    patience: seconds from the first signal on. stopping: set to end what still runs.
    """

    def __init__(self, patience: float) -> None:
        self.patience = patience
        self.stopping = asyncio.Event()
        self._deadline: float | None = None

    def begin(self) -> None:
        """No more requests from now on."""
        if self._deadline is None:
            self._deadline = time.monotonic() + self.patience

    @property
    def begun(self) -> bool:
        """Whether new requests are refused."""
        return self._deadline is not None or self.stopping.is_set()

    @property
    def left(self) -> float:
        """Seconds that what runs may go on from now on."""
        if self.stopping.is_set():
            return 0.0
        return self.patience if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def require_open(self) -> None:
        """Raises ApiError 503, with Retry-After, for a request that comes too late."""
        if self.begun:
            message = "the server is shutting down and takes no new requests"
            raise ApiError(message, 503, retry_after=_RETRY_SECONDS)


def check_patience(name: str, seconds: float) -> None:
    """Raise ConfigError if nobody could wait so long."""
    if not (seconds >= 0 and math.isfinite(seconds)):
        raise ConfigError(f"{name} must be 0 or more seconds, but is {seconds:g}")


class DrainingServer(uvicorn.Server):
    """Serves until SIGINT or SIGTERM; then `drain` begins, and it ends when nothing runs or no time is left.

    Until then it listens, so that health checks and late clients get their 503. What runs at the end is told to end, as
    is everything at a second signal.
    """

    def __init__(
        self,
        app: ASGIApp,
        drain: Drain,
        waits_for: Callable[[], str | None] = lambda: None,
        access_log: bool = True,
    ) -> None:
        """waits_for: what keeps the server from ending besides running requests, in words; None for nothing."""
        config = uvicorn.Config(
            app, log_config=None, access_log=access_log, timeout_graceful_shutdown=_ABORT_SECONDS
        )
        super().__init__(config)
        self._drain, self._waits_for = drain, waits_for
        self._signals = 0

    def run(self, sockets: list[socket.socket] | None = None) -> None:
        """Serve, in the main thread."""
        # uvicorn stops on these signals and would raise them again, when there is nothing left to do.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        super().run(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Count signals; the next tick, soon, acts on them."""
        self._signals += 1

    async def on_tick(self, counter: int) -> bool:
        """Whether to end, ten times a second."""
        if await super().on_tick(counter):
            return True
        if self._signals and not self._drain.begun:
            self._drain.begin()
            self._say_what_runs()
        if not self._drain.begun:
            return False
        if self._signals > 1 or not self._drain.left:
            self._say_what_is_left()
            self._drain.stopping.set()
        return self._drain.stopping.is_set() or not (self.server_state.tasks or self._waits_for())

    def _say_what_runs(self) -> None:
        running = [self._requests()] if self.server_state.tasks else []
        waiting = " and ".join([*running, *filter(None, [self._waits_for()])])
        if waiting and self._drain.patience:
            _LOG.info(
                "stopping: no new requests; waiting up to %g s for %s; a second signal ends all at once",
                self._drain.patience,
                waiting,
            )

    def _say_what_is_left(self) -> None:
        if self.server_state.tasks:
            _LOG.warning("ending what still runs: %s", self._requests())
        if waiting := self._waits_for():
            _LOG.warning("not waiting any longer for %s", waiting)

    def _requests(self) -> str:
        count = len(self.server_state.tasks)
        return f"{count} request{'s' if count > 1 else ''}"
