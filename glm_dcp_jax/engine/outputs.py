"""What comes back for a request: vLLM's `RequestOutput` and its parts."""

from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(slots=True)
class Logprob:
    """Natural log of one token's probability. rank: 1 is the likeliest token of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


class Mark(NamedTuple):
    """A token of SamplingParams.marked_token_ids. position: characters of the output's text before it."""

    position: int
    token_id: int


@dataclass(slots=True)
class CompletionOutput:
    """One continuation, as far as it has come.

    token_ids: the sampled tokens, a stop token included. text: what they say, the stop string or token left
    out (unless include_stop_str_in_output). logprobs: per token, {token id: Logprob} of the sampled token and
    the likeliest ones. finish_reason: None while it runs. stop_reason: the stop string or stop token id that
    ended it, None for an end-of-sequence token. marks: where marked_token_ids stood; text has nothing of them.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    marks: list[Mark] = field(default_factory=list)

    @property
    def finished(self) -> bool:
        """Whether no more tokens will come."""
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestOutput:
    """A prompt and all its continuations, as far as they have come. prompt: None if it came as token ids.

    prompt_logprobs: as of an output, of the prompt's tokens (None for the first); None if not asked for.
    num_cached_tokens: prompt tokens that were not computed, since the cache had them. kv_transfer_params: what another
    engine needs to go on from the prompt's cache; None unless it was asked for, and is held. error: why outputs ended
    with finish_reason error, in words for whoever asked; None if there is no more to say. began: when a step first
    worked on the prompt, by time.monotonic(); None before.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None
    began: float | None = None
