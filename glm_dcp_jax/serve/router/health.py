"""Asking the servers how they are, again and again."""

import asyncio

import httpx

from glm_dcp_jax.serve.router.backends import Backend
from glm_dcp_jax.serve.router.connections import Connect

_PATIENCE_SECONDS = 5.0
"""A server that takes longer to say that it is healthy is not."""


async def watch(connect: Connect, backend: Backend, interval: float) -> None:
    """Ask at once, and then every `interval` seconds, until cancelled."""
    while True:
        backend.observe(*await _ask(connect, backend))
        await asyncio.sleep(interval)


async def _ask(connect: Connect, backend: Backend) -> tuple[bool, str]:
    """Whether it is healthy, and if not, why."""
    try:
        async with asyncio.timeout(_PATIENCE_SECONDS), connect() as client:
            answer = await client.get(f"{backend.url}/health")
    except TimeoutError:
        return False, f"no answer to GET /health within {_PATIENCE_SECONDS:g} s"
    except httpx.HTTPError as error:
        return False, f"{type(error).__name__} {error}".strip()
    return answer.is_success, f"GET /health answered {answer.status_code}"
