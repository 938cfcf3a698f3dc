"""POST /reset_prefix_cache."""

from fastapi import APIRouter, Request, Response

from glm_dcp_jax.serve.context import context_of
from glm_dcp_jax.serve.errors import json_response

router = APIRouter()


@router.post("/reset_prefix_cache")
async def reset_prefix_cache(request: Request) -> Response:
    """Forget what earlier requests computed. `{"success": false}` if some of it is in use: then repeat it later.

    vLLM has this in its development mode only; here it is always there, behind the API key.
    """
    context = context_of(request)
    context.require_ready()
    return json_response({"success": await context.engine.reset_prefix_cache()})
