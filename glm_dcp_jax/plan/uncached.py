"""Keeping programs for absent GPUs out of jax's persistent compilation cache."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock

import jax

_SETTING = "jax_persistent_cache_min_compile_time_secs"
"""Not jax_enable_compilation_cache, which jax reads once and remembers for the process."""


class _Pause:
    """Counts who needs the cache to be off; the first turns it off, the last restores what was set."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._users = 0
        self._usual = 0.0

    def begin(self) -> None:
        with self._lock:
            if self._users == 0:
                self._usual = getattr(jax.config, _SETTING)
                jax.config.update(_SETTING, math.inf)
            self._users += 1

    def end(self) -> None:
        with self._lock:
            self._users -= 1
            if self._users == 0:
                jax.config.update(_SETTING, self._usual)


_pause = _Pause()


@contextmanager
def no_persistent_cache() -> Iterator[None]:
    """Nothing that is compiled within is stored in jax's persistent cache.

    jax would store programs for absent GPUs, but cannot read them back, and would warn at every later attempt. The
    setting is the process's: what other threads compile meanwhile is not stored either. May be nested.
    """
    _pause.begin()
    try:
        yield
    finally:
        _pause.end()
