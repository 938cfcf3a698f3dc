"""A few threads for work that may take long, or never end."""

import contextlib
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonPool:
    """Runs work on its own threads, which, unlike ThreadPoolExecutor's, do not keep a process from exiting."""

    def __init__(self, threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._guard, self._closed = threading.Lock(), False
        self._threads = [
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True)
            for number in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """Run `work` when a thread is free; cancelling the future works until then. Cancelled at once when closed."""
        future: Future[T] = Future()
        with self._guard:
            if self._closed:
                future.cancel()
            else:
                self._jobs.put((future, lambda: work(*arguments)))
        return future

    def close(self, seconds: float, finish_queued: bool) -> None:
        """Take no more work, and wait at most so long for the rest.

        finish_queued: whether what has not begun is still run; else it is cancelled.
        """
        deadline = time.monotonic() + seconds
        with self._guard:
            if not self._closed:
                self._closed = True
                if not finish_queued:
                    self._cancel_queued()
                for _ in self._threads:
                    self._jobs.put(None)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, deadline - time.monotonic()))

    def _cancel_queued(self) -> None:
        with contextlib.suppress(queue.Empty):
            while job := self._jobs.get_nowait():
                job[0].cancel()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, work = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # whoever waits for the future must learn of anything
                future.set_exception(error)
