"""POST /v1/responses, and what there is to say about responses that are past: nothing."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any

from fastapi import APIRouter, Response
from fastapi import Request as HttpRequest

from glm_dcp_jax.serve.chat_work import ChatWork
from glm_dcp_jax.serve.context import Context, context_of
from glm_dcp_jax.serve.deltas import Usage, deltas
from glm_dcp_jax.serve.disconnect import while_connected
from glm_dcp_jax.serve.errors import ApiError, json_response
from glm_dcp_jax.serve.event_stream import TypedEventStream
from glm_dcp_jax.serve.generation import Work, complete, generate
from glm_dcp_jax.serve.handover import Handover
from glm_dcp_jax.serve.logprobs import token_logprobs
from glm_dcp_jax.serve.request_names import Names, names_of
from glm_dcp_jax.serve.responses.body import ResponseBody, usage_body
from glm_dcp_jax.serve.responses.output import Event, Output
from glm_dcp_jax.serve.responses.request import ResponsesRequest
from glm_dcp_jax.serve.strict_json import StrictRoute
from glm_dcp_jax.serve.turns import Turns

router = APIRouter(route_class=StrictRoute)


@router.post("/v1/responses")
async def create_response(request: HttpRequest, body: ResponsesRequest) -> Response:
    """Go on with a conversation that comes whole."""
    context = context_of(request)
    handover = Handover(context.engine, body.kv_transfer_params)
    with handover.guarded():
        context.require_ready()
        answer = Answer(context, body, handover, names_of(request, "resp_", body.request_id))
        if body.stream:
            return TypedEventStream(
                answer.stream(),
                context.stopping,
                answer.failure,
                handover.call_off,
                context.settings.sse_keep_alive_interval,
            )
        return json_response(await while_connected(request.receive, context.stopping, answer.whole()))


@router.get("/v1/responses/{response_id}")
@router.get("/v1/responses/{response_id}/input_items")
@router.delete("/v1/responses/{response_id}")
@router.post("/v1/responses/{response_id}/cancel")
async def find_response(response_id: str) -> Response:
    """Responses are gone once they are answered."""
    raise ApiError(
        f"there is no response {response_id}: this server keeps none; close the connection to cancel one",
        404,
        "response_id",
    )


class Answer:
    """One request. Raises ApiError for what can be refused without rendering the prompt."""

    def __init__(self, context: Context, body: ResponsesRequest, handover: Handover, names: Names) -> None:
        self._context, self._body, self._handover, self._id = context, body, handover, names.answer
        self._model = context.model(body.model)
        self._asked = ChatWork(context, body.chat, handover, names.engine)
        if body.wants_logprobs and not self._asked.reading.tags_are_tokens:
            raise ApiError(
                "logprobs need a tokenizer in which tags such as </think> are tokens", param="include"
            )
        self._response: ResponseBody | None = None
        """None as long as it is not known what it will be asked for."""
        self._output: Output
        self._told = False
        """Whether a stream has begun to tell of it."""

    async def whole(self) -> dict[str, Any]:
        """The response, once it is complete."""
        usage = Usage()
        work, turns = await self._begin()
        [output] = await complete(self._context, [work], turns.see)
        usage.see(0, output)
        [choice] = output.outputs
        self._output.take(turns.parts(0), choice)
        self._output.end(choice)
        return self._ended(usage, turns[0].finish_reason(choice), output.kv_transfer_params)

    async def stream(self) -> AsyncGenerator[Event, None]:
        """The events of its life."""
        usage = Usage()
        work, [turn] = await self._begin()
        choice = offered = None
        async with aclosing(deltas(generate(self._context, [work]), usage, True)) as new:
            async for delta in new:
                for event in self._beginning():
                    yield event
                choice, offered = delta.choice, delta.kv_transfer_params
                for event in self._output.take(turn.read(choice), choice):
                    yield event
                if turn.done:
                    break
        assert choice is not None, "an engine that ends a request says so"
        for event in self._output.end(choice):
            yield event
        response = self._ended(usage, turn.finish_reason(choice), offered)
        self._handover.told()
        yield {"type": f"response.{response['status']}", "response": response}

    def failure(self, error: ApiError) -> list[Event]:
        """The events of an error once something was sent, if only a sign of life."""
        if self._response is None:
            detail = error.body["error"]
            return [
                {
                    "type": "error",
                    **{name: detail[name] for name in ("message", "param")},
                    "code": detail["type"],
                }
            ]
        events = [*self._beginning(), *self._output.end(None)]
        response = self._response.failed(self._output.items, error)
        return [*events, {"type": "response.failed", "response": response}]

    def _beginning(self) -> list[Event]:
        """The events that come before all others, once."""
        if self._told or self._response is None:
            return []
        self._told = True
        begun = self._response.begun()
        return [{"type": f"response.{name}", "response": begun} for name in ("created", "in_progress")]

    async def _begin(self) -> tuple[Work, Turns]:
        work = await self._asked.work()
        turns = self._asked.turns(work)
        scores = partial(
            token_logprobs, alternatives=self._body.top_logprobs, tokenizer=self._asked.tokenizer
        )
        self._output = Output(turns[0], scores if self._body.wants_logprobs else None)
        self._response = ResponseBody(self._id, self._model, self._body, work.params)
        return work, turns

    def _ended(
        self, usage: Usage, finish_reason: str | None, offered: dict[str, Any] | None
    ) -> dict[str, Any]:
        assert self._response is not None, "it has begun"
        thought = self._output.thought_tokens
        if not self._asked.reading.tags_are_tokens:  # so what was thought is counted anew
            thought = len(self._asked.tokenizer.encode(self._output.thought, add_special_tokens=False))
        counts = usage_body(usage.body(), thought)
        return self._response.ended(self._output.items, counts, finish_reason, offered)
