"""POST /start_profile and /stop_profile: a trace of what the process does meanwhile, steps on devices included."""

from fastapi import APIRouter, Request, Response

from glm_dcp_jax.serve.context import context_of
from glm_dcp_jax.serve.errors import json_response

router = APIRouter()


@router.post("/start_profile")
async def start_profile(request: Request) -> Response:
    """Begin a trace under --profiler-dir. `/stop_profile` ends it; one at a time."""
    context = context_of(request)
    context.require_ready()
    return json_response({"profiling": True, "profiler_dir": str(await context.profiler.start())})


@router.post("/stop_profile")
async def stop_profile(request: Request) -> Response:
    """End the trace, and say where it lies."""
    return json_response({"profiling": False, "trace": str(await context_of(request).profiler.stop())})
