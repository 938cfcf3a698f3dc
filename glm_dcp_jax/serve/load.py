"""How many requests are being answered at this moment: GET /load, for routers that spread requests by it."""

from starlette.types import ASGIApp, Receive, Scope, Send

from glm_dcp_jax.serve.paths import GENERATING, endpoint_path


class Load:
    """A count of requests that generate something, from their arrival to the end of their answer."""

    def __init__(self) -> None:
        self.running = 0


class CountLoad:
    """ASGI middleware: counts requests that come through it."""

    def __init__(self, app: ASGIApp, load: Load) -> None:
        self._app, self._load = app, load

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, counted while it is answered if it is one that generates."""
        counts = scope["type"] == "http" and endpoint_path(scope) in GENERATING
        self._load.running += counts
        try:
            await self._app(scope, receive, send)
        finally:
            self._load.running -= counts
