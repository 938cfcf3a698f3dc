"""`echo` of /v1/completions: the prompt before its output, or alone."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.serve.deltas import Delta
from glm_dcp_jax.serve.generation import Outputs
from glm_dcp_jax.serve.logprobs import PromptLogprobs
from glm_dcp_jax.serve.protocol import Prompt


def with_prompt(
    delta: Delta, prompt: Prompt, tokenizer: Tokenizer | None
) -> tuple[str, list[int], PromptLogprobs | None]:
    """Text, tokens and (where both have them) logprobs of a choice's beginning, with the prompt before it."""
    choice = delta.choice
    logprobs = None
    if choice.logprobs is not None and delta.prompt_logprobs is not None:
        logprobs = [*delta.prompt_logprobs, *choice.logprobs]
    return _text(prompt, tokenizer) + choice.text, [*delta.prompt_token_ids, *choice.token_ids], logprobs


def _text(prompt: Prompt, tokenizer: Tokenizer | None) -> str:
    """The text as it came, or that of token ids: empty without a tokenizer, as the output's is."""
    if isinstance(prompt, str):
        return prompt
    return "" if tokenizer is None else tokenizer.decode(prompt, skip_special_tokens=False)


async def prompts_only(outputs: Outputs) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """Outputs without what was generated."""
    async with aclosing(outputs):
        async for place, output in outputs:
            yield place, without_output(output)


def without_output(output: RequestOutput) -> RequestOutput:
    """A prompt whose one generated token nobody asked for: computing the prompt cannot leave it out."""
    choices = [
        replace(
            choice,
            text="",
            token_ids=[],
            logprobs=None if choice.logprobs is None else [],
            finish_reason="length" if choice.finished else None,
            stop_reason=None,
        )
        for choice in output.outputs
    ]
    return replace(output, outputs=choices)
