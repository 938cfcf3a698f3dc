"""One request's way: to a prefill server, from there with a reference to its cache to a decode server, and back."""

import asyncio
import logging
import time
from collections.abc import Mapping

from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.router.backends import Backend
from glm_dcp_jax.serve.router.bodies import Body
from glm_dcp_jax.serve.router.context import RouterContext
from glm_dcp_jax.serve.router.legs import PrefillFailed, Rejected, Unreachable, ask_decode, ask_prefill
from glm_dcp_jax.serve.router.releases import Held
from glm_dcp_jax.serve.router.reply import Reply

_LOG = logging.getLogger(__name__)
_GRACE_SECONDS = 0.25
"""How long a prefill server goes on for a client that has left: nothing to it, but enough for what it has just sent."""


class Journey:
    """path: of the API. headers: for both legs, x-request-id among them."""

    def __init__(self, context: RouterContext, path: str, body: Body, headers: Mapping[str, str]) -> None:
        self._context, self._path, self._body, self._headers = context, path, body, headers
        self._held: Held | None = None

    async def run(self, reply: Reply) -> int:
        """Answer the client. Returns the status; raises ApiError, perhaps after a part of the answer.

        However it ends, also cancelled: a cache that no decode server has taken for certain is released.
        """
        try:
            await self._prefill()
            return await self._decode(reply)
        except Rejected as rejected:
            await reply.begin(rejected.answer)
            await reply.write(rejected.content)
            await reply.end()
            return rejected.answer.status_code
        finally:
            if self._held is not None:
                self._context.releases.start(self._held, self._headers)

    async def _prefill(self) -> None:
        """Have a prefill server compute the prompt, and hold its cache, unless none can. Raises Rejected."""
        settings, metrics = self._context.settings, self._context.metrics
        if skip := self._body.skip_reason(settings.min_prefill_chars):
            metrics.skipped(skip)
            return
        content, failure = self._body.for_prefill(self._path), "unhealthy"
        deadline = asyncio.get_running_loop().time() + settings.prefill_timeout
        tried: list[Backend] = []
        while failure not in ("timeout", "no_params"):
            backend = self._context.prefill.pick(tried)
            if backend is None:
                break
            if tried:
                metrics.retried("prefill")
            tried.append(backend)
            try:
                return await self._ask_prefill(backend, content, deadline)
            except PrefillFailed as error:
                failure = error.reason
                self._warn("prefill server %s failed (%s): %s", backend.url, failure, error)
                if failure == "unreachable":
                    backend.observe(False, str(error))
        metrics.fell_back(failure)
        self._warn("a decode server has to do all of it (%s)", failure)

    async def _ask_prefill(self, backend: Backend, content: bytes, deadline: float) -> None:
        """Hold what `backend` hands over. When this is cancelled, its answer may be on the way, and is waited for."""
        leg = asyncio.ensure_future(self._hold(backend, content, deadline))
        try:
            await asyncio.shield(leg)
        except asyncio.CancelledError:
            await asyncio.wait((leg,), timeout=_GRACE_SECONDS)
            raise
        finally:
            leg.cancel()
            await asyncio.gather(leg, return_exceptions=True)

    async def _hold(self, backend: Backend, content: bytes, deadline: float) -> None:
        connect, url, began = self._context.connect, backend.url + self._path, time.monotonic()
        try:
            with backend.busy():
                async with ask_prefill(connect, url, content, self._headers, deadline) as params:
                    self._held = Held(backend, params)
        finally:
            self._context.metrics.took("prefill_seconds", time.monotonic() - began)

    async def _decode(self, reply: Reply) -> int:
        """Relay a decode server's answer. Another one is tried only if the first cannot have seen the request."""
        content = self._body.for_decode(self._held.params if self._held else None)
        tried: list[Backend] = []
        while backend := self._context.decode.pick(tried):
            if tried:
                self._context.metrics.retried("decode")
            tried.append(backend)
            try:
                with backend.busy():
                    return await self._relay(backend, content, reply)
            except Unreachable as error:
                self._warn("decode server %s cannot be reached: %s", backend.url, error)
                backend.observe(False, str(error))
        raise ApiError("no decode server can be reached", 502)

    async def _relay(self, backend: Backend, content: bytes, reply: Reply) -> int:
        metrics, url, began = self._context.metrics, backend.url + self._path, time.monotonic()
        patience = self._context.settings.decode_timeout
        async with ask_decode(self._context.connect, url, content, self._headers, patience) as answer:
            metrics.took("decode_first_byte_seconds", time.monotonic() - began)
            if answer.response.is_success:
                self._held = None
            await reply.begin(answer.response)
            chunk = answer.first
            while chunk:
                await reply.write(chunk)
                chunk = await answer.more(patience)
            await reply.end()
        metrics.took("decode_seconds", time.monotonic() - began)
        return answer.response.status_code

    def _warn(self, text: str, *values: object) -> None:
        _LOG.warning("request %s: " + text, self._headers["x-request-id"], *values)
