"""How long a prompt and its output may be, and how much may be told about each token."""

from glm_dcp_jax.serve.errors import ApiError


def output_budget(
    prompt_tokens: int,
    requested: int | None,
    max_model_len: int,
    prompt_param: str,
    default: int | None = None,
) -> int:
    """The number of tokens to generate: what was asked for, else `default` as far as it fits (None: all there is).

    Raises ApiError 400, in vLLM's words, if the prompt leaves no room or less than was asked for.
    """
    if prompt_tokens == 0:
        raise ApiError("The prompt is empty; it must hold at least one token.", param=prompt_param)
    limit = f"This model's maximum context length is {max_model_len} tokens. However, "
    room = max_model_len - prompt_tokens
    if room < 1:
        raise ApiError(
            f"{limit}your prompt has {prompt_tokens} tokens, which leaves no room for an output. "
            "Please shorten the prompt.",
            param=prompt_param,
        )
    if requested is None:
        return room if default is None else min(room, default)
    if requested > room:
        raise ApiError(
            f"{limit}you requested {prompt_tokens + requested} tokens ({prompt_tokens} in the prompt, "
            f"{requested} for the output). Please shorten the prompt or lower max_tokens.",
            param="max_tokens",
        )
    return requested


def check_logprobs(param: str, requested: int | None, most: int) -> None:
    """Raises ApiError 400 for more alternatives per token than the server gives (--max-logprobs)."""
    if requested is not None and not 0 <= requested <= most:
        raise ApiError(f"{param} must be from 0 to {most} here, but is {requested}", param=param)
