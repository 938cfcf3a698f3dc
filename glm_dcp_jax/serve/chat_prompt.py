"""From a conversation to the prompt's token ids."""

import asyncio
from functools import cache, partial

from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.limits import encode_within
from glm_dcp_jax.serve.protocol import Conversation
from glm_dcp_jax.transfer.daemon_pool import DaemonPool

RENDER_SECONDS = 10.0
"""How long a template may take, its wait for a thread included."""
_THREADS = 2


async def chat_token_ids(
    tokenizer: Tokenizer,
    conversation: Conversation,
    template: str | None,
    add_special_tokens: bool,
    max_model_len: int,
) -> list[int]:
    """Token ids of the rendered chat template (None: the checkpoint's).

    Raises ApiError 400 if rendering fails or takes too long, or the text is too long for the model.
    """
    messages = [message.for_template() for message in conversation.messages]
    render = partial(
        tokenizer.apply_chat_template,
        messages,
        template,
        conversation.add_generation_prompt,
        **conversation.template_variables,
    )
    # A template may loop for long and cannot be stopped: on threads of its own it delays only other templates.
    try:
        text = await asyncio.wait_for(asyncio.wrap_future(_pool().submit(render)), RENDER_SECONDS)
    except TimeoutError:
        raise ApiError("the chat template took too long on these messages", param="messages") from None
    except ValueError as error:  # ChatTemplateError among them
        raise ApiError(str(error), param="messages") from error
    return await asyncio.to_thread(
        encode_within, tokenizer, text, add_special_tokens, max_model_len, "messages"
    )


@cache
def _pool() -> DaemonPool:
    return DaemonPool(_THREADS, "chat-template")
