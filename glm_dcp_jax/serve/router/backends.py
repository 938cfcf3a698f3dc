"""The servers behind the router: how busy and how healthy each is, and whose turn it is."""

import logging
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager

_LOG = logging.getLogger(__name__)


class Backend:
    """One server. role: prefill or decode. healthy: None until it was asked for the first time."""

    def __init__(self, role: str, url: str) -> None:
        self.role, self.url = role, url
        self.in_flight = 0
        self.healthy: bool | None = None

    @contextmanager
    def busy(self) -> Iterator[None]:
        """One more request is in flight here while the context is open."""
        self.in_flight += 1
        try:
            yield
        finally:
            self.in_flight -= 1

    def observe(self, healthy: bool, why: str = "") -> None:
        """It was found to be so just now; a change is logged."""
        if healthy and self.healthy is not True:
            _LOG.info("%s server %s is healthy", self.role, self.url)
        if not healthy and self.healthy is not False:
            _LOG.warning("%s server %s is not healthy: %s", self.role, self.url, why)
        self.healthy = healthy


class Pool:
    """The servers of one role.

    last_resort: whether one that is known to be unhealthy is picked when there is no other. Without a prefill server
    a request is still served, without a decode server it is not.
    """

    def __init__(self, role: str, urls: Sequence[str], policy: str, last_resort: bool) -> None:
        self.backends = [Backend(role, url) for url in urls]
        self._policy, self._last_resort = policy, last_resort
        self._turn = 0

    @property
    def any_healthy(self) -> bool:
        """Whether at least one has said that it is."""
        return any(backend.healthy for backend in self.backends)

    def pick(self, tried: Collection[Backend] = ()) -> Backend | None:
        """A server that is not among `tried`, by the policy; None if there is none left."""
        left = [backend for backend in self.backends if backend not in tried]
        fit = [backend for backend in left if backend.healthy is not False]
        if not fit and self._last_resort:
            fit = left
        if not fit:
            return None
        if self._policy == "least_loaded":
            return min(fit, key=lambda backend: backend.in_flight)
        return self._next_of(fit)

    def _next_of(self, fit: Collection[Backend]) -> Backend:
        """The first from whose turn it is on, over all servers, so that one that is left out upsets no order."""
        count = len(self.backends)
        places = (place % count for place in range(self._turn, self._turn + count))
        place = next(place for place in places if self.backends[place] in fit)
        self._turn = place + 1
        return self.backends[place]
