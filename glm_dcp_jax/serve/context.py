"""What every endpoint works with: the engine, the settings and the metrics of one app."""

import asyncio
import time
from dataclasses import dataclass, field

from fastapi import Request

from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.draining import Drain
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.interface import Engine
from glm_dcp_jax.serve.load import Load
from glm_dcp_jax.serve.metrics import Metrics
from glm_dcp_jax.serve.parsing.parsers import Parsers
from glm_dcp_jax.serve.settings import ServerSettings
from glm_dcp_jax.serve.tracing import Profiler


@dataclass(frozen=True)
class Context:
    """One per app. started: seconds since the epoch."""

    engine: Engine
    settings: ServerSettings
    metrics: Metrics
    parsers: Parsers
    drain: Drain
    profiler: Profiler
    load: Load = field(default_factory=Load)
    started: int = field(default_factory=lambda: int(time.time()))

    @property
    def stopping(self) -> asyncio.Event:
        """Set to end what still runs."""
        return self.drain.stopping

    def model(self, requested: str | None) -> str:
        """The model's name as the client calls it. Raises ApiError 404 for any other model."""
        names = self.settings.served_model_names
        if requested is None:
            return names[0]
        if requested not in names:
            served = ", ".join(f"`{name}`" for name in names)
            raise ApiError(f"The model `{requested}` does not exist; this server has {served}.", 404, "model")
        return requested

    def tokenizer(self, what: str, param: str | None = None) -> Tokenizer:
        """The tokenizer. Raises ApiError 400 saying `what` needs it, if there is none."""
        if self.engine.tokenizer is None:
            raise ApiError(
                f"{what} needs a tokenizer, and this model was loaded without one; "
                "send token ids as prompt to /v1/completions",
                param=param,
            )
        return self.engine.tokenizer

    def require_ready(self) -> None:
        """Raises ApiError 503 before warm-up, after the engine's death, and while the server is about to stop."""
        self.drain.require_open()
        if self.engine.is_dead:
            raise ApiError("the engine has failed; the server must be restarted", 503)
        if not self.engine.is_ready:
            raise ApiError("the model is still being loaded; try again shortly", 503)


def context_of(request: Request) -> Context:
    """The context of the app that serves this request."""
    context = request.app.state.context
    assert isinstance(context, Context)
    return context
