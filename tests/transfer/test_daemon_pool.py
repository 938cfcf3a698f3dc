"""Work on threads that nobody has to wait for."""

import threading
import time

import pytest

from glm_dcp_jax.transfer.daemon_pool import DaemonPool


def test_results_and_errors_come_back():
    pool = DaemonPool(2, "test")
    assert pool.submit(divmod, 7, 2).result(5) == (3, 1)
    with pytest.raises(ZeroDivisionError):
        pool.submit(divmod, 1, 0).result(5)
    assert pool.submit(int, "5").result(5) == 5, "the thread has outlived the error"


@pytest.mark.parametrize("finish_queued", [True, False])
def test_closing_decides_about_what_has_not_begun(finish_queued):
    pool, began, go_on = DaemonPool(1, "test"), threading.Event(), threading.Event()

    def work() -> bool:
        began.set()
        return go_on.wait(20)

    running, queued = pool.submit(work), pool.submit(int, "1")
    assert began.wait(20), "what has not begun is queued too"
    threading.Timer(0.1, go_on.set).start()
    pool.close(20, finish_queued)
    assert running.result(0) is True
    assert queued.cancelled() is not finish_queued
    assert pool.submit(int, "2").cancelled(), "it takes no more work"


def test_closing_waits_for_its_time_only():
    pool, never = DaemonPool(2, "test"), threading.Event()
    stuck = pool.submit(never.wait, 20)
    began = time.monotonic()
    pool.close(0.2, finish_queued=True)
    pool.close(0.0, finish_queued=False)
    assert time.monotonic() - began < 2 and not stuck.done()
    never.set()
