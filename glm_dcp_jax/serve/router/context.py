"""What every request works with: the settings, the servers and the metrics of one router."""

import asyncio

from fastapi import Request

from glm_dcp_jax.serve.draining import Drain
from glm_dcp_jax.serve.router.backends import Backend, Pool
from glm_dcp_jax.serve.router.connections import connector
from glm_dcp_jax.serve.router.metrics import Metrics
from glm_dcp_jax.serve.router.releases import Releases
from glm_dcp_jax.serve.router.settings import RouterSettings


class RouterContext:
    """One per app."""

    def __init__(self, settings: RouterSettings) -> None:
        self.settings = settings
        self.prefill = Pool("prefill", settings.prefill, settings.policy, last_resort=False)
        self.decode = Pool("decode", settings.decode, settings.policy, last_resort=True)
        self.metrics = Metrics(self.backends)
        self.connect = connector()
        self.releases = Releases(self.connect, self.metrics)
        self.drain = Drain(settings.shutdown_timeout)

    @property
    def stopping(self) -> asyncio.Event:
        """Set to end what still runs."""
        return self.drain.stopping

    @property
    def backends(self) -> list[Backend]:
        """The servers of both roles."""
        return [*self.prefill.backends, *self.decode.backends]

    @property
    def is_healthy(self) -> bool:
        """Whether there is a healthy server of each role."""
        return self.prefill.any_healthy and self.decode.any_healthy


def context_of(request: Request) -> RouterContext:
    """The context of the app that serves this request."""
    context = request.app.state.context
    assert isinstance(context, RouterContext)
    return context
