"""A router over two prefill and two decode servers that are scripted."""

import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from fake_backend import PARAMS, FakeBackend, Loop, Stage, answer, live, stream
from live import wait_until
from prometheus_client.parser import text_string_to_metric_families

from glm_dcp_jax.serve.router.app import create_app
from glm_dcp_jax.serve.router.context import RouterContext
from glm_dcp_jax.serve.router.settings import RouterSettings


@dataclass
class Fleet:
    """The servers behind the router: two of each role."""

    prefill: list[FakeBackend]
    decode: list[FakeBackend]
    stage: Stage
    stage_url: str
    loop: Loop

    @property
    def all(self) -> list[FakeBackend]:
        return [*self.prefill, *self.decode]

    @property
    def released(self) -> list[dict[str, Any]]:
        """What any prefill server was told to let go of."""
        return [seen.body["kv_transfer_params"] for each in self.prefill for seen in each.released]


@pytest.fixture(scope="session")
def servers() -> Iterator[Fleet]:
    backends, stage = [FakeBackend() for _ in range(4)], Stage()
    with live(*backends, stage) as (loop, urls):
        for backend, url in zip(backends, urls, strict=False):
            backend.url = url
        yield Fleet(backends[:2], backends[2:], stage, urls[-1], loop)


@pytest.fixture
def fleet(servers: Fleet) -> Fleet:
    """All well: the first prefill server hands over PARAMS, decode servers answer."""
    for place, backend in enumerate(servers.prefill):
        backend.reset()
        backend.script = answer({"choices": [], "kv_transfer_params": {**PARAMS, "key": f"of-p{place}"}})
    for place, backend in enumerate(servers.decode):
        backend.reset()
        backend.script = stream(f'data: {{"text":"d{place}"}}\n\n'.encode(), b"data: [DONE]\n\n")
    return servers


class Router:
    """A live router, and a client of it."""

    def __init__(self, context: RouterContext, fleet: Fleet) -> None:
        self.context, self.url, self._loop = context, fleet.stage_url, fleet.loop
        self.client = httpx.Client(base_url=self.url, trust_env=False, verify=False, timeout=20)

    def stop(self) -> None:
        """End what runs, as after a second signal."""
        self._loop.call(self.context.stopping.set)

    def post(self, path: str = "/v1/completions", headers: dict[str, str] | None = None, **body):
        return self.client.post(path, json={"prompt": "Hello", **body}, headers=headers)

    def metric(self, name: str, **labels: str) -> float:
        """A metric's value."""
        for family in text_string_to_metric_families(self.client.get("/metrics").text):
            for sample in family.samples:
                if sample.name == f"glm_dcp_router:{name}" and sample.labels == labels:
                    return sample.value
        raise AssertionError(f"no such metric: {name} {labels}")


@pytest.fixture
def router_of(fleet: Fleet) -> Iterator[Callable[..., Router]]:
    """Start the router over the fleet, or the URLs given, with settings as keywords; it has looked at all servers."""
    with ExitStack() as stack:

        def start(**settings: Any) -> Router:
            prefill = tuple(backend.url for backend in fleet.prefill)
            decode = tuple(backend.url for backend in fleet.decode)
            defaults = {"prefill": prefill, "decode": decode, "health_interval": 60.0}
            app = create_app(RouterSettings(**(defaults | settings)))
            fleet.stage.app, life = app, app.router.lifespan_context(app)
            fleet.loop.run(life.__aenter__())
            stack.callback(lambda: fleet.loop.run(life.__aexit__(None, None, None)))
            router = Router(app.state.context, fleet)
            stack.callback(router.client.close)
            wait_until(lambda: all(each.healthy is not None for each in router.context.backends))
            return router

        yield start


@pytest.fixture
def router(router_of) -> Router:
    return router_of()


@pytest.fixture
def dead_url() -> Iterator[str]:
    """Where connections are refused: the port is taken, but nobody listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"
