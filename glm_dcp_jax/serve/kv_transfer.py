"""POST /v1/kv_transfer/release, and what becomes of a cache whose request could not even be read."""

from typing import Any

from fastapi import APIRouter, Request, Response

from glm_dcp_jax.serve.context import context_of
from glm_dcp_jax.serve.errors import ApiError, json_response
from glm_dcp_jax.serve.handover import Handover
from glm_dcp_jax.serve.protocol import ReleaseRequest

router = APIRouter()
_GENERATING = ("/v1/completions", "/v1/chat/completions", "/v1/responses")


@router.post("/v1/kv_transfer/release")
async def release(request: Request, body: ReleaseRequest) -> Response:
    """Nobody will come for a cache that this server holds. `{"released": false}` if it was not held any more."""
    engine = context_of(request).engine
    if engine.config.transfer is None or not engine.config.transfer.produces:
        raise ApiError(
            "this server holds caches for nobody; only one with --kv-transfer-config and a kv_role of kv_producer "
            "or kv_both does",
            404,
        )
    try:
        return json_response({"released": engine.release_remote(body.kv_transfer_params)})
    except ValueError as error:
        raise ApiError(str(error), param="kv_transfer_params") from error


def call_off_invalid(request: Request, body: Any) -> None:
    """A body was refused for what it holds: nobody will come for a cache that it names."""
    if request.url.path in _GENERATING and isinstance(body, dict):
        Handover(context_of(request).engine, body.get("kv_transfer_params")).call_off()
