"""Requests and their outputs while they run."""

import time
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, Protocol

from glm_dcp_jax.cache.allocator import PageTable
from glm_dcp_jax.cache.prefix_cache import BlockKeys
from glm_dcp_jax.engine.detokenizer import Detokenizer
from glm_dcp_jax.engine.logit_rules import LogitRules
from glm_dcp_jax.engine.outputs import CompletionOutput, FinishReason, Logprob, RequestOutput
from glm_dcp_jax.engine.sampling_params import SamplingParams


class RemoteCache(Protocol):
    """A prompt's cache on another engine."""

    def begin(self, start: int, end: int) -> None:
        """Bring tokens start .. end - 1: the sequence has pages for them, and holds what is before."""

    def abandon(self) -> None:
        """It is not wanted any more."""


@dataclass(eq=False)
class Sequence:
    """One output of a request, and where it stands.

    tokens: prompt and output so far. limit: length at which it ends. seed: of its randomness. priority: lower runs
    first; arrival: then the earlier. leader: the sequence that computes the prompt they share. keys: of its full
    blocks, for the prefix cache, which know its tokens as of `extend_keys`. rules: what sampling needs the host for.

    computed: tokens that the cache holds or that a step under way puts there. in_flight: steps under way that will
    bring it tokens. slot: its place in the device's state while it runs; fed: whether that place knows its last token.
    scored: tokens whose successor's probability is known, or is being computed.
    remote: its prompt's cache on another engine, as long as it may be wanted. loading: whether it is on its way here.
    advanced, settled: blocks, and tokens, of which the prefix cache was told since it runs.
    promised, delivered: blocks up to which others wait for it, and up to which they need not any more. preemptions: how
    often it lost its pages. began: when a step first worked on it, by time.monotonic(); None while it waits for that.
    """

    index: int
    tokens: list[int]
    prompt_length: int
    limit: int
    seed: int
    params: SamplingParams
    detokenizer: Detokenizer | None = None
    priority: int = 0
    arrival: int = 0
    leader: "Sequence | None" = None
    keys: BlockKeys | None = None
    rules: LogitRules | None = None
    remote: "RemoteCache | None" = None
    loading: bool = False
    computed: int = 0
    in_flight: int = 0
    table: PageTable | None = None
    slot: int = -1
    fed: bool = False
    advanced: int = 0
    settled: int = 0
    promised: int = 0
    delivered: int = 0
    cached_tokens: int = 0
    scored: int = 0
    preemptions: int = 0
    began: float | None = None
    drafts: tuple[int, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: list[dict[int, Logprob]] = field(default_factory=list)
    prompt_logprobs: list[dict[int, Logprob] | None] = field(default_factory=list)
    cumulative_logprob: float = 0.0

    @property
    def output_ids(self) -> list[int]:
        """Sampled tokens so far."""
        return self.tokens[self.prompt_length :]

    @property
    def pages(self) -> Ids[int]:
        """Its pages, in the order of its tokens; none while it waits."""
        return () if self.table is None else self.table.pages

    @property
    def reports_prompt(self) -> bool:
        """Whether it tells how likely the prompt's tokens were: of a request's sequences, the first does."""
        return self.params.prompt_logprobs is not None and self.index == 0

    @property
    def prefilling(self) -> bool:
        """Whether more than the last token is still to be computed."""
        return len(self.tokens) - self.computed > 1

    def begin(self) -> None:
        """A step works on it now. Only the first time counts."""
        if self.began is None:
            self.began = time.monotonic()

    def extend_keys(self) -> None:
        """Tell the keys of the tokens that came since they were told last."""
        if self.keys is not None:
            self.keys.extend(self.tokens[len(self.keys.tokens) :])

    def append(self, token: int, eos: frozenset[int]) -> None:
        """Take a sampled token; end the sequence on a stop token, a stop string, or its length."""
        self.tokens.append(token)
        params = self.params
        if self.rules is not None:
            self.rules.append(token)
        is_stop = params.stop_token_ids is not None and token in params.stop_token_ids
        if is_stop or (token in eos and not params.ignore_eos):
            self.finish_reason, self.stop_reason = "stop", token if is_stop else None
        if self.detokenizer is not None and (self.finish_reason is None or params.include_stop_str_in_output):
            stop = self.detokenizer.push([token])
            if stop is not None and self.finish_reason is None:
                self.finish_reason, self.stop_reason = "stop", stop
        if self.finish_reason is None and len(self.tokens) >= self.limit:
            self.finish_reason = "length"

    def extent(self) -> "Extent":
        """How far it has come."""
        pieces = marks = 0
        if self.detokenizer is not None:
            if self.finish_reason is not None:
                self.detokenizer.finish()
            pieces, marks = len(self.detokenizer.pieces), len(self.detokenizer.marks)
        return Extent(
            self,
            len(self.tokens),
            pieces,
            marks,
            len(self.logprobs),
            self.cumulative_logprob,
            self.finish_reason,
            self.stop_reason,
        )


@dataclass(slots=True)  # a frozen one would take three times as long to make, and there is one a token
class Extent:
    """How far a sequence had come: ends of its lists, which only grow, and what else changes.

    tokens: prompt and output. pieces, marks: of the text.
    """

    sequence: Sequence
    tokens: int
    pieces: int
    marks: int
    logprobs: int
    cumulative_logprob: float
    finish_reason: FinishReason | None
    stop_reason: int | str | None

    def output(self) -> CompletionOutput:
        """What there was, in vLLM's shape."""
        sequence = self.sequence
        detokenizer = sequence.detokenizer
        wanted = sequence.params.logprobs is not None
        return CompletionOutput(
            index=sequence.index,
            text="" if detokenizer is None else "".join(detokenizer.pieces[: self.pieces]),
            token_ids=sequence.tokens[sequence.prompt_length : self.tokens],
            cumulative_logprob=self.cumulative_logprob if wanted else None,
            logprobs=sequence.logprobs[: self.logprobs] if wanted else None,
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            marks=[] if detokenizer is None else detokenizer.marks[: self.marks],
        )


@dataclass(eq=False)
class Request:
    """A prompt and the n sequences that continue it.

    leaves: whether its prompt's cache is kept for another engine; kv_transfer_params: what that one needs, once it is.
    error: why it failed, for whoever asked.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    sequences: list[Sequence]
    leaves: bool = False
    kv_transfer_params: dict[str, Any] | None = None
    error: str | None = None

    def progress(self) -> "Progress":
        """How far it has come."""
        first = self.sequences[0]
        extents = list(map(Sequence.extent, self.sequences))
        finished = None not in map(_finish_reason, extents)
        return Progress(self, extents, finished, len(first.prompt_logprobs), first.cached_tokens)


_finish_reason = attrgetter("finish_reason")


@dataclass(slots=True)
class Progress:
    """How far a request had come when a step was over. finished: whether all sequences had ended. prompt_logprobs: so
    many of them.

    It costs the same however long the request is. Its output may be read later and in any thread: what the engine adds
    meanwhile is not in it.
    """

    request: Request
    extents: list[Extent]
    finished: bool
    prompt_logprobs: int
    cached_tokens: int

    @property
    def request_id(self) -> str:
        """The request's."""
        return self.request.request_id

    def output(self) -> RequestOutput:
        """The request's outputs so far, copied, in vLLM's shape."""
        request = self.request
        first = request.sequences[0]
        scores = [None, *first.prompt_logprobs[: self.prompt_logprobs]]
        return RequestOutput(
            request_id=request.request_id,
            prompt=request.prompt,
            prompt_token_ids=request.prompt_token_ids,
            outputs=[extent.output() for extent in self.extents],
            finished=self.finished,
            prompt_logprobs=None if first.params.prompt_logprobs is None else scores,
            num_cached_tokens=self.cached_tokens,
            kv_transfer_params=request.kv_transfer_params if self.finished else None,
            error=request.error if self.finished else None,
            began=first.began,
        )
