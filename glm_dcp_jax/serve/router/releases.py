"""Telling prefill servers to let go of caches that nobody will pull, and that they would keep until a lease ends."""

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from glm_dcp_jax.serve.router.backends import Backend
from glm_dcp_jax.serve.router.bodies import PARAMS
from glm_dcp_jax.serve.router.connections import Connect
from glm_dcp_jax.serve.router.metrics import Metrics

PATH = "/v1/kv_transfer/release"
_PATIENCE_SECONDS = 5.0
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Held:
    """A cache that a prefill server keeps for whoever brings `params`."""

    backend: Backend
    params: dict[str, Any]


class Releases:
    """Releases run on their own: whoever caused one is gone, or waits for an answer."""

    def __init__(self, connect: Connect, metrics: Metrics) -> None:
        self._connect, self._metrics = connect, metrics
        self._running: set[asyncio.Task[None]] = set()

    def start(self, held: Held, headers: Mapping[str, str]) -> None:
        """Begin to release `held`. headers: of the request it was for, whose key the server may ask for."""
        task = asyncio.create_task(self._release(held, headers))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def finish(self) -> None:
        """Wait for all that run; each takes a few seconds at most."""
        while self._running:
            await asyncio.gather(*self._running)

    async def _release(self, held: Held, headers: Mapping[str, str]) -> None:
        request_id, url = headers["x-request-id"], held.backend.url
        try:
            async with asyncio.timeout(_PATIENCE_SECONDS), self._connect() as client:
                answer = await client.post(url + PATH, json={PARAMS: held.params}, headers=headers)
        except TimeoutError:
            failure = f"no answer within {_PATIENCE_SECONDS:g} s"
        except httpx.HTTPError as error:
            failure = f"{type(error).__name__} {error}".strip()
        else:
            failure = "" if answer.is_success else f"status {answer.status_code}"
        self._metrics.released("failed" if failure else "ok")
        if failure:
            _LOG.warning(
                "request %s: its cache at %s was not released, and stays until its lease ends: %s",
                request_id,
                url,
                failure,
            )
        else:
            _LOG.info("request %s: its cache at %s was released", request_id, url)
