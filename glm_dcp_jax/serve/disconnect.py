"""Work for one client only as long as it is there."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

from glm_dcp_jax.serve.errors import ClientGone

T = TypeVar("T")


async def while_connected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Run `work`; if the client goes away first, cancel it, wait until it has cleaned up, and raise ClientGone.

    receive: the request's ASGI channel, its body already read.
    """
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnection(receive))
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnection(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
