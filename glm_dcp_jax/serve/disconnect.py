"""Work for a client only as long as it is there, and the server too."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from glm_dcp_jax.serve.errors import SHUTTING_DOWN, ApiError, ClientGone

T = TypeVar("T")


async def while_connected(receive: Receive, stopping: asyncio.Event, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled, and has cleaned up, before an error is raised here.

    receive: the request's ASGI channel, its body already read.
    Raises ClientGone when the client closes the connection, ApiError 503 when `stopping` is set.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnection(receive))
    stop = asyncio.ensure_future(stopping.wait())
    try:
        await asyncio.wait((task, gone, stop), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone if gone.done() else ApiError(SHUTTING_DOWN, 503)
    finally:
        for each in (task, gone, stop):
            each.cancel()
        await asyncio.gather(task, gone, stop, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
