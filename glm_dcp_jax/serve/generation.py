"""Running a request's prompts on the engine, all at once, with errors and metrics as the API wants them."""

import asyncio
import dataclasses
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams
from glm_dcp_jax.engine.waiting import QueueFull
from glm_dcp_jax.serve.context import Context
from glm_dcp_jax.serve.errors import ApiError, internal_error
from glm_dcp_jax.serve.handover import Handover
from glm_dcp_jax.serve.metrics import RequestWatch

_LOG = logging.getLogger(__name__)
Outputs = AsyncGenerator[tuple[int, RequestOutput], None]
_NOT_SHOWN = ("max_tokens", "detokenize", "extra_args")
_MOST_SHOWN, _MOST_CHARACTERS = 8, 200
"""Entries of a list, and characters of a value, that a log shows."""
_RETRY_SECONDS = 1
"""After which a client may try again when the queue was full: it moves with every request that ends."""


@dataclass(frozen=True)
class Work:
    """One prompt to run. blame: the request field that an error about the prompt names. structured_by: the one that
    asks for structured outputs.

    handover: of the request it belongs to. priority, cache_salt: as in Engine.add_request.
    """

    request_id: str
    prompt: list[int]
    params: SamplingParams
    blame: str
    handover: Handover
    priority: int = 0
    cache_salt: str = ""
    structured_by: str = ""

    def blamed(self, error: ValueError) -> str:
        """The request field that an error of the engine is about."""
        if not isinstance(error, ParameterError):
            return self.blame
        return self.structured_by if error.field == "structured_outputs" else error.field


async def generate(context: Context, works: Sequence[Work]) -> Outputs:
    """Run prompts concurrently: (which prompt, its cumulative output) as they come. Closing it aborts them all.

    Raises ApiError, after which the others are aborted: 400 for what the engine refuses, 503 when its queue is full and
    when it has died, 500 for a request that failed.
    """
    if context.settings.enable_log_requests:
        for work in works:
            _log_request(work)
    streams = [_observed(context, work) for work in works]
    steps = {asyncio.ensure_future(_next(stream)): place for place, stream in enumerate(streams)}
    try:
        while steps:
            done, _ = await asyncio.wait(steps, return_when=asyncio.FIRST_COMPLETED)
            for step in done:
                place = steps.pop(step)
                output = step.result()
                if output is not None:
                    steps[asyncio.ensure_future(_next(streams[place]))] = place
                    yield place, output
    finally:
        for step in steps:
            step.cancel()
        await asyncio.gather(*steps, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def complete(
    context: Context,
    works: Sequence[Work],
    enough: Callable[[RequestOutput], bool] = lambda output: False,
) -> list[RequestOutput]:
    """Run prompts to their ends; the outputs in the prompts' order. Raises as `generate`.

    enough: sees each output as it comes, and whether it ends all that is still running.
    """
    last: dict[int, RequestOutput] = {}
    async with aclosing(generate(context, works)) as outputs:
        async for place, output in outputs:
            last[place] = output
            if enough(output):
                break
    return [last[place] for place in range(len(works))]


def _log_request(work: Work) -> None:
    """Its length and what it asks for; never its prompt."""
    count, params = len(work.prompt), asked_for(work.params)
    said = ", ".join(f"{name}={value!r}" for name, value in params.items())
    extra = {"engine_request_id": work.request_id, "prompt_tokens": count, "params": params}
    _LOG.info("%s: %d prompt tokens, %s", work.request_id, count, said, extra=extra)


def asked_for(params: SamplingParams) -> dict[str, Any]:
    """max_tokens, and parameters that are not what they are by default; of long lists the length.

    Without extra_args, which hold the keys to caches.
    """
    shown: dict[str, Any] = {"max_tokens": params.max_tokens}
    for field in dataclasses.fields(params):
        value = getattr(params, field.name)
        if field.name not in _NOT_SHOWN and value not in (field.default, ()):
            is_long = isinstance(value, (tuple, dict)) and len(value) > _MOST_SHOWN
            shown[field.name] = f"({len(value)} entries)" if is_long else _shortened(value)
    return shown


def _shortened(value: Any) -> Any:
    """The value, or of a grammar and the like the beginning."""
    text = repr(value)
    return value if len(text) <= _MOST_CHARACTERS else text[:_MOST_CHARACTERS] + "..."


async def _next(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput | None:
    return await anext(stream, None)


async def _observed(context: Context, work: Work) -> AsyncGenerator[RequestOutput, None]:
    """One prompt on the engine, counted in the metrics, its errors made ApiErrors."""
    watch = RequestWatch(context.metrics, len(work.prompt), work.params)
    reasons = ["abort"] * work.params.n  # unless something better is known when this is left
    running = context.engine.generate(
        work.prompt, work.params, work.request_id, work.priority, work.cache_salt
    )
    try:
        async with aclosing(running) as outputs:
            work.handover.taken()
            async for output in outputs:
                watch.see(output)
                if output.finished:
                    reasons = [choice.finish_reason or "error" for choice in output.outputs]
                    _require_success(output)
                    work.handover.left(output.kv_transfer_params)
                yield output
    except QueueFull as error:
        reasons = []
        context.metrics.rejected(error.limit)
        raise ApiError(str(error), 503, retry_after=_RETRY_SECONDS) from error
    except ValueError as error:
        reasons = []  # refused, so never begun
        raise ApiError(str(error), param=work.blamed(error)) from error
    except RuntimeError:
        reasons = ["error"] * work.params.n
        if context.engine.is_dead:
            raise ApiError("the engine has failed; the server must be restarted", 503) from None
        raise
    finally:
        if reasons:
            watch.end(reasons)


def _require_success(output: RequestOutput) -> None:
    if any(choice.finish_reason == "error" for choice in output.outputs):
        raise internal_error() if output.error is None else ApiError(output.error, 500)
