"""The engine behind an event loop: one thread steps it, coroutines wait for their outputs."""

import asyncio
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


class AsyncEngine:
    """Runs an Engine in a thread of its own. The engine is touched by that thread only; others post it calls."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.config, self.model_config = engine.config, engine.model_config
        self.max_model_len, self.tokenizer = engine.max_model_len, engine.tokenizer
        self._calls: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._outputs: dict[str, Callable[[RequestOutput | Exception], None]] = {}
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
        loop = asyncio.get_running_loop()
        queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()

        def deliver(output: RequestOutput | Exception) -> None:
            loop.call_soon_threadsafe(queue.put_nowait, output)

        def add() -> None:
            self._engine.add_request(request_id, prompt_token_ids, params)
            self._outputs[request_id] = deliver

        await asyncio.wrap_future(self._post(add))
        finished = False
        try:
            while not finished:
                output = await queue.get()
                if isinstance(output, Exception):
                    finished = True
                    raise output
                finished = output.finished
                yield output
        finally:
            if not finished:
                self._post(lambda: self._abort(request_id))

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
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _post(self, call: Callable[[], Any]) -> "Future[None]":
        """Have the engine's thread run `call` between two steps; the future carries what it raises."""
        future: Future[None] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                call()
            except Exception as error:
                future.set_exception(error)
            else:
                future.set_result(None)

        with self._wake:
            if self.is_dead:
                future.set_exception(self._dead())
            else:
                self._calls.append(run)
                self._wake.notify()
        return future

    def _dead(self) -> EngineDead:
        return EngineDead(
            "the engine was shut down" if self._failure is None else f"the engine failed: {self._failure}"
        )

    def _abort(self, request_id: str) -> None:
        output = self._engine.abort(request_id)
        deliver = self._outputs.pop(request_id, None)
        if output is not None and deliver is not None:
            deliver(output)

    def _run(self) -> None:
        try:
            self._engine.runner.warm_up()
            self._ready = True
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
        for call in calls:
            call()
        for output in self._engine.step():
            deliver = self._outputs.get(output.request_id)
            if output.finished:
                self._outputs.pop(output.request_id, None)
            if deliver is not None:
                deliver(output)
        self._stats = self._engine.stats()
        return True

    def _end_all(self) -> None:
        with self._wake:
            self._stopping = self._stopping or self._failure is None
            calls = list(self._calls)
            self._calls.clear()
        for deliver in list(self._outputs.values()):
            deliver(self._dead())
        self._outputs.clear()
        for call in calls:
            call()
