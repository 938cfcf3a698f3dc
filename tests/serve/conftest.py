"""The app over a fake engine, reached without a network."""

from collections.abc import Callable

import httpx
import pytest
from fake_engine import FakeEngine

from glm_dcp_jax.serve.app import create_app
from glm_dcp_jax.serve.settings import ServerSettings

MODEL = "fake"


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
