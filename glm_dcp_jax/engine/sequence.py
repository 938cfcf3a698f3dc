"""Requests and their outputs while they run."""

from dataclasses import dataclass, field

from glm_dcp_jax.cache.allocator import PageTable
from glm_dcp_jax.engine.detokenizer import Detokenizer
from glm_dcp_jax.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from glm_dcp_jax.engine.sampling_params import SamplingParams


@dataclass(eq=False)
class Sequence:
    """One output of a request. tokens: prompt and output so far; computed: how many of them the cache holds.

    limit: length at which it ends. seed: of its randomness.
    """

    index: int
    tokens: list[int]
    prompt_length: int
    limit: int
    seed: int
    params: SamplingParams
    detokenizer: Detokenizer | None
    computed: int = 0
    table: PageTable | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    @property
    def output_ids(self) -> list[int]:
        """Sampled tokens so far."""
        return self.tokens[self.prompt_length :]

    @property
    def pages(self) -> list[int]:
        """Its pages, in the order of its tokens; none while it waits."""
        return [] if self.table is None else self.table.pages

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is still to be computed."""
        return len(self.tokens) - self.computed > 1 or self.computed == 0

    def append(self, token: int, eos: frozenset[int]) -> None:
        """Take a sampled token; end the sequence on a stop token, a stop string, or its length."""
        self.tokens.append(token)
        params = self.params
        is_stop = token in (params.stop_token_ids or ())
        if is_stop or (token in eos and not params.ignore_eos):
            self.finish_reason, self.stop_reason = "stop", token if is_stop else None
        if self.detokenizer is not None and (self.finish_reason is None or params.include_stop_str_in_output):
            stop = self.detokenizer.push([token])
            if stop is not None and self.finish_reason is None:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.finish_reason is None and len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def output(self) -> CompletionOutput:
        """What there is so far, in vLLM's shape."""
        text = ""
        if self.detokenizer is not None:
            text = self.detokenizer.finish() if self.finish_reason else self.detokenizer.text
        wanted = self.params.logprobs is not None
        return CompletionOutput(
            index=self.index,
            text=text,
            token_ids=self.output_ids,
            cumulative_logprob=self.cumulative_logprob if wanted else None,
            logprobs=list(self.logprobs) if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
        )


@dataclass(eq=False)
class Request:
    """A prompt and the n sequences that continue it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[Sequence]

    @property
    def finished(self) -> bool:
        """Whether all sequences have ended."""
        return all(sequence.finish_reason is not None for sequence in self.sequences)

    def output(self) -> RequestOutput:
        """The request's outputs so far."""
        return RequestOutput(
            request_id=self.request_id,
            prompt=self.prompt,
            prompt_token_ids=self.prompt_token_ids,
            outputs=[sequence.output() for sequence in self.sequences],
            finished=self.finished,
        )
