"""Counting compilations, so that a step that compiles while serving is seen and not only felt."""

import jax.monitoring

_EVENT = "/jax/core/compile/backend_compile_duration"


class _Process:
    """Programs this process has compiled or loaded from a cache. jax forgets no listener, so one serves all."""

    def __init__(self) -> None:
        self.compiles = 0
        jax.monitoring.register_event_duration_secs_listener(self._count)

    def _count(self, event: str, duration_secs: float, **_: object) -> None:
        self.compiles += event == _EVENT


_process = _Process()


class CompileCounter:
    """Counts every program this process compiles or loads from the persistent cache, from its creation on."""

    def __init__(self) -> None:
        self._start = _process.compiles
        self._warm: int | None = None

    @property
    def total(self) -> int:
        """Compilations since the counter was made."""
        return _process.compiles - self._start

    def mark_warm(self) -> None:
        """From here on, compilations are unexpected."""
        self._warm = self.total

    @property
    def after_warm_up(self) -> int:
        """Compilations since mark_warm; 0 before it."""
        return 0 if self._warm is None else self.total - self._warm
