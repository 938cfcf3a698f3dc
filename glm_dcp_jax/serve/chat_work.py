"""What is done for a conversation before anything is generated, whichever endpoint asks."""

from glm_dcp_jax.serve.chat_prompt import chat_token_ids
from glm_dcp_jax.serve.context import Context
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.generation import Work
from glm_dcp_jax.serve.handover import Handover
from glm_dcp_jax.serve.limits import check_logprobs, output_budget
from glm_dcp_jax.serve.protocol import ChatRequest
from glm_dcp_jax.serve.turns import Reading, Turns


class ChatWork:
    """One conversation that is to go on. Raises ApiError for what can be refused without rendering the prompt.

    tokenizer: the model's. reading: how the outputs are read.
    """

    def __init__(self, context: Context, body: ChatRequest, handover: Handover, name: str) -> None:
        """name: the engine's, of the request."""
        self._context, self._body, self._handover, self._name = context, body, handover, name
        self.tokenizer = context.tokenizer("chat", body.called("messages"))
        self.reading = Reading(context.parsers, self.tokenizer, body)
        for field in ("top_logprobs", "prompt_logprobs"):
            check_logprobs(field, getattr(body, field), context.settings.max_logprobs)
        if body.top_logprobs and not body.logprobs:
            raise ApiError("top_logprobs needs logprobs to be true", param="top_logprobs")

    async def work(self) -> Work:
        """What the engine is to do. Raises ApiError 400."""
        body, engine = self._body, self._context.engine
        messages = body.called("messages")
        prompt = await chat_token_ids(
            self.tokenizer,
            body,
            self._context.settings.chat_template,
            body.add_special_tokens,
            engine.max_model_len,
            messages,
        )
        field = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
        max_tokens = output_budget(
            len(prompt), getattr(body, field), engine.max_model_len, messages, output_param=body.called(field)
        )
        params = body.sampling_params(
            engine.sampling_defaults,
            max_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            detokenize=True,
            marked_token_ids=self.reading.marked_token_ids,
            structured_outputs=self.reading.structured(prompt),
        )
        return Work(
            self._name,
            prompt,
            params,
            messages,
            self._handover,
            body.priority,
            body.cache_salt,
            self.reading.structured_by,
        )

    def turns(self, work: Work) -> Turns:
        """The turns that the work will bring."""
        return self.reading.turns(work.prompt, work.params.n)
