"""Servers behind the router that do what a test tells them: real HTTP on real ports, in one thread."""

import asyncio
import json
import logging
import threading
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from live import wait_until

from glm_dcp_jax.serve import run

RELEASE = "/v1/kv_transfer/release"
EVENTS = "text/event-stream; charset=utf-8"
PARAMS = {"do_remote_prefill": True, "do_remote_decode": False, "key": "of-p0", "remote_port": 1}
"""What the first prefill server hands over, unless a test says otherwise."""


@dataclass(frozen=True)
class Seen:
    """A request as a server got it."""

    path: str
    headers: dict[str, str]
    raw: bytes

    @property
    def body(self) -> dict[str, Any]:
        return json.loads(self.raw)


@dataclass(frozen=True)
class Script:
    """How to answer. delay: before the headers; pause: before each chunk but the first; in seconds.

    break_at: close the connection instead of sending that chunk, -1: the headers. hang_at: likewise, wait for ever.
    """

    chunks: tuple[bytes, ...] = (b"{}",)
    status: int = 200
    content_type: str = "application/json"
    headers: dict[str, str] = field(default_factory=dict)
    delay: float = 0.0
    pause: float = 0.0
    break_at: int | None = None
    hang_at: int | None = None


def answer(fields: Any, **how: Any) -> Script:
    return Script(chunks=(json.dumps(fields).encode(),), **how)


def stream(*events: bytes, **how: Any) -> Script:
    return Script(chunks=events, content_type=EVENTS, **how)


class FakeBackend:
    """One server. script: for generation, perhaps by the request; release_script: for releases."""

    def __init__(self) -> None:
        self.url = ""
        self.running = 0
        self.reset()

    def reset(self) -> None:
        """As new, once the last test's requests have ended."""
        wait_until(lambda: self.running == 0)
        self.script: Script | Callable[[Seen], Script] = Script()
        self.release_script = Script()
        self.health = Script(chunks=(b"",))
        self.seen: list[Seen] = []
        self.released: list[Seen] = []
        self.cut_off = 0

    @property
    def only(self) -> Seen:
        """The one request that came."""
        (seen,) = self.seen
        return seen

    async def __call__(self, scope, receive, send) -> None:
        raw = b""
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            raw += message["body"]
            if not message["more_body"]:
                break
        headers = {name.decode(): value.decode("latin-1") for name, value in scope["headers"]}
        seen = Seen(scope["path"], headers, raw)
        play = asyncio.ensure_future(_play(self._script_for(seen), send))
        gone = asyncio.ensure_future(receive())  # nothing else can come now
        self.running += 1
        try:
            await asyncio.wait((play, gone), return_when=asyncio.FIRST_COMPLETED)
            self.cut_off += not play.done()
        finally:
            play.cancel()
            gone.cancel()
            await asyncio.gather(play, gone, return_exceptions=True)
            self.running -= 1

    def _script_for(self, seen: Seen) -> Script:
        if seen.path == "/health":
            return self.health
        if seen.path == RELEASE:
            self.released.append(seen)
            return self.release_script
        self.seen.append(seen)
        return self.script(seen) if callable(self.script) else self.script


async def _play(script: Script, send) -> None:
    await asyncio.sleep(script.delay)
    if script.hang_at == -1:
        await asyncio.Event().wait()
    if script.break_at == -1:
        send.__self__.transport.close()  # uvicorn itself would answer with 500
        return
    headers = [(b"content-type", script.content_type.encode())]
    headers += [(name.encode(), value.encode()) for name, value in script.headers.items()]
    await send({"type": "http.response.start", "status": script.status, "headers": headers})
    for place, chunk in enumerate(script.chunks):
        if place:
            await asyncio.sleep(script.pause)
        if script.hang_at == place:
            await asyncio.Event().wait()
        if script.break_at == place:
            return
        await send({"type": "http.response.body", "body": chunk, "more_body": True})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


class Stage:
    """An ASGI app that can be exchanged: starting a server for each test would take longer than the test."""

    def __init__(self) -> None:
        self.app: Any = None

    async def __call__(self, scope, receive, send) -> None:
        await self.app(scope, receive, send)


class Loop:
    """An event loop in a thread, where servers run."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """The result of a coroutine there."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(timeout=20)

    def call(self, function: Callable[[], object]) -> None:
        """Call a function there, some time."""
        self._loop.call_soon_threadsafe(function)


@contextmanager
def live(*apps: FakeBackend | Stage) -> Iterator[tuple[Loop, list[str]]]:
    """Servers of these apps on free ports, while the context is open."""
    # A connection that a script breaks is an error to uvicorn.
    logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
    listeners = [run.bind("127.0.0.1", 0) for _ in apps]
    configs = [
        uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1) for app in apps
    ]
    servers = [uvicorn.Server(config) for config in configs]
    loop = asyncio.new_event_loop()

    async def serve() -> None:
        pairs = zip(servers, listeners, strict=True)
        await asyncio.gather(*(server.serve(sockets=[listener]) for server, listener in pairs))

    thread = threading.Thread(target=loop.run_until_complete, args=(serve(),))
    thread.start()
    try:
        wait_until(lambda: all(server.started for server in servers))
        yield Loop(loop), [run.url("127.0.0.1", listener) for listener in listeners]
    finally:
        for server in servers:
            server.should_exit = True
        thread.join()
        loop.close()
