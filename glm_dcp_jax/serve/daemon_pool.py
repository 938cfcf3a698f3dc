"""A few threads for work that may never end."""

import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

T = TypeVar("T")


class DaemonPool:
    """Runs work on its own threads, which, unlike ThreadPoolExecutor's, do not keep a process from exiting."""

    def __init__(self, threads: int, name: str) -> None:
        self._jobs: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = queue.SimpleQueue()
        for number in range(threads):
            threading.Thread(target=self._run, name=f"{name}-{number}", daemon=True).start()

    def submit(self, work: Callable[[], T]) -> Future[T]:
        """Run `work` when a thread is free; cancelling the future works until then."""
        future: Future[T] = Future()
        self._jobs.put((future, work))
        return future

    def _run(self) -> None:
        while True:
            future, work = self._jobs.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(work())
            except BaseException as error:  # whoever waits for the future must learn of anything
                future.set_exception(error)
