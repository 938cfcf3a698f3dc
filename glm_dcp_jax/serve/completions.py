"""POST /v1/completions."""

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from glm_dcp_jax.serve.context import Context, context_of
from glm_dcp_jax.serve.deltas import Delta, Usage, deltas, token_ids_body
from glm_dcp_jax.serve.disconnect import while_connected
from glm_dcp_jax.serve.errors import json_response
from glm_dcp_jax.serve.event_stream import EventStream
from glm_dcp_jax.serve.generation import Work, complete, generate
from glm_dcp_jax.serve.limits import check_logprobs, encode_within, output_budget
from glm_dcp_jax.serve.logprobs import completion_logprobs
from glm_dcp_jax.serve.protocol import CompletionRequest, Prompt

router = APIRouter()
DEFAULT_MAX_TOKENS = 16


@router.post("/v1/completions")
async def create_completion(request: HttpRequest, body: CompletionRequest) -> Response:
    """Continue prompts, given as text or token ids."""
    context = context_of(request)
    context.require_ready()
    completion = Completion(context, body)
    if body.stream:
        return EventStream(completion.stream(), context.stopping)
    return json_response(await while_connected(request.receive, context.stopping, completion.whole()))


class Completion:
    """One request. Raises ApiError for what can be refused without looking at the prompts."""

    def __init__(self, context: Context, body: CompletionRequest) -> None:
        self._context = context
        self._body = body
        self._id = f"cmpl-{uuid.uuid4().hex}"
        self._head = {
            "id": self._id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": context.model(body.model),
        }
        self._offsets: dict[int, int] = {}
        check_logprobs("logprobs", body.logprobs, context.settings.max_logprobs)

    async def whole(self) -> dict[str, Any]:
        """The answer, once everything is generated."""
        usage = Usage()
        choices = []
        for place, output in enumerate(await complete(self._context, await self._works())):
            usage.see(place, output)
            for choice in output.outputs:
                choices.append(self._choice(Delta(place, choice, output.prompt_token_ids, first=True)))
        return {**self._head, "choices": choices, "usage": usage.body()}

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in chunks, as it is generated."""
        usage = Usage()
        every_token = self._body.return_token_ids or self._body.logprobs is not None
        outputs = generate(self._context, await self._works())
        async with aclosing(deltas(outputs, usage, every_token)) as new:
            async for delta in new:
                yield {**self._head, "choices": [self._choice(delta)]}
        if self._body.include_usage:
            yield {**self._head, "choices": [], "usage": usage.body()}

    async def _works(self) -> list[Work]:
        prompts = await asyncio.to_thread(self._tokenize)
        names = [self._id] if len(prompts) == 1 else [f"{self._id}-{place}" for place in range(len(prompts))]
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
        max_tokens = output_budget(
            len(prompt), body.max_tokens, engine.max_model_len, "prompt", DEFAULT_MAX_TOKENS
        )
        if body.stop:
            self._context.tokenizer("a stop string", "stop")
        params = body.sampling_params(
            engine.sampling_defaults, max_tokens, body.logprobs, detokenize=engine.tokenizer is not None
        )
        return Work(request_id, prompt, params, blame="prompt")

    def _choice(self, delta: Delta) -> dict[str, Any]:
        choice = delta.choice
        index = delta.place * (self._body.n or 1) + choice.index
        logprobs = None
        if self._body.logprobs is not None and choice.logprobs is not None:
            offset = self._offsets.get(index, 0)
            logprobs = completion_logprobs(choice.token_ids, choice.logprobs, self._body.logprobs, offset)
            self._offsets[index] = offset + sum(map(len, logprobs["tokens"]))
        answer = {
            "index": index,
            "text": choice.text,
            "logprobs": logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        return {**answer, **token_ids_body(delta)} if self._body.return_token_ids else answer
