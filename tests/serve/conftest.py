"""The app over a fake engine, reached without a network."""

import logging
import sys
import threading
from collections.abc import Callable, Iterator

import httpx
import pytest
from fake_engine import FakeEngine
from written import HELLO, engine_that_says

from glm_dcp_jax.progress import show_as_lines
from glm_dcp_jax.serve.app import create_app
from glm_dcp_jax.serve.settings import ServerSettings

MODEL = "fake"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """The command line sets levels, handlers and filters of the whole process, where other tests look for warnings."""
    loggers = [logging.getLogger(name) for name in (None, "glm_dcp_jax", "uvicorn", "uvicorn.access")]
    before = [(logger.level, logger.handlers[:], logger.filters[:]) for logger in loggers]
    hooks = threading.excepthook, sys.excepthook
    show_as_lines(False)
    yield
    show_as_lines(False)
    threading.excepthook, sys.excepthook = hooks
    logging.captureWarnings(False)
    for logger, (level, handlers, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.handlers[:], logger.filters[:] = handlers, filters


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


@pytest.fixture
def client_of() -> Callable[..., httpx.AsyncClient]:
    """Make a client of an app over an engine, with server settings as keywords."""

    def make(engine: FakeEngine, **settings) -> httpx.AsyncClient:
        app = create_app(engine, ServerSettings(**{"served_model_names": (MODEL, "alias"), **settings}))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        return httpx.AsyncClient(transport=transport, base_url="http://test")

    return make


@pytest.fixture
def client(engine, client_of) -> httpx.AsyncClient:
    return client_of(engine)


@pytest.fixture
def post(client) -> Callable:
    """POST a JSON object; the answer."""

    async def send(path: str, **body) -> httpx.Response:
        return await client.post(path, json=body)

    return send


@pytest.fixture
def ask(client_of) -> Callable:
    """Send a chat to an engine that says this; the answer."""

    async def send(says: str | FakeEngine, settings=(), **body) -> httpx.Response:
        engine = engine_that_says(says) if isinstance(says, str) else says
        return await client_of(engine, **dict(settings)).post(
            "/v1/chat/completions", json={"messages": HELLO, **body}
        )

    return send


@pytest.fixture
def respond(client_of) -> Callable:
    """Ask an engine that says this for a response; the answer."""

    async def send(says: str | FakeEngine, settings=(), **body) -> httpx.Response:
        engine = engine_that_says(says) if isinstance(says, str) else says
        return await client_of(engine, **dict(settings)).post("/v1/responses", json={"input": "Hi", **body})

    return send
