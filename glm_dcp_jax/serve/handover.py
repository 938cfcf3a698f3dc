"""Caches that a request brings from another engine, or leaves for one, and that must not be held in vain."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from glm_dcp_jax.serve.interface import Engine


class Handover:
    """One request's kv_transfer_params, as long as the server is answerable for what they name."""

    def __init__(self, engine: Engine, params: Mapping[str, Any] | None) -> None:
        """params: that came with the request."""
        self._engine, self._brought = engine, params
        self._left: dict[str, Any] | None = None

    def taken(self) -> None:
        """From now on the engine sees to the cache that the request brings."""
        self._brought = None

    def left(self, params: dict[str, Any] | None) -> None:
        """The engine offers a cache, if these are any params, and the client does not know of it yet."""
        self._left = params

    def told(self) -> None:
        """What the engine offers is on its way to the client, whose concern it is from now on."""
        self._left = None

    @contextlib.contextmanager
    def guarded(self) -> Iterator[None]:
        """Whatever is raised here means that nothing comes of the request."""
        try:
            yield
        except BaseException:  # also when it is cancelled
            self.call_off()
            raise

    def call_off(self) -> None:
        """Nothing comes of the request: tell whoever holds a cache for it. Only the first call does anything."""
        if self._brought:
            self._engine.drop_remote(self._brought)
        if self._left:
            self._engine.release_remote(self._left)
        self._brought = self._left = None
