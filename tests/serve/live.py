"""A real HTTP server on a real port, in a thread, over a fake engine."""

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
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        wait_until(lambda: server.started)
        yield run.url("127.0.0.1", listener)
    finally:
        server.should_exit = True
        thread.join()


def wait_until(true: Callable[[], bool], seconds: float = 10) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"waited {seconds} s in vain"
        time.sleep(0.005)
