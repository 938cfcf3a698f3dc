"""HTTP clients for one request each."""

from collections.abc import Callable

import httpx

_CONNECT_SECONDS = 5.0

Connect = Callable[[], httpx.AsyncClient]
"""Makes a client, whose connections end with its context."""


def connector() -> Connect:
    """Deadlines are the router's own, but for connecting: a host that does not answer is as one that refuses.

    A client that many requests shared would keep connections. One of them might be closed by the server just as the
    next request is sent, and nobody could say whether the server had seen it; and where a request is cancelled, as
    happens with every client that leaves, httpx's pool may keep its connection open for good.
    """
    certificates = httpx.create_ssl_context(trust_env=False)
    timeout = httpx.Timeout(None, connect=_CONNECT_SECONDS)
    return lambda: httpx.AsyncClient(verify=certificates, timeout=timeout, trust_env=False)
