"""The ASGI app: the endpoints over one engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from glm_dcp_jax._version import __version__
from glm_dcp_jax.serve import chat, completions, errors, kv_transfer, prefix_cache, status, tokens
from glm_dcp_jax.serve.auth import RequireKey
from glm_dcp_jax.serve.body_limit import LimitBody, most_bytes
from glm_dcp_jax.serve.context import Context
from glm_dcp_jax.serve.draining import Drain
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.metrics import Metrics
from glm_dcp_jax.serve.request_names import NameRequests
from glm_dcp_jax.serve.settings import ServerSettings


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """An app that serves this engine, and shuts it down when it ends itself."""

    drain = Drain(settings.shutdown_timeout)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.shutdown(drain.left)

    app = FastAPI(title="glm_dcp_jax", version=__version__, lifespan=lifespan)
    app.state.context = Context(engine, settings, Metrics(engine, settings.served_model_names[0]), drain)
    errors.install(app, on_invalid=kv_transfer.call_off_invalid)
    for part in (completions, chat, tokens, prefix_cache, kv_transfer, status):
        app.include_router(part.router)
    app.add_middleware(LimitBody, limit=most_bytes(engine.max_model_len))
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    app.add_middleware(NameRequests)
    return app
