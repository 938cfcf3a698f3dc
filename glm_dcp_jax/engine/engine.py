"""The engine: requests in, steps run one after the other, outputs out. Not thread-safe; one caller steps it."""

import logging
from collections.abc import Sequence as Ids
from dataclasses import dataclass
from typing import Any

import numpy as np

from glm_dcp_jax.cache.capacity import capacity_lines
from glm_dcp_jax.config import ConfigError, EngineConfig, ModelConfig, SamplingDefaults, sampling_defaults
from glm_dcp_jax.engine.detokenizer import Detokenizer
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.engine.outputs import Logprob, RequestOutput
from glm_dcp_jax.engine.runner import Line, Runner
from glm_dcp_jax.engine.sampling import IDLE_ROW, Sampled, row_params, sample
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.scheduler import Scheduler, Work
from glm_dcp_jax.engine.sequence import Request, Sequence
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.model.locate import locate_model
from glm_dcp_jax.model.safetensors_reader import Checkpoint

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineStats:
    """Counts at one moment. cache_usage: 0 to 1. prompt_tokens, generation_tokens: totals since the start.

    cache_dtype: the record format in use.

    compiles_after_warm_up: programs compiled while serving; anything but 0 is a defect. exchanges: between DCP ranks.
    """

    running: int
    waiting: int
    cache_usage: float
    num_pages: int
    cache_dtype: str
    prompt_tokens: int
    generation_tokens: int
    compiles_after_warm_up: int
    exchanges: ExchangeTotals


class Engine:
    """Everything one mesh serves. Build with `from_config`; then add_request, step until nothing is unfinished."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        runner: Runner,
        tokenizer: Tokenizer | None,
        defaults: SamplingDefaults,
    ) -> None:
        """defaults: SamplingParams fields for requests that leave them open."""
        self.config, self.model_config, self.runner, self.tokenizer = config, model, runner, tokenizer
        self.sampling_defaults = defaults
        self.max_model_len = runner.max_model_len
        self.scheduler = Scheduler(
            runner.buckets, runner.layout, runner.num_pages, config.scheduler.max_num_seqs
        )
        self._eos = frozenset(model.eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._owner: dict[Sequence, Request] = {}
        self._prompt_tokens = self._generation_tokens = self._unseeded = 0
        _log.info("KV cache records: %s", runner.blueprint.formats)
        for line in capacity_lines(runner.num_pages, runner.layout, self.max_model_len):
            _log.info(line)

    @staticmethod
    def from_config(config: EngineConfig) -> "Engine":
        """Find the model, read its config and tokenizer, load its weights. Raises ValueError with what is wrong."""
        directory = locate_model(config.model)
        model = ModelConfig.load(directory, dict(config.hf_overrides), config.latent_norm_eps)
        tokenizer = None
        if not config.skip_tokenizer_init and (config.tokenizer or (directory / "tokenizer.json").exists()):
            tokenizer = Tokenizer.load(config.tokenizer or directory)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's vocab_size is {model.vocab_size}"
            )
        defaults = sampling_defaults(directory, config.generation_config)
        return Engine(config, model, Runner(config, model, Checkpoint.open(directory)), tokenizer, defaults)

    def add_request(
        self, request_id: str, prompt_token_ids: Ids[int], params: SamplingParams, prompt: str | None = None
    ) -> None:
        """Queue a request. Raises ValueError if it can never run (too long, unknown tokens, a duplicate id)."""
        ids = list(prompt_token_ids)
        self.check_prompt(ids)
        if params.stop_strings and self.tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is in use")
        limit = self.max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(ids) + params.max_tokens)
        seed = params.seed
        if seed is None:
            # Unseeded requests differ from one another, yet a rerun of the same program repeats itself.
            seed = self.config.seed + 0x9E3779B1 * self._unseeded
            self._unseeded += 1
        sequences = [
            Sequence(
                index=index,
                tokens=list(ids),
                prompt_length=len(ids),
                limit=limit,
                seed=seed + 0x85EBCA77 * index,
                params=params,
                detokenizer=Detokenizer(self.tokenizer, params)
                if self.tokenizer is not None and params.detokenize
                else None,
            )
            for index in range(params.n)
        ]
        request = Request(request_id, prompt, ids, sequences)
        self._requests[request_id] = request
        for sequence in sequences:
            self._owner[sequence] = request
            self.scheduler.add(sequence)
        self._prompt_tokens += len(ids)

    def check_prompt(self, ids: Ids[int]) -> None:
        """Raise ValueError unless these tokens can be a prompt: not empty, in the vocabulary, room for one more."""
        if not ids:
            raise ValueError("the prompt is empty; it needs at least one token")
        if len(ids) >= self.max_model_len:
            raise ValueError(
                f"This model's maximum context length is {self.max_model_len} tokens, but the prompt has {len(ids)}, "
                "which leaves no room for output"
            )
        self.check_tokens(ids)

    def check_tokens(self, ids: Ids[int]) -> None:
        """Raise ValueError for a token outside the vocabulary."""
        vocabulary = self.model_config.vocab_size
        wrong = next((token for token in ids if not 0 <= token < vocabulary), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is not in the vocabulary (0 to {vocabulary - 1})")

    def abort(self, request_id: str) -> RequestOutput | None:
        """End a request now and free its pages. Returns its last output, None if it is unknown or finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            sequence.finish_reason = sequence.finish_reason or "abort"
            self.scheduler.remove(sequence)
        return self._retire(request)

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to step."""
        return bool(self._requests)

    def step(self) -> list[RequestOutput]:
        """Run one step. Returns the outputs of requests that got tokens, cumulative."""
        work = self.scheduler.next()
        if work is None:
            return []
        lines = [
            Line(sequence.tokens[sequence.computed :][:chunk], sequence.computed, sequence.pages)
            for sequence, chunk in zip(work.sequences, work.chunks, strict=True)
        ]
        try:
            shape, out = self.runner.decode(lines) if work.kind == "decode" else self.runner.prefill(lines)
            finite = np.asarray(out.finite).reshape(shape.requests, shape.rows)
        except BaseException:  # an interrupt too
            self._fail_all()
            raise
        for row, (sequence, chunk) in enumerate(zip(work.sequences, work.chunks, strict=True)):
            sequence.computed += chunk
            if not finite[row, :chunk].all():
                self._fail(sequence)
        return self._take_tokens(work, out.logits)

    def stats(self) -> EngineStats:
        """Counts for metrics."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            cache_usage=self.scheduler.cache_usage,
            num_pages=self.runner.num_pages - 1,
            cache_dtype=self.runner.record.name,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            compiles_after_warm_up=self.runner.compiles.after_warm_up,
            exchanges=self.runner.exchanges.totals(),
        )

    def _take_tokens(self, work: Work, logits: Any) -> list[RequestOutput]:
        """Sample for every sequence whose last token was computed, and end those that are done."""
        ready = [
            (row, sequence)
            for row, sequence in enumerate(work.sequences)
            if sequence.computed == len(sequence.tokens) and sequence.finish_reason is None
        ]
        changed = [sequence for _, sequence in ready]
        changed += [sequence for sequence in work.sequences if sequence.finish_reason is not None]
        if ready:
            self._sample(ready, logits)
        requests = dict.fromkeys(self._owner[sequence] for sequence in changed)
        return [self._retire(request) if request.finished else request.output() for request in requests]

    def _sample(self, ready: list[tuple[int, Sequence]], logits: Any) -> None:
        rows = logits.shape[0]
        wanted = dict(ready)
        params = [
            (wanted[row].params, wanted[row].seed, len(wanted[row].output_ids)) if row in wanted else IDLE_ROW
            for row in range(rows)
        ]
        random = any(not sequence.params.greedy for _, sequence in ready)
        logprobs = any(sequence.params.logprobs is not None for _, sequence in ready)
        sampled = Sampled(
            *(
                None if part is None else np.asarray(part)
                for part in sample(logits, row_params(params, rows), random, logprobs)
            )
        )
        for row, sequence in ready:
            self._append(sequence, row, sampled)

    def _append(self, sequence: Sequence, row: int, sampled: Sampled) -> None:
        if not sampled.healthy[row]:
            self._fail(sequence)
            return
        token = int(sampled.token[row])
        if sequence.params.logprobs is not None:
            self._note_logprobs(sequence, row, token, sampled)
        sequence.append(token, self._eos)
        self._generation_tokens += 1
        if sequence.finish_reason is not None:
            self.scheduler.remove(sequence)

    def _fail(self, sequence: Sequence) -> None:
        """NaN would read as token 0, and its records are not in the cache: say that the request failed instead."""
        _log.error("request %s: the model's output is not finite", self._owner[sequence].request_id)
        sequence.finish_reason = "error"
        self.scheduler.remove(sequence)

    def _fail_all(self) -> None:
        """A failed step took the cache with it: end every request, so that none goes on without its records."""
        for request in list(self._requests.values()):
            for sequence in request.sequences:
                sequence.finish_reason = sequence.finish_reason or "error"
                self.scheduler.remove(sequence)
            self._retire(request)

    def _note_logprobs(self, sequence: Sequence, row: int, token: int, sampled: Sampled) -> None:
        name = (lambda _: None) if self.tokenizer is None else self.tokenizer.token_to_str
        entries = {token: Logprob(float(sampled.logprob[row]), int(sampled.rank[row]), name(token))}
        for rank in range(sequence.params.logprobs or 0):
            if rank >= sampled.top_tokens.shape[1]:
                break
            other = int(sampled.top_tokens[row, rank])
            entries.setdefault(other, Logprob(float(sampled.top_logprobs[row, rank]), rank + 1, name(other)))
        sequence.logprobs.append(entries)
        sequence.cumulative_logprob += float(sampled.logprob[row])

    def _retire(self, request: Request) -> RequestOutput:
        del self._requests[request.request_id]
        for sequence in request.sequences:
            del self._owner[sequence]
        return request.output()
