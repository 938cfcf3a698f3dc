"""POST /v1/completions."""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from glm_dcp_jax.engine.outputs import Logprob
from glm_dcp_jax.serve.context import Context, context_of
from glm_dcp_jax.serve.deltas import Delta, Usage, deltas, token_ids_body, transfer_body, whole_deltas
from glm_dcp_jax.serve.disconnect import while_connected
from glm_dcp_jax.serve.echo import prompts_only, with_prompt, without_output
from glm_dcp_jax.serve.errors import json_response
from glm_dcp_jax.serve.event_stream import EventStream
from glm_dcp_jax.serve.generation import Work, complete, generate
from glm_dcp_jax.serve.handover import Handover
from glm_dcp_jax.serve.limits import check_logprobs, encode_within, output_budget
from glm_dcp_jax.serve.logprobs import completion_logprobs, prompt_logprobs_body
from glm_dcp_jax.serve.protocol import CompletionRequest, Prompt
from glm_dcp_jax.serve.request_names import Names, names_of
from glm_dcp_jax.serve.strict_json import StrictRoute

router = APIRouter(route_class=StrictRoute)
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def create_completion(request: HttpRequest, body: CompletionRequest) -> Response:
    """Continue prompts, given as text or token ids."""
    context = context_of(request)
    handover = Handover(context.engine, body.kv_transfer_params)
    with handover.guarded():
        context.require_ready()
        completion = Completion(context, body, handover, names_of(request, "cmpl-", body.request_id))
        if body.stream:
            return EventStream(
                completion.stream(),
                context.stopping,
                handover.call_off,
                context.settings.sse_keep_alive_interval,
            )
        return json_response(await while_connected(request.receive, context.stopping, completion.whole()))


class Completion:
    """One request. Raises ApiError for what can be refused without looking at the prompts."""

    def __init__(self, context: Context, body: CompletionRequest, handover: Handover, names: Names) -> None:
        self._context, self._body, self._handover, self._names = context, body, handover, names
        self._head = {
            "id": names.answer,
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.model(body.model),
        }
        self._offsets: dict[int, int] = {}
        for field in ("logprobs", "prompt_logprobs"):
            check_logprobs(field, getattr(body, field), context.settings.max_logprobs)

    async def whole(self) -> dict[str, Any]:
        """The answer, once everything is generated."""
        usage = Usage()
        choices = []
        outputs = await complete(self._context, await self._works())
        for place, output in enumerate(outputs):
            shown = without_output(output) if self._body.prompt_only else output
            usage.see(place, shown)
            choices += [self._choice(delta) for delta in whole_deltas(place, shown)]
        return {
            **self._head,
            "choices": choices,
            "usage": usage.body(),
            "kv_transfer_params": outputs[0].kv_transfer_params,
        }

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in chunks, as it is generated."""
        usage = Usage()
        every_token = self._body.return_token_ids or self._body.logprobs is not None
        outputs = generate(self._context, await self._works())
        if self._body.prompt_only:
            outputs = prompts_only(outputs)
        async with aclosing(deltas(outputs, usage, every_token)) as new:
            async for delta in new:
                if delta.kv_transfer_params is not None:
                    self._handover.told()
                yield {**self._head, "choices": [self._choice(delta)], **transfer_body(delta)}
        if self._body.include_usage:
            yield {**self._head, "choices": [], "usage": usage.body()}

    async def _works(self) -> list[Work]:
        prompts = await asyncio.to_thread(self._tokenize)
        name = self._names.engine
        names = [name] if len(prompts) == 1 else [f"{name}-{place}" for place in range(len(prompts))]
        return [self._work(name, prompt) for name, prompt in zip(names, prompts, strict=True)]

    def _tokenize(self) -> list[list[int]]:
        return [self._token_ids(prompt) for prompt in self._body.prompt]

    def _token_ids(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, list):
            return prompt
        tokenizer = self._context.tokenizer("a text prompt", "prompt")
        longest = self._context.engine.max_model_len
        return encode_within(tokenizer, prompt, self._body.add_special_tokens, longest, "prompt")

    def _work(self, request_id: str, prompt: list[int]) -> Work:
        body, engine = self._body, self._context.engine
        requested = 1 if body.prompt_only else body.max_tokens
        max_tokens = output_budget(len(prompt), requested, engine.max_model_len, "prompt", DEFAULT_MAX_TOKENS)
        body.require_tokenizer(self._context.tokenizer)
        params = body.sampling_params(
            engine.sampling_defaults,
            max_tokens,
            body.logprobs,
            detokenize=engine.tokenizer is not None,
            structured_outputs=body.structured,
        )
        return Work(
            request_id,
            prompt,
            params,
            "prompt",
            self._handover,
            body.priority,
            body.cache_salt,
            body.structured_by,
        )

    def _choice(self, delta: Delta) -> dict[str, Any]:
        """delta as an element of `choices`, behind its prompt if that is to be echoed."""
        body, choice, tokenizer = self._body, delta.choice, self._context.engine.tokenizer
        index = delta.place * (body.n or 1) + choice.index
        text, token_ids = choice.text, choice.token_ids
        scored: Sequence[dict[int, Logprob] | None] | None = choice.logprobs
        if body.echo and delta.first:
            text, token_ids, scored = with_prompt(delta, body.prompt[delta.place], tokenizer)
        logprobs = None
        if body.logprobs is not None and scored is not None:
            offset = self._offsets.get(index, 0)
            logprobs = completion_logprobs(token_ids, scored, body.logprobs, offset, tokenizer)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        answer = {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if body.return_token_ids:
            answer |= token_ids_body(delta)
        if body.prompt_logprobs is not None:
            answer |= {"prompt_logprobs": prompt_logprobs_body(delta.prompt_logprobs or [])}
        return answer
