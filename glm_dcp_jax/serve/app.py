"""The ASGI app: the endpoints over one engine."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from glm_dcp_jax._version import __version__
from glm_dcp_jax.serve import chat, completions, errors, kv_transfer, prefix_cache, status, tokens
from glm_dcp_jax.serve.auth import RequireKey
from glm_dcp_jax.serve.body_limit import LimitBody, most_bytes
from glm_dcp_jax.serve.context import Context
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.metrics import Metrics
from glm_dcp_jax.serve.parsing.parsers import Parsers
from glm_dcp_jax.serve.responses import endpoint as responses
from glm_dcp_jax.serve.settings import ServerSettings


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """An app that serves this engine, and shuts it down when it ends itself."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        engine.shutdown()

    app = FastAPI(title="glm_dcp_jax", version=__version__, lifespan=lifespan)
    parsers = Parsers.chosen(settings.reasoning_parser, settings.tool_call_parser, engine.tokenizer)
    metrics = Metrics(engine, settings.served_model_names[0])
    app.state.context = Context(engine, settings, metrics, parsers)
    errors.install(app, on_invalid=kv_transfer.call_off_invalid)
    for part in (completions, chat, responses, tokens, prefix_cache, kv_transfer, status):
        app.include_router(part.router)
    app.add_middleware(LimitBody, limit=most_bytes(engine.max_model_len))
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    return app
