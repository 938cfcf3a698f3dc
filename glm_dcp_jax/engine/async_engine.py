"""The engine behind an event loop: one thread steps it, coroutines wait for their outputs."""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future
from typing import Any

from glm_dcp_jax.config import EngineConfig
from glm_dcp_jax.engine.engine import Engine, EngineStats
from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.sampling_params import SamplingParams

_log = logging.getLogger(__name__)


class EngineDead(RuntimeError):
    """The engine stopped, by a failure or by shutdown; nothing more can be generated."""


class _Mailbox:
    """The latest output of one request: a slow reader skips what is outdated, since outputs are cumulative."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._latest: RequestOutput | Exception | None = None
        self._lock = threading.Lock()

    def put(self, output: RequestOutput | Exception) -> None:
        """Leave an output; from any thread."""
        with self._lock:
            self._latest = output
        # A loop that has closed has no reader left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self) -> RequestOutput:
        """Wait for an output newer than the last one taken; raises the exception that was left instead."""
        output = None
        while output is None:  # of two outputs in a row, the first wake-up finds the second
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                output, self._latest = self._latest, None
        if isinstance(output, Exception):
            raise output
        return output


class AsyncEngine:
    """Runs an Engine in a thread of its own. The engine is touched by that thread only; others post it calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.config, self.model_config = engine.config, engine.model_config
        self.max_model_len, self.tokenizer = engine.max_model_len, engine.tokenizer
        self.sampling_defaults = engine.sampling_defaults
        self._calls: deque[tuple[Future[None], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._ready = self._stopping = False
        self._failure: Exception | None = None
        self._stats = engine.stats()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @staticmethod
    def from_config(config: EngineConfig) -> "AsyncEngine":
        """Load the model, then compile every step in the background: is_ready turns True when all are there."""
        return AsyncEngine(Engine.from_config(config))

    async def generate(
        self, prompt_token_ids: list[int], params: SamplingParams, request_id: str
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative outputs, the last one finished. Closing the generator early aborts the request.

        Raises ValueError for a request that cannot run, EngineDead when the engine has stopped.
        """
        mailbox = _Mailbox()
        added = False

        def add() -> None:
            nonlocal added
            self._engine.add_request(request_id, prompt_token_ids, params)
            self._mailboxes[request_id] = mailbox
            added = True

        def abort_if_added() -> None:
            if added:
                self._abort(request_id)

        finished = False
        try:
            await asyncio.wrap_future(self._post(add))
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            if not finished:
                # Also when cancelled before `add` has run: calls run in the order they were posted.
                self._post(abort_if_added)

    async def abort(self, request_id: str) -> None:
        """End a request; its generator gets a last output with finish_reason abort."""
        await asyncio.wrap_future(self._post(lambda: self._abort(request_id)))

    def stats(self) -> EngineStats:
        """Counts as of the last step."""
        return self._stats

    @property
    def is_ready(self) -> bool:
        """Warmed up and running."""
        return self._ready and not self.is_dead

    @property
    def is_dead(self) -> bool:
        """Stopped for good."""
        return self._failure is not None or self._stopping

    @property
    def failure(self) -> Exception | None:
        """What the engine died of; None while it lives or after an ordinary shutdown."""
        return self._failure

    def shutdown(self) -> None:
        """Stop the thread after the step in progress; whatever still runs ends with EngineDead."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        # While steps are compiled there is nothing to wait for: the thread is a daemon and holds no request.
        if self._ready and threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, call: Callable[[], Any]) -> "Future[None]":
        """Have the engine's thread run `call` between two steps; the future carries what it raises."""
        future: Future[None] = Future()
        with self._wake:
            if self.is_dead:
                future.set_exception(self._dead())
            else:
                self._calls.append((future, call))
                self._wake.notify()
        return future

    def _dead(self) -> EngineDead:
        return EngineDead(
            "the engine was shut down" if self._failure is None else f"the engine failed: {self._failure}"
        )

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        mailbox = self._mailboxes.pop(request_id, None)
        if output is not None and mailbox is not None:
            mailbox.put(output)

    def _run(self) -> None:
        try:
            self._engine.runner.warm_up(lambda: self._stopping)
            self._ready = not self._stopping
            while self._serve_once():
                pass
        except Exception as error:
            _log.exception("the engine failed")
            self._failure = error
        self._end_all()

    def _serve_once(self) -> bool:
        """Posted calls, then one step; waits when there is nothing to do. False: shut down."""
        with self._wake:
            while not (self._calls or self._stopping or self._engine.has_unfinished):
                self._stats = self._engine.stats()
                self._wake.wait()
            if self._stopping:
                return False
            calls = list(self._calls)
            self._calls.clear()
        for future, call in calls:
            _run_into(future, call)
        for output in self._engine.step():
            mailbox = self._mailboxes.get(output.request_id)
            if output.finished:
                self._mailboxes.pop(output.request_id, None)
            if mailbox is not None:
                mailbox.put(output)
        self._stats = self._engine.stats()
        return True

    def _end_all(self) -> None:
        """Tell everybody who waits; from here on, `_post` refuses."""
        with self._wake:
            self._stopping = self._stopping or self._failure is None
            calls = list(self._calls)
            self._calls.clear()
        for future, _ in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._dead())
        for mailbox in self._mailboxes.values():
            mailbox.put(self._dead())
        self._mailboxes.clear()


def _run_into(future: "Future[None]", call: Callable[[], Any]) -> None:
    """Run a posted call; the future carries what it raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        call()
    except Exception as error:
        future.set_exception(error)
    else:
        future.set_result(None)
