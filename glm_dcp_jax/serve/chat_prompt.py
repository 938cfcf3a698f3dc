"""From a conversation to the prompt's token ids."""

from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.errors import ApiError
from glm_dcp_jax.serve.protocol import Conversation


def chat_token_ids(
    tokenizer: Tokenizer, conversation: Conversation, template: str | None, add_special_tokens: bool
) -> list[int]:
    """Token ids of the rendered chat template (None: the checkpoint's). Raises ApiError 400 if rendering fails."""
    messages = [message.for_template() for message in conversation.messages]
    try:
        text = tokenizer.apply_chat_template(
            messages, template, conversation.add_generation_prompt, **conversation.template_variables
        )
        return tokenizer.encode(text, add_special_tokens)
    except ValueError as error:  # ChatTemplateError among them
        raise ApiError(str(error), param="messages") from error
