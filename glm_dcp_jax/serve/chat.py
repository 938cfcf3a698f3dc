"""POST /v1/chat/completions."""

import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from glm_dcp_jax.serve.chat_work import ChatWork
from glm_dcp_jax.serve.context import Context, context_of
from glm_dcp_jax.serve.deltas import Delta, Usage, deltas, token_ids_body, transfer_body, whole_deltas
from glm_dcp_jax.serve.disconnect import while_connected
from glm_dcp_jax.serve.errors import json_response
from glm_dcp_jax.serve.event_stream import EventStream
from glm_dcp_jax.serve.generation import complete, generate
from glm_dcp_jax.serve.handover import Handover
from glm_dcp_jax.serve.logprobs import prompt_logprobs_body, token_logprobs
from glm_dcp_jax.serve.protocol import ChatRequest
from glm_dcp_jax.serve.request_names import Names, names_of
from glm_dcp_jax.serve.strict_json import StrictRoute
from glm_dcp_jax.serve.turns import NOTHING, Turns, delta_bodies

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/chat/completions")
async def create_chat_completion(request: HttpRequest, body: ChatRequest) -> Response:
    """Answer a conversation."""
    context = context_of(request)
    handover = Handover(context.engine, body.kv_transfer_params)
    with handover.guarded():
        context.require_ready()
        chat = Chat(context, body, handover, names_of(request, "chatcmpl-", body.request_id))
        if body.stream:
            return EventStream(
                chat.stream(),
                context.stopping,
                handover.call_off,
                context.settings.sse_keep_alive_interval,
            )
        return json_response(await while_connected(request.receive, context.stopping, chat.whole()))


class Chat:
    """One request. Raises ApiError for what can be refused without rendering the prompt."""

    def __init__(self, context: Context, body: ChatRequest, handover: Handover, names: Names) -> None:
        self._context, self._body, self._handover = context, body, handover
        self._head = {
            "id": names.answer,
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": context.model(body.model),
        }
        self._asked = ChatWork(context, body, handover, names.engine)

    async def whole(self) -> dict[str, Any]:
        """The answer, once everything is generated that is wanted."""
        usage = Usage()
        work = await self._asked.work()
        turns = self._asked.turns(work)
        [output] = await complete(self._context, [work], turns.see)
        usage.see(0, output)
        choices = [
            self._choice(delta, {"message": turns.message(delta.choice.index)}, turns)
            for delta in whole_deltas(0, output)
        ]
        answer: dict[str, Any] = {**self._head, "choices": choices, "usage": usage.body()}
        answer["kv_transfer_params"] = output.kv_transfer_params
        if self._body.prompt_logprobs is not None:
            answer["prompt_logprobs"] = prompt_logprobs_body(output.prompt_logprobs or [])
        return answer

    async def stream(self) -> AsyncGenerator[dict[str, Any], None]:
        """The answer in chunks, as it is generated; each choice begins with its role."""
        usage = Usage()
        every_token = self._body.return_token_ids or self._body.logprobs
        work = await self._asked.work()
        turns = self._asked.turns(work)
        async with aclosing(deltas(generate(self._context, [work]), usage, every_token)) as new:
            async for delta in new:
                turn = turns[delta.choice.index]
                if turn.done:
                    continue
                if delta.first:
                    yield self._plain_chunk(delta, {"role": "assistant", "content": ""})
                said = delta_bodies(turn.read(delta.choice))
                if not (said or every_token or delta.choice.finished or turn.done):
                    continue
                *before, last = said or [NOTHING]
                for piece in before:
                    yield self._plain_chunk(delta, piece)
                if delta.kv_transfer_params is not None:
                    self._handover.told()
                choice = self._choice(delta, {"delta": last}, turns)
                yield {**self._head, "choices": [choice], **transfer_body(delta)}
                if turns.done:
                    break
        if self._body.include_usage:
            yield {**self._head, "choices": [], "usage": usage.body()}

    def _plain_chunk(self, delta: Delta, said: dict[str, Any]) -> dict[str, Any]:
        choice = {"index": delta.choice.index, "delta": said, "logprobs": None, "finish_reason": None}
        return {**self._head, "choices": [choice]}

    def _choice(self, delta: Delta, content: dict[str, Any], turns: Turns) -> dict[str, Any]:
        choice = delta.choice
        logprobs = None
        if self._body.logprobs and choice.logprobs is not None:
            alternatives = self._body.top_logprobs or 0
            logprobs = {
                "content": token_logprobs(
                    choice.token_ids, choice.logprobs, alternatives, self._asked.tokenizer
                )
            }
        turn = turns[choice.index]
        answer = {
            "index": choice.index,
            **content,
            "logprobs": logprobs,
            "finish_reason": turn.finish_reason(choice),
            "stop_reason": None if turn.done else choice.stop_reason,
        }
        return {**answer, **token_ids_body(delta)} if self._body.return_token_ids else answer
