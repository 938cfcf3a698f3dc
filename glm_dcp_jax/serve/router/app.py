"""The ASGI app: the router's endpoints."""

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import APIRouter, FastAPI, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from glm_dcp_jax._version import __version__
from glm_dcp_jax.serve import errors
from glm_dcp_jax.serve.body_limit import LimitBody
from glm_dcp_jax.serve.errors import ApiError, ClientGone, json_response
from glm_dcp_jax.serve.router.answer import JourneyAnswer
from glm_dcp_jax.serve.router.backends import Backend
from glm_dcp_jax.serve.router.bodies import parse_body
from glm_dcp_jax.serve.router.context import RouterContext, context_of
from glm_dcp_jax.serve.router.health import watch
from glm_dcp_jax.serve.router.journey import Journey
from glm_dcp_jax.serve.router.legs import explain
from glm_dcp_jax.serve.router.settings import MOST_BODY_BYTES, RouterSettings

_MODELS_SECONDS = 10.0
_ELSEWHERE = (
    "the router takes POST to /v1/completions, /v1/chat/completions and /v1/responses, and GET of /v1/models, /health, "
    "/healthcheck and /metrics; other paths are at the servers behind it"
)
router = APIRouter()


def create_app(settings: RouterSettings) -> FastAPI:
    """An app that watches the servers as long as it runs itself."""
    context = RouterContext(settings)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        watches = [
            asyncio.create_task(watch(context.connect, backend, settings.health_interval))
            for backend in context.backends
        ]
        yield
        for each in watches:
            each.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await context.releases.finish()

    app = FastAPI(
        title="glm_dcp_jax router", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None
    )  # its pages would need scripts from elsewhere
    app.state.context = context
    errors.install(app, elsewhere=_ELSEWHERE)
    app.include_router(router)
    app.add_middleware(LimitBody, limit=MOST_BODY_BYTES, stopping=context.stopping)
    return app


@router.post("/v1/completions")
@router.post("/v1/chat/completions")
@router.post("/v1/responses")
async def generate(request: Request) -> Response:
    """Prefill on one server, decode on another."""
    context = context_of(request)
    context.drain.require_open()
    try:
        body = parse_body(await request.body())
    except ClientDisconnect:
        context.metrics.finished("disconnected")
        raise ClientGone from None
    except (ApiError, HTTPException):
        context.metrics.finished("rejected")
        raise
    headers = _headers(request)
    journey = Journey(context, request.url.path, body, headers)
    return JourneyAnswer(context, journey, headers["x-request-id"])


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """What a decode server says."""
    context = context_of(request)
    tried: list[Backend] = []
    while backend := context.decode.pick(tried):
        tried.append(backend)
        try:
            async with asyncio.timeout(_MODELS_SECONDS), context.connect() as client:
                answer = await client.get(f"{backend.url}/v1/models", headers=_headers(request))
        except (TimeoutError, httpx.HTTPError) as error:
            backend.observe(False, explain(error))
        else:
            kind = answer.headers.get("content-type")
            return Response(answer.content, answer.status_code, media_type=kind)
    raise ApiError("no decode server can be reached", 502)


@router.get("/health")
async def health(request: Request) -> Response:
    """200 with an empty body when requests can be served, which takes a healthy decode server, else 503.

    So it is from a signal to stop on, too.

    Without a prefill server they are served all the same: /healthcheck and the metrics tell.
    """
    context_of(request).drain.require_open()
    if not context_of(request).decode.any_healthy:
        raise ApiError("no decode server is healthy", 503)
    return Response()


@router.get("/healthcheck")
async def healthcheck(request: Request) -> Response:
    """How many servers there are, as vLLM's proxy says it, and whether there is a healthy one of each role."""
    context = context_of(request)
    return json_response(
        {
            "status": "ok" if context.is_healthy else "unhealthy",
            "prefill_instances": len(context.prefill.backends),
            "decode_instances": len(context.decode.backends),
        }
    )


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(context_of(request).metrics.exposition(), media_type=CONTENT_TYPE_LATEST)


def _headers(request: Request) -> httpx.Headers:
    """For the servers. Compressed answers could not be cut into lines."""
    headers = {
        "content-type": "application/json",
        "accept-encoding": "identity",
        "x-request-id": request.headers.get("x-request-id") or uuid.uuid4().hex,
    }
    if authorization := request.headers.get("authorization"):
        headers["authorization"] = authorization
    return httpx.Headers(headers, encoding="latin-1")  # as they came
