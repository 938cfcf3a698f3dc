"""How long a prompt and its output may be, and how much may be told about each token."""

from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.errors import ApiError


def encode_within(
    tokenizer: Tokenizer, text: str, add_special_tokens: bool, max_model_len: int, param: str
) -> list[int]:
    """Token ids of a text. Raises ApiError 400 for text that is not Unicode, or surely too long for the model.

    Text beyond max_model_len of the longest token is refused unread: tokenizing megabytes takes seconds.
    """
    size = len(text.encode(errors="replace"))
    if size > max_model_len and size > max_model_len * tokenizer.longest_token_bytes:
        raise ApiError(
            f"{_limit(max_model_len)}your text of {size} bytes has more. Please shorten the {param}.",
            param=param,
        )
    try:
        return tokenizer.encode(text, add_special_tokens)
    except ValueError as error:
        raise ApiError(str(error), param=param) from error


def output_budget(
    prompt_tokens: int,
    requested: int | None,
    max_model_len: int,
    prompt_param: str,
    default: int | None = None,
    output_param: str = "max_tokens",
) -> int:
    """The number of tokens to generate: what was asked for, else `default` as far as it fits (None: all there is).

    Raises ApiError 400, in vLLM's words, if the prompt leaves no room or less than was asked for.
    """
    if prompt_tokens == 0:
        raise ApiError("The prompt is empty; it must hold at least one token.", param=prompt_param)
    limit = _limit(max_model_len)
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ApiError(
            f"{limit}your prompt has {prompt_tokens} tokens, which leaves no room for an output. "
            "Please shorten the prompt.",
            param=prompt_param,
        )
    if requested is None:
        return room if default is None else min(room, default)
    if requested < 1:
        raise ApiError(f"{output_param} must be an integer from 1, but is {requested}", param=output_param)
    if requested > room:
        raise ApiError(
            f"{limit}you requested {prompt_tokens + requested} tokens ({prompt_tokens} in the prompt, "
            f"{requested} for the output). Please shorten the prompt or lower {output_param}.",
            param=output_param,
        )
    return requested


def _limit(max_model_len: int) -> str:
    return f"This model's maximum context length is {max_model_len} tokens. However, "


def check_logprobs(param: str, requested: int | None, most: int) -> None:
    """Raises ApiError 400 for more alternatives per token than the server gives (--max-logprobs)."""
    if requested is not None and not 0 <= requested <= most:
        raise ApiError(f"{param} must be from 0 to {most} here, but is {requested}", param=param)
