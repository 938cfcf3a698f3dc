"""The engine behind an event loop: one thread steps it, coroutines wait for their outputs."""

import asyncio
import contextlib
import gc
import logging
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from glm_dcp_jax.config import EngineConfig
from glm_dcp_jax.engine.engine import Engine
from glm_dcp_jax.engine.engine_stats import EngineStats
from glm_dcp_jax.engine.kv_connector import wish_of
from glm_dcp_jax.engine.lockstep import Leader
from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams
from glm_dcp_jax.engine.sequence import Progress
from glm_dcp_jax.engine.summary import summary_of

_log = logging.getLogger(__name__)
_LAST_STEP_SECONDS = 10
"""How long a shutdown waits for the step in progress: a process that hangs may keep it from ending."""
_DRAIN_SECONDS = 5.0
"""How long caches that were promised to other engines may still be read then, unless something else is asked for."""
_CLOSE_SECONDS = 5.0
"""How long it then waits for what goes on with other engines."""
_PREPARING = 4
"""Requests that are prepared at a time, in threads of their own: nobody else waits for what takes long to compile."""
Result = TypeVar("Result")


class EngineDead(RuntimeError):
    """The engine stopped, by a failure or by shutdown; nothing more can be generated."""


class _Mailbox:
    """The latest progress of one request: a slow reader skips what is outdated, since outputs are cumulative."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._arrived = asyncio.Event()
        self._latest: Progress | Exception | None = None
        self._lock = threading.Lock()

    def put(self, latest: Progress | Exception) -> None:
        """Leave what there is now; from any thread."""
        with self._lock:
            self._latest = latest
        # A loop that has closed has no reader left.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._arrived.set)

    async def take(self) -> RequestOutput:
        """Wait for an output newer than the last one taken; raises the exception that was left instead."""
        latest = None
        while latest is None:  # of two in a row, the first wake-up finds the second
            await self._arrived.wait()
            self._arrived.clear()
            with self._lock:
                latest, self._latest = self._latest, None
        if isinstance(latest, Exception):
            raise latest
        return latest.output()

    def left(self) -> RequestOutput | None:
        """The last output of a request that has finished, if nobody has taken it."""
        with self._lock:
            latest, self._latest = self._latest, None
        return latest.output() if isinstance(latest, Progress) and latest.finished else None


class AsyncEngine:
    """Runs an Engine in a thread of its own. The engine is touched by that thread only; others post it calls.

    With several processes it is process 0's, and waits for the others.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine, self._leader = engine, Leader(engine.config.processes)
        self.config, self.model_config = engine.config, engine.model_config
        self.max_model_len, self.tokenizer = engine.max_model_len, engine.tokenizer
        self.sampling_defaults = engine.sampling_defaults
        self.summary = summary_of(engine.runner.blueprint, engine.max_model_len)
        self._calls: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._wake = threading.Condition()
        self._mailboxes: dict[str, _Mailbox] = {}
        self._preparing = ThreadPoolExecutor(_PREPARING, thread_name_prefix="prepare")
        self._ready = self._stopping = False
        self._failure: Exception | None = None
        self._stats = engine.stats()
        if engine.connector is not None:
            engine.connector.on_event = self._notify
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    @staticmethod
    def from_config(config: EngineConfig) -> "AsyncEngine":
        """Load the model, then compile every step in the background: is_ready turns True when all are there."""
        return AsyncEngine(Engine.from_config(config))

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncGenerator[RequestOutput, None]:
        """Cumulative outputs, the last one finished. Closing the generator early aborts the request.

        priority, cache_salt: as in Engine.add_request. From the first step of the generator on, a cache that the
        request brings is the engine's concern: however it ends, its producer hears of it.

        Raises ValueError for a request that cannot run, QueueFull if too much waits, EngineDead when the engine has
        stopped.
        """
        mailbox = _Mailbox()
        seen = added = False

        def add() -> None:
            nonlocal seen, added
            seen = True  # whether it takes the request or refuses it, the engine sees to what that brings
            self._call(
                "add_request", request_id, prompt_token_ids, params, priority=priority, cache_salt=cache_salt
            )
            self._mailboxes[request_id] = mailbox
            added = True

        def leave() -> None:
            if added:
                self._abort(request_id)
                self._release(mailbox.left())

        def drop_unseen(left: "Future[None]") -> None:
            if not seen:
                self.drop_remote(params.kv_transfer_params)

        finished = False
        try:
            if params.structured_outputs is not None:
                await self._prepare(params)
            await asyncio.wrap_future(self._post(add))
            while not finished:
                output = await mailbox.take()
                finished = output.finished
                yield output
        finally:
            if not finished:
                # Also when cancelled before `add` has run: calls run in the order they were posted.
                self._post(leave).add_done_callback(drop_unseen)

    async def _prepare(self, params: SamplingParams) -> None:
        if self.is_dead:
            raise self._dead()
        await asyncio.wrap_future(self._preparing.submit(self._engine.prepare, params))

    async def abort(self, request_id: str) -> None:
        """End a request; its generator gets a last output with finish_reason abort."""
        await asyncio.wrap_future(self._post(lambda: self._abort(request_id)))

    async def reset_prefix_cache(self) -> bool:
        """Forget what earlier requests computed. False if requests that run still hold some of it.

        Raises EngineDead when the engine has stopped.
        """
        return await asyncio.wrap_future(self._post(lambda: self._call("reset_prefix_cache")))

    def drop_remote(self, params: Any) -> None:
        """A request with these kv_transfer_params will not come: a cache that they name need not be held for it.

        Its producer hears of it soon. Nothing happens for params that this engine could not take up. From any thread.
        """
        connector = self._engine.connector
        with contextlib.suppress(ParameterError):
            wish = wish_of(SamplingParams(extra_args={"kv_transfer_params": params}), connector)
            if connector is not None and wish.brings is not None:
                connector.drop(wish.brings)

    def release_remote(self, params: Any) -> bool:
        """Nobody will come for a cache that this engine holds. Returns whether it was held. From any thread.

        Raises ParameterError for params that no producer gave out.
        """
        connector = self._engine.connector
        return connector is not None and connector.release(params)

    def stats(self) -> EngineStats:
        """Counts as of the last step; those of transfers as of now, since they go on without steps."""
        connector = self._engine.connector
        return self._stats if connector is None else replace(self._stats, transfers=connector.stats())

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

    def shutdown(self, drain_seconds: float = _DRAIN_SECONDS) -> None:
        """Stop the thread after the step in progress; whatever still runs ends with EngineDead, and transfers end.

        drain_seconds: how long caches that were promised to other engines may still be read.
        """
        with self._wake:
            self._stopping = True
            self._wake.notify()
        self._engine.wake()
        self._preparing.shutdown(wait=False)
        # While steps are compiled there is nothing to wait for: the thread is a daemon and holds no request.
        if self._ready and threading.current_thread() is not self._thread:
            self._thread.join(_LAST_STEP_SECONDS)
            if self._thread.is_alive():
                _log.warning("the step in progress does not end; the process does, without it")
        if self._engine.connector is not None:
            closing = threading.Thread(
                target=self._close, args=(drain_seconds,), name="kv-close", daemon=True
            )
            closing.start()
            closing.join(drain_seconds + _CLOSE_SECONDS)

    def _close(self, drain_seconds: float) -> None:
        """What was promised to other engines may still be read; an engine that failed has nothing for them."""
        assert self._engine.connector is not None
        if self._failure is None:
            self._engine.connector.drain(drain_seconds)
        self._engine.close()

    def _post(self, call: Callable[[], Result]) -> "Future[Result]":
        """Have the engine's thread run `call` between two steps; the future carries what it returns or raises."""
        future: Future[Result] = Future()
        with self._wake:
            if self.is_dead:
                future.set_exception(self._dead())
            else:
                self._calls.append((future, call))
                self._wake.notify()
        self._engine.wake()
        return future

    def _notify(self) -> None:
        """Something has come from another engine, or has been given back by one. From any thread."""
        with self._wake:
            self._wake.notify()

    def _dead(self) -> EngineDead:
        return EngineDead(
            "the engine was shut down" if self._failure is None else f"the engine failed: {self._failure}"
        )

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        """A method of the engine that changes what it does next."""
        return self._leader.call(self._engine, name, *arguments, **named)

    def _abort(self, request_id: str) -> None:
        progress = self._call("abort", request_id)
        mailbox = self._mailboxes.pop(request_id, None)
        if progress is not None and mailbox is not None:
            mailbox.put(progress)

    def _release(self, output: RequestOutput | None) -> None:
        """Nobody will read this output, so nobody will come for the cache that it offers."""
        if output is not None and output.kv_transfer_params is not None:
            self.release_remote(output.kv_transfer_params)

    def _run(self) -> None:
        try:
            self._engine.runner.warm_up(lambda: self._stopping)
            # What is there now stays: a full collection that looks through all of it takes a tenth of a second.
            gc.collect()
            gc.freeze()
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
        self._leader.before_step(self._engine)
        ended = self._engine.step()
        self._stats = self._engine.stats()  # before anybody hears of it: who then asks finds it counted
        for progress in ended:
            mailbox = self._mailboxes.get(progress.request_id)
            if progress.finished:
                self._mailboxes.pop(progress.request_id, None)
            if mailbox is not None:
                mailbox.put(progress)
        return True

    def _end_all(self) -> None:
        """Tell everybody who waits; from here on, `_post` refuses."""
        with self._wake:
            self._stopping = self._stopping or self._failure is None
            calls = list(self._calls)
            self._calls.clear()
        self._leader.close()
        for future, _ in calls:
            if future.set_running_or_notify_cancel():
                future.set_exception(self._dead())
        for mailbox in self._mailboxes.values():
            mailbox.put(self._dead())
        self._mailboxes.clear()


def _run_into(future: "Future[Result]", call: Callable[[], Result]) -> None:
    """Run a posted call; the future carries what it returns or raises."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(call())
    except Exception as error:
        future.set_exception(error)
