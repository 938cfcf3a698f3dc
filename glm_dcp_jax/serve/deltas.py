"""From cumulative outputs to what is new in them, for streams, and to token counts."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from glm_dcp_jax.engine.outputs import CompletionOutput, RequestOutput
from glm_dcp_jax.serve.generation import Outputs
from glm_dcp_jax.serve.logprobs import PromptLogprobs


@dataclass
class Usage:
    """Token counts of a request, from the latest output of each of its prompts."""

    _counts: dict[int, tuple[int, int, int]] = field(default_factory=dict)

    def see(self, place: int, output: RequestOutput) -> None:
        """Note how far prompt number `place` has come."""
        generated = sum(len(choice.token_ids) for choice in output.outputs)
        self._counts[place] = (len(output.prompt_token_ids), generated, output.num_cached_tokens)

    def body(self) -> dict[str, Any]:
        """`usage` of an answer. cached_tokens: of the prompts, those that the prefix cache had."""
        prompt, completion, cached = map(sum, zip(*self._counts.values(), strict=True))
        return {
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": {"cached_tokens": cached},
        }


@dataclass(frozen=True)
class Delta:
    """What is new in one choice of prompt number `place`. first: nothing of this choice came before.

    kv_transfer_params: for another engine to go on from the prompt's cache; with the end of the prompt's last choice.
    """

    place: int
    choice: CompletionOutput
    prompt_token_ids: list[int]
    first: bool
    prompt_logprobs: PromptLogprobs | None = None
    kv_transfer_params: dict[str, Any] | None = None


async def deltas(outputs: Outputs, usage: Usage, every_token: bool) -> AsyncGenerator[Delta, None]:
    """The new parts of choices that are worth an event: new text or marks, an end, or (if every_token) new tokens."""
    cursors: dict[tuple[int, int], Cursor] = {}
    async with aclosing(outputs):
        async for place, output in outputs:
            usage.see(place, output)
            for choice in output.outputs:
                cursor = cursors.setdefault((place, choice.index), Cursor())
                if cursor.finished:
                    continue
                new = cursor.advance(choice)
                if new.text or new.marks or new.finished or (every_token and new.token_ids):
                    params = output.kv_transfer_params if new.finished else None
                    yield Delta(
                        place, new, output.prompt_token_ids, cursor.first, output.prompt_logprobs, params
                    )
                    cursor.first = False


def whole_deltas(place: int, output: RequestOutput) -> list[Delta]:
    """All choices of prompt number `place`, when nothing of them came before."""
    return [
        Delta(place, choice, output.prompt_token_ids, True, output.prompt_logprobs)
        for choice in output.outputs
    ]


@dataclass
class Cursor:
    """How much of one choice has been passed on."""

    characters: int = 0
    tokens: int = 0
    marks: int = 0
    finished: bool = False
    first: bool = True

    def advance(self, choice: CompletionOutput) -> CompletionOutput:
        """The same choice with only its new text, tokens, logprobs and marks."""
        new = CompletionOutput(
            index=choice.index,
            text=choice.text[self.characters :],
            token_ids=choice.token_ids[self.tokens :],
            logprobs=None if choice.logprobs is None else choice.logprobs[self.tokens :],
            finish_reason=choice.finish_reason,
            stop_reason=choice.stop_reason,
            marks=choice.marks[self.marks :],
        )
        self.marks = len(choice.marks)
        self.characters, self.tokens = len(choice.text), len(choice.token_ids)
        self.finished = choice.finished
        return new


def transfer_body(delta: Delta) -> dict[str, Any]:
    """vLLM's field of a stream's chunk, at its top, for whoever hands the prompt's cache to another engine."""
    return {} if delta.kv_transfer_params is None else {"kv_transfer_params": delta.kv_transfer_params}


def token_ids_body(delta: Delta) -> dict[str, Any]:
    """vLLM's `return_token_ids` fields of a choice: its tokens, and at its start the prompt's."""
    prompt = {"prompt_token_ids": delta.prompt_token_ids} if delta.first else {}
    return {**prompt, "token_ids": delta.choice.token_ids}
