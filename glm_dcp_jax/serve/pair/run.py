"""Starting a pair, waiting until it can be used, and ending it."""

import contextlib
import logging
import signal
import socket
import time
from collections.abc import Callable, Sequence
from types import FrameType

import httpx

from glm_dcp_jax.serve.pair.child import Child
from glm_dcp_jax.serve.pair.flags import ROLES, PairCommand
from glm_dcp_jax.serve.router.settings import RouterSettings
from glm_dcp_jax.serve.run import bind, url

_LOG = logging.getLogger(__name__)
SERVER, ROUTER = "glm_dcp_jax.serve", "glm_dcp_jax.serve.router"
_HOST = "127.0.0.1"
_POLL_SECONDS = 0.1
_PROGRESS_SECONDS = 10.0
_HEALTH_SECONDS = 2.0
_STOP_SECONDS = 30.0
"""How long processes may take to end, besides the time that they give running requests."""
_KILLED = 1


class _Signalled(Exception):
    """Somebody wants it to end."""


class _Ended(Exception):
    """One of the processes has ended by itself."""

    def __init__(self, child: Child, code: int) -> None:
        super().__init__(f"the {child.name} server has ended with exit code {code}")
        self.code = code


def run(command: PairCommand) -> int:
    """Serve until SIGINT or SIGTERM, or until one of the processes ends; then end the others, a second signal at once.

    Prints the URL to use when all are ready. Returns the exit code: 0 after a signal, that of the process that ended (1
    for 0), 1 where one had to be killed. Raises ConfigError if the router's address is taken.
    """
    return _Pair(command).run()


class _Pair:
    def __init__(self, command: PairCommand) -> None:
        self._command = command
        self._children: list[Child] = []
        # A request takes as long at the router as at the servers; these may say more than its own default.
        self._router_timeout = max(command.shutdown_timeout, RouterSettings.shutdown_timeout)
        self._signals = 0

    def run(self) -> int:
        """As the function."""
        # They stay so to the end: a third signal must not cut off what the second has begun.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._count_signal)
        try:
            self._serve()
        except _Signalled:
            _LOG.info("stopping; a second signal ends all processes at once")
            code = 0
        except _Ended as ended:
            _LOG.error("%s; stopping the others", ended)
            code = ended.code or 1
        finally:
            in_order = self._stop()
        return code if in_order else code or _KILLED

    def _serve(self) -> None:
        """Raises _Signalled or _Ended in the end."""
        command = self._command
        with contextlib.ExitStack() as reserved:
            # Ports are taken now, though not listened on, so that nobody else has them when models are loaded.
            front, *backs = (
                reserved.enter_context(bind(host, port))
                for host, port in ((command.host, command.port), (_HOST, 0), (_HOST, 0))
            )
            urls = [url(_HOST, back) for back in backs]
            for role, back in zip(ROLES, backs, strict=True):
                self._start_server(role, back)
            self._wait_until_healthy(dict(zip(ROLES, urls, strict=True)))
            at, port = url(command.host, front), front.getsockname()[1]
            flags = ["--prefill", urls[0], "--decode", urls[1], "--host", command.host, "--port", str(port)]
            flags += ["--shutdown-timeout", str(self._router_timeout)]
            self._start("router", ROUTER, [*flags, "--log-level", command.log_level], {})
            self._wait_until_healthy({"router": at})
        _LOG.info("all are ready; the URL to use is %s/v1", at)
        print(f"{at}/v1", flush=True)
        self._watch(lambda: False)

    def _start_server(self, role: str, listener: socket.socket) -> None:
        flags = [*self._command.servers[role], "--host", _HOST, "--port", str(listener.getsockname()[1])]
        devices = self._command.devices.get(role)
        self._start(role, SERVER, flags, {} if devices is None else {"CUDA_VISIBLE_DEVICES": devices})

    def _start(self, name: str, module: str, flags: Sequence[str], more: dict[str, str]) -> None:
        self._children.append(Child(name, module, flags, more))

    def _wait_until_healthy(self, urls: dict[str, str]) -> None:
        """Until all of them answer, with a word now and then. Raises as `_watch`."""
        began = time.monotonic()
        said, waiting = began, dict(urls)

        def all_answer() -> bool:
            nonlocal said
            for name, at in list(waiting.items()):
                if _is_healthy(at):
                    del waiting[name]
                    _LOG.info("%s is ready, after %.0f s", name, time.monotonic() - began)
            if waiting and time.monotonic() - said >= _PROGRESS_SECONDS:
                said = time.monotonic()
                _LOG.info("waiting for %s, for %.0f s so far", " and ".join(waiting), said - began)
            return not waiting

        self._watch(all_answer)

    def _watch(self, done: Callable[[], bool]) -> None:
        """Until `done`. Raises _Signalled, and _Ended."""
        while True:
            if self._signals:
                raise _Signalled
            for child in self._children:
                if (code := child.code) is not None:
                    raise _Ended(child, code)
            if done():
                return
            time.sleep(_POLL_SECONDS)

    def _stop(self) -> bool:
        """End the router, and then the servers. Returns whether none had to be killed."""
        # One signal may have brought us here; whichever came besides, even before we are here, says "at once".
        signals, in_order = min(self._signals, 1), True
        routers = [child for child in self._children if child.name not in ROLES]
        for group in (routers, [child for child in self._children if child.name in ROLES]):
            running = [child for child in group if child.code is None]
            for child in running:
                child.stop()
            deadline = time.monotonic() + self._router_timeout + _STOP_SECONDS
            while any(child.code is None for child in group):
                if self._signals > signals or time.monotonic() > deadline:
                    in_order = False
                    break
                time.sleep(_POLL_SECONDS)
            for child in group:
                child.kill()
        return in_order

    def _count_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals += 1


def _is_healthy(at: str) -> bool:
    try:
        return httpx.get(f"{at}/health", timeout=_HEALTH_SECONDS, trust_env=False).is_success
    except httpx.HTTPError:
        return False
