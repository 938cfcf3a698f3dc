"""The ASGI app: the endpoints over one engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from glm_dcp_jax._version import __version__
from glm_dcp_jax.serve import (
    chat,
    completions,
    errors,
    kv_transfer,
    prefix_cache,
    profiling,
    status,
    status_page,
    throughput,
    tokens,
)
from glm_dcp_jax.serve.auth import RequireKey
from glm_dcp_jax.serve.body_limit import LimitBody, most_bytes
from glm_dcp_jax.serve.context import Context
from glm_dcp_jax.serve.draining import Drain
from glm_dcp_jax.serve.failures import AnswerFailures
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.load import CountLoad
from glm_dcp_jax.serve.metrics import Metrics
from glm_dcp_jax.serve.parsing.parsers import Parsers
from glm_dcp_jax.serve.request_names import NameRequests
from glm_dcp_jax.serve.responses import endpoint as responses
from glm_dcp_jax.serve.settings import ServerSettings
from glm_dcp_jax.serve.tracing import Profiler

_EXPOSED = ("X-Request-Id", "Retry-After")
"""Headers of answers that pages of other origins may read, besides the usual ones."""


def create_app(engine: Engine, settings: ServerSettings) -> FastAPI:
    """An app that serves this engine, and shuts it down when it ends itself."""

    metrics = Metrics(engine, settings.served_model_names[0], settings.metrics_prefix)
    drain, profiler = Drain(settings.shutdown_timeout), Profiler(settings.profiler_dir)
    parsers = Parsers.chosen(settings.reasoning_parser, settings.tool_call_parser, engine.tokenizer)
    context = Context(engine, settings, metrics, parsers, drain, profiler)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        logging = None
        if not settings.disable_log_stats:
            logging = asyncio.create_task(throughput.log_throughput(engine, throughput.INTERVAL))
        yield
        if logging is not None:
            logging.cancel()
        profiler.close()
        engine.shutdown(drain.left)

    app = FastAPI(
        title="glm_dcp_jax",
        description="OpenAI's API, with vLLM's additions, over a GLM engine.",
        version=__version__,
        lifespan=lifespan,
        responses=errors.DOCUMENTED,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
    )
    app.root_path = settings.root_path
    app.state.context = context
    errors.install(app, on_invalid=kv_transfer.call_off_invalid)
    parts = (completions, chat, responses, tokens, prefix_cache, kv_transfer, profiling, status, status_page)
    for part in parts:
        app.include_router(part.router)
    app.add_middleware(AnswerFailures)
    app.add_middleware(CountLoad, load=context.load)
    app.add_middleware(LimitBody, limit=most_bytes(engine.max_model_len), stopping=drain.stopping)
    if settings.api_keys:
        app.add_middleware(RequireKey, keys=settings.api_keys)
    if settings.allowed_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.allowed_origins,
            allow_credentials=settings.allow_credentials,
            allow_methods=settings.allowed_methods,
            allow_headers=settings.allowed_headers,
            expose_headers=_EXPOSED,
        )
    app.add_middleware(NameRequests)
    return app
