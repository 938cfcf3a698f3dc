"""A real HTTP server on a real port, in a thread, over a fake engine."""

import asyncio
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import uvicorn
from fake_engine import FakeEngine

from glm_dcp_jax.serve import run
from glm_dcp_jax.serve.app import create_app
from glm_dcp_jax.serve.settings import ServerSettings


@contextmanager
def live_server(engine: FakeEngine, **settings) -> Iterator[str]:
    """The URL of a server that runs while the context is open."""
    listener = run.bind("127.0.0.1", 0)
    app = create_app(engine, ServerSettings(**{"served_model_names": ("fake",), **settings}))
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield run.url("127.0.0.1", listener)
    finally:
        server.should_exit = True
        thread.join()


@contextmanager
def signalled_server(
    engine: FakeEngine, **settings
) -> Iterator[tuple[str, Callable[[], None], threading.Thread]]:
    """The server that the command runs: its URL, what a signal to it does, and its thread, which ends with it."""
    listener = run.bind("127.0.0.1", 0)
    app = create_app(engine, ServerSettings(**{"served_model_names": ("fake",), **settings}))
    server = run._Server(app, "ready")
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])))
    thread.start()

    def signal_it() -> None:
        server.handle_exit(signal.SIGTERM, None)

    try:
        wait_until(lambda: server.started)
        yield run.url("127.0.0.1", listener), signal_it, thread
    finally:
        signal_it()
        signal_it()
        thread.join(10)


def wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.005)
