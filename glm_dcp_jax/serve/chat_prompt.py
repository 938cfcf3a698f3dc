"""From a conversation to the prompt's token ids."""

import asyncio
from functools import cache
from typing import Any, get_args

from glm_dcp_jax.engine.chat_template import ChatTemplate
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.conversation import Conversation, Effort, Thinking
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.limits import encode_within
from glm_dcp_jax.transfer.daemon_pool import DaemonPool

RENDER_SECONDS = 10.0
"""How long a template may take, its wait for a thread included."""
_THREADS = 2
_EFFORTS: tuple[str, ...] = get_args(Effort)
_NO_THOUGHT = ("none", "minimal")


async def chat_token_ids(
    tokenizer: Tokenizer,
    conversation: Conversation,
    template: str | None,
    add_special_tokens: bool,
    max_model_len: int,
    blame: str = "messages",
) -> list[int]:
    """Token ids of the rendered chat template (None: the checkpoint's). blame: the request's field of the messages.

    Raises ApiError 400 if rendering fails or takes too long, if the template has no place for the tools, or if the text
    is too long for the model.
    """
    # A template may loop for long and cannot be stopped: on threads of its own it delays only other templates.
    rendering = _pool().submit(lambda: _render(tokenizer, conversation, template))
    try:
        async with asyncio.timeout(RENDER_SECONDS):  # wait_for may lose that the client has gone
            text = await asyncio.wrap_future(rendering)
    except TimeoutError:
        raise ApiError("the chat template took too long on these messages", param=blame) from None
    except ValueError as error:  # ChatTemplateError among them
        raise ApiError(str(error), param=blame) from error
    return await asyncio.to_thread(encode_within, tokenizer, text, add_special_tokens, max_model_len, blame)


def _render(tokenizer: Tokenizer, conversation: Conversation, source: str | None) -> str:
    template = tokenizer.template(source)
    tools = conversation.offered_tools
    if tools and not template.reads("tools"):
        raise ApiError("the model's chat template has no place for tools", param="tools")
    return tokenizer.apply_chat_template(
        conversation.messages_for_template,
        source,
        conversation.add_generation_prompt,
        **({"tools": tools} if tools else {}),
        **_effort(conversation.reasoning_effort, template)
        | _thinking(conversation.thinking)
        | (conversation.chat_template_kwargs or {}),
    )


def _thinking(wanted: Thinking | None) -> dict[str, Any]:
    return {} if wanted is None else {"enable_thinking": wanted.type == "enabled"}


def _effort(wanted: str | None, template: ChatTemplate) -> dict[str, Any]:
    """The template's variables for an effort: thinking off, or the least effort from it upwards that it tells apart."""
    if wanted is None:
        return {}
    if wanted in _NO_THOUGHT:
        return {"reasoning_effort": wanted, "enable_thinking": False}
    upwards = _EFFORTS[_EFFORTS.index(wanted) :]
    return {"reasoning_effort": next(filter(template.knows, upwards), wanted)}


@cache
def _pool() -> DaemonPool:
    return DaemonPool(_THREADS, "chat-template")
