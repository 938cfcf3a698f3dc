"""What the server is and how it does: models, health, version, metrics."""

from typing import Any

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST

from glm_dcp_jax._version import __version__
from glm_dcp_jax.serve.context import Context, context_of
from glm_dcp_jax.serve.errors import json_response

router = APIRouter()


@router.get("/v1/models")
async def models(request: Request) -> Response:
    """The model, under each of its names."""
    context = context_of(request)
    cards = [_card(context, name) for name in context.settings.served_model_names]
    return json_response({"object": "list", "data": cards})


@router.get("/v1/models/{name:path}")
async def model(request: Request, name: str) -> Response:
    """The model, by one of its names."""
    context = context_of(request)
    return json_response(_card(context, context.model(name)))


def _card(context: Context, name: str) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": context.started,
        "owned_by": "glm_dcp_jax",
        "root": context.engine.config.model,
        "parent": None,
        "max_model_len": context.engine.max_model_len,
    }


@router.get("/health")
@router.get("/ping")
@router.post("/ping")
async def health(request: Request) -> Response:
    """200 with an empty body when requests can be served, else 503."""
    context_of(request).require_ready()
    return Response()


@router.get("/load")
async def load(request: Request) -> Response:
    """Requests that are being answered; those that wait in the queue are among them."""
    return json_response({"server_load": context_of(request).load.running})


@router.get("/version")
async def version() -> Response:
    """The server's version."""
    return json_response({"version": __version__})


@router.get("/metrics")
async def metrics(request: Request) -> Response:
    """Prometheus' text format."""
    return Response(context_of(request).metrics.exposition(), media_type=CONTENT_TYPE_LATEST)
