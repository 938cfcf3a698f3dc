"""The engine: requests in, steps run one after the other, outputs out. Not thread-safe; one caller steps it."""

import logging
from collections import deque
from collections.abc import Sequence as Ids
from dataclasses import replace
from hashlib import sha256

from glm_dcp_jax.cache.allocator import PageAllocator
from glm_dcp_jax.cache.capacity import capacity_lines
from glm_dcp_jax.cache.prefix_cache import PrefixCache
from glm_dcp_jax.config import ConfigError, EngineConfig, ModelConfig, SamplingDefaults, sampling_defaults
from glm_dcp_jax.config.flags import option_of
from glm_dcp_jax.engine.batch import BatchMaker, shape_of
from glm_dcp_jax.engine.draft_stats import DraftStats
from glm_dcp_jax.engine.engine_stats import STEP_TOKENS, EngineStats
from glm_dcp_jax.engine.kv_connector import KVConnector, make_connector, wish_of
from glm_dcp_jax.engine.landing import Landed, Landing, land
from glm_dcp_jax.engine.outputs import Logprob
from glm_dcp_jax.engine.requests import RequestMaker
from glm_dcp_jax.engine.runner import Flight, Runner
from glm_dcp_jax.engine.sampling import Scores
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.scheduler import Scheduler
from glm_dcp_jax.engine.sequence import Progress, Request, Sequence
from glm_dcp_jax.engine.slot_columns import SlotColumns
from glm_dcp_jax.engine.tokenizer import Tokenizer, tokenizer_source
from glm_dcp_jax.engine.waiting import require_room
from glm_dcp_jax.engine.work import Work
from glm_dcp_jax.model.converted import ConvertedCheckpoint, open_checkpoint
from glm_dcp_jax.model.locate import locate_model
from glm_dcp_jax.model.safetensors_reader import Checkpoint
from glm_dcp_jax.parallel import processes
from glm_dcp_jax.transfer.references import Wish
from glm_dcp_jax.transfer.transfer_stats import Distribution

_log = logging.getLogger(__name__)
_IDLE_SECONDS = 0.02
"""How long a step waits where nothing can run; whatever comes ends it."""


class Engine:
    """Everything one mesh serves. Build with `from_config`; then add_request, step until nothing is unfinished."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        runner: Runner,
        tokenizer: Tokenizer | None,
        defaults: SamplingDefaults,
        checkpoint: Checkpoint | ConvertedCheckpoint | None = None,
    ) -> None:
        """defaults: SamplingParams fields for requests that leave them open. checkpoint: for engines that hand caches
        over, which must have the same weights."""
        self.config, self.model_config, self.runner, self.tokenizer = config, model, runner, tokenizer
        self.sampling_defaults = defaults
        self.max_model_len = runner.max_model_len
        allocator = PageAllocator(runner.num_pages)
        prefixes = PrefixCache(
            allocator,
            runner.layout,
            f"{config.model} {runner.blueprint.formats}",
            lookahead=int(runner.buckets.rows_each > 1),
            enabled=config.cache.enable_prefix_caching,
        )
        loads = 1 if config.transfer is None else config.transfer.integer("loads")
        self.scheduler = Scheduler(
            config.scheduler, runner.buckets, runner.layout, allocator, prefixes, loads
        )
        columns = SlotColumns(runner.idle_slot, runner.layout.pages_for(runner.max_model_len))
        page_tokens = runner.layout.virtual_block if self.scheduler.rows > 1 else None
        self._batches = BatchMaker(columns, model.vocab_size, page_tokens)
        self.connector = make_connector(config, model, runner, checkpoint)
        self._flights: deque[tuple[Work, Flight, list[int]]] = deque()
        self._ahead = 1 if config.scheduler.async_scheduling else 0
        self._maker = RequestMaker(config, model, tokenizer, self.max_model_len, prefixes)
        self._eos = frozenset(model.eos_token_ids)
        self._requests: dict[str, Request] = {}
        self._owner: dict[Sequence, Request] = {}
        self._prompt_tokens = self._generation_tokens = 0
        self._drafts = DraftStats.of(self.scheduler.rows - 1)
        self._step_tokens = Distribution(STEP_TOKENS)
        shards = config.parallel.dcp_indexer_shards
        _log.info("KV cache records: %s; indexer shards: %d", runner.blueprint.formats, shards)
        if ignored := config.parallel.without_effect:
            given = ", ".join(f"{option_of(name)} {value}" for name, value in ignored.items())
            _log.warning("no effect with --decode-context-parallel-size 1: %s", given)
        for line in capacity_lines(runner.num_pages, runner.layout, self.max_model_len):
            _log.info(line)

    @staticmethod
    def from_config(config: EngineConfig) -> "Engine":
        """Find the model, read its config and tokenizer, load its weights. Raises ValueError with what is wrong.

        With several processes it returns in all of them when each has called it.
        """
        processes.start(config.processes)
        directory = locate_model(config.model)
        model = ModelConfig.load(directory, dict(config.hf_overrides), config.latent_norm_eps)
        source = tokenizer_source(config, directory)
        tokenizer = None if source is None else Tokenizer.load(source)
        if tokenizer is not None and tokenizer.vocab_size > model.vocab_size:
            raise ConfigError(
                f"the tokenizer has {tokenizer.vocab_size} tokens, but the model's vocab_size is {model.vocab_size}"
            )
        defaults = sampling_defaults(directory, config.generation_config)
        _check_alike(config, model, defaults)
        checkpoint = open_checkpoint(directory)
        return Engine(config, model, Runner(config, model, checkpoint), tokenizer, defaults, checkpoint)

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: Ids[int],
        params: SamplingParams,
        prompt: str | None = None,
        priority: int = 0,
        cache_salt: str = "",
    ) -> None:
        """Queue a request. priority: lower runs first, with that policy. cache_salt: only equal ones share a cache.

        Raises ValueError if it can never run (too long, unknown tokens, a duplicate id), QueueFull if too much waits.
        """
        wish, ids = wish_of(params, self.connector), list(prompt_token_ids)
        try:
            self._maker.check(ids, params, priority)
            if request_id in self._requests:
                raise ValueError(f"request id {request_id!r} is in use")
            self._add(self._maker.make(request_id, ids, params, prompt, priority, cache_salt), wish)
        except Exception:
            if wish.brings is not None and self.connector is not None:
                self.connector.drop(wish.brings)
            raise

    def _add(self, request: Request, wish: Wish) -> None:
        if self.config.scheduler.limits_queue:
            waiting = {self._owner[sequence] for sequence in self.scheduler.waiting}
            require_room(self.config.scheduler, waiting, len(request.prompt_token_ids))
        request.leaves = wish.leaves
        if wish.brings is not None and self.connector is not None:
            self.connector.bring(request, wish.brings)
        self._requests[request.request_id] = request
        for sequence in request.sequences:
            self._owner[sequence] = request
            self.scheduler.add(sequence)
        self._prompt_tokens += len(request.prompt_token_ids)

    def prepare(self, params: SamplingParams) -> None:
        """Do what takes long about a request before it is added, so that no step waits for it. For any thread.

        Raises ParameterError for structured outputs that cannot be compiled.
        """
        self._maker.prepare(params)

    def check_prompt(self, ids: Ids[int]) -> None:
        """Raise ValueError unless these tokens can be a prompt: not empty, in the vocabulary, room for one more."""
        self._maker.check_prompt(ids)

    def check_tokens(self, ids: Ids[int]) -> None:
        """Raise ValueError for a token outside the vocabulary."""
        self._maker.check_tokens(ids)

    def abort(self, request_id: str) -> Progress | None:
        """End a request now and free its pages. Returns how far it came, None if it is unknown or finished."""
        request = self._requests.get(request_id)
        if request is None:
            return None
        for sequence in request.sequences:
            sequence.finish_reason = sequence.finish_reason or "abort"
            self.scheduler.remove(sequence)
        self._retire(request)
        return request.progress()

    @property
    def generation_tokens(self) -> int:
        """Tokens that were drawn for requests since the start."""
        return self._generation_tokens

    @property
    def has_unfinished(self) -> bool:
        """Whether there is anything to step."""
        return bool(
            self._requests or self._flights or (self.connector is not None and self.connector.has_events)
        )

    def step(self) -> list[Progress]:
        """Start a step, and take what the one before it brought. Returns how far the requests that changed have come.

        Where sampling needs all earlier tokens, or without --async-scheduling, nothing is started ahead.
        """
        changed: dict[Request, None] = {}
        try:
            if self.connector is not None:
                self._take_arrivals(self.connector, changed)
            while self._flights and self._must_know_all():
                self._land(changed)
            work = self.scheduler.next()
            for sequence in work.loads:
                assert sequence.remote is not None
                sequence.remote.begin(sequence.computed, len(sequence.tokens) - 1)
            if not work.is_empty:
                self._launch(work)
            elif self.connector is not None and not self._flights and self._requests:
                self.connector.wait(_IDLE_SECONDS)  # nothing runs until something comes, or pages come back
            ahead = self._ahead if not work.is_empty else 0
            while len(self._flights) > ahead:
                self._land(changed)
        except BaseException:  # an interrupt too
            self._fail_all()
            raise
        progress = [request.progress() for request in changed]
        for each in progress:
            if each.finished:
                self._retire(each.request)
        return progress

    def _take_arrivals(self, connector: KVConnector, changed: dict[Request, None]) -> None:
        """Pages that others have read, and caches that have come from others."""
        for table in connector.returned():
            table.release()
        for sequence, failure in connector.arrivals():
            if failure is None:
                self.scheduler.loaded(sequence)
            elif connector.config.kv_load_failure_policy == "recompute":
                name = self._owner[sequence].request_id
                _log.warning(
                    "request %s: its prompt is computed here: its cache did not arrive: %s",
                    name,
                    failure,
                    extra={"request_id": name},
                )
                self.scheduler.not_loaded(sequence)
            else:
                name = self._owner[sequence].request_id
                _log.warning(
                    "request %s failed: its cache did not arrive: %s",
                    name,
                    failure,
                    extra={"request_id": name},
                )
                self._fail_request(sequence, f"the KV cache of its prompt did not arrive ({failure.kind})")
                changed[self._owner[sequence]] = None

    def _must_know_all(self) -> bool:
        return any(
            sequence.rules is not None and sequence.rules.needs_history for sequence in self.scheduler.running
        )

    def _launch(self, work: Work) -> None:
        shape = shape_of(work, self.runner.buckets)
        flight = self.runner.launch(self._batches.make(work, shape), work.copies)
        for sequence in work.drawing:
            sequence.fed = True
        self._flights.append((work, flight, [sequence.preemptions for sequence in work.sequences]))

    def _land(self, changed: dict[Request, None]) -> None:
        """Wait for the oldest step under way, and give its sequences what it brought them."""
        work, flight, preemptions = self._flights.popleft()
        landed, before = land(work, flight), self._generation_tokens
        for landing, epoch in zip(landed.landings, preemptions, strict=True):
            sequence = landing.sequence
            sequence.in_flight -= landing.draws
            if sequence.finish_reason is not None:  # it ended, or was aborted, when the step was under way
                continue
            if not landing.healthy:
                self._fail(sequence)
            else:
                self._take(landing, landed, kept=sequence.preemptions == epoch)
            if landing.draws or sequence.finish_reason is not None:
                changed[self._owner[sequence]] = None
        drawn = self._generation_tokens - before
        self._step_tokens.add(drawn + sum(chunk.count for chunk in work.chunks))

    def _take(self, landing: Landing, landed: Landed, kept: bool) -> None:
        """kept: whether the sequence still has the pages that the step wrote to."""
        sequence, scores = landing.sequence, landed.scores
        for token, row in landing.scored:
            assert landed.prompt_scores is not None and sequence.params.prompt_logprobs is not None
            count = sequence.params.prompt_logprobs
            sequence.prompt_logprobs.append(self._entries(landed.prompt_scores, row, token, count))
        if kept:
            sequence.computed += landing.decoded
        sequence.drafts = landing.drafts
        if landing.verified:
            self._drafts.count(landing.verified, landing.decoded - 1)
        for row, token in enumerate(landing.drawn, landing.first_row):
            if scores is not None and sequence.params.logprobs is not None:
                sequence.logprobs.append(self._entries(scores, row, token, sequence.params.logprobs))
                sequence.cumulative_logprob += float(scores.logprob[row])
            sequence.append(token, self._eos)
            self._generation_tokens += 1
            if sequence.finish_reason is not None:
                break
        if kept:
            self.scheduler.advance(sequence, len(sequence.tokens) - 1 if landing.end is None else landing.end)
        if sequence.finish_reason is not None:
            self._let_go(sequence)

    def _let_go(self, sequence: Sequence) -> None:
        """It has ended by itself. Its prompt's pages may be wanted elsewhere."""
        request = self._owner[sequence]
        is_computed = sequence.table is not None and sequence.computed >= sequence.prompt_length
        if not request.leaves or sequence.index or not is_computed or self.connector is None:
            self.scheduler.remove(sequence)
            return
        table = self.scheduler.keep(sequence)
        request.kv_transfer_params = self.connector.keep(request.request_id, sequence, table)

    def reset_prefix_cache(self) -> bool:
        """Forget what earlier requests computed. False if requests that run still hold some of it."""
        return self.scheduler.prefixes.reset()

    def stats(self) -> EngineStats:
        """Counts for metrics."""
        return EngineStats(
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            deferred=min(self.scheduler.deferred, len(self.scheduler.waiting)),
            cache_usage=self.scheduler.cache_usage,
            num_pages=self.runner.num_pages - 1,
            device_kind=self.runner.device_kind,
            cache_dtype=self.runner.record.name,
            prompt_tokens=self._prompt_tokens,
            generation_tokens=self._generation_tokens,
            step_tokens=self._step_tokens.copy(),
            preemptions=self.scheduler.preemptions,
            prefix_cache=replace(self.scheduler.prefixes.stats),
            drafts=replace(self._drafts, accepted_at=list(self._drafts.accepted_at)),
            compiles_after_warm_up=self.runner.compiles.after_warm_up,
            exchanges=self.runner.exchanges.totals(),
            transfers=None if self.connector is None else self.connector.stats(),
        )

    def wake(self) -> None:
        """Something was asked of the engine: a step that waits need not wait on. From any thread."""
        if self.connector is not None:
            self.connector.wake()

    def close(self) -> None:
        """End what goes on with other engines. The engine is of no use afterwards."""
        if self.connector is not None:
            self.connector.close()

    def _fail(self, sequence: Sequence) -> None:
        """NaN would read as token 0, and its records are not in the cache: say that the request failed instead."""
        request = self._owner[sequence]
        name, request.error = request.request_id, sequence.rules.failure if sequence.rules else None
        why = request.error or "the model's output is not finite"
        _log.error("request %s: %s", name, why, extra={"request_id": name})
        sequence.finish_reason = "error"
        self.scheduler.remove(sequence)

    def _fail_request(self, sequence: Sequence, why: str) -> None:
        """All sequences of its request: they were to share what failed. why: for whoever asked."""
        request = self._owner[sequence]
        request.error = why
        for each in request.sequences:
            each.finish_reason = each.finish_reason or "error"
            self.scheduler.remove(each)

    def _fail_all(self) -> None:
        """A failed step took the cache with it: end every request, so that none goes on without its records."""
        self._flights.clear()
        for request in list(self._requests.values()):
            for sequence in request.sequences:
                sequence.finish_reason = sequence.finish_reason or "error"
                self.scheduler.remove(sequence)
            self._retire(request)
        if self.connector is not None:
            self.connector.lose_caches()
        self.scheduler.prefixes.forget()

    def _entries(self, scores: Scores, row: int, token: int, count: int) -> dict[int, Logprob]:
        """A row's token and the `count` likeliest ones."""
        name = (lambda _: None) if self.tokenizer is None else self.tokenizer.token_to_str
        entries = {token: Logprob(float(scores.logprob[row]), int(scores.rank[row]), name(token))}
        for rank in range(min(count, scores.top_tokens.shape[1])):
            other = int(scores.top_tokens[row, rank])
            entries.setdefault(other, Logprob(float(scores.top_logprobs[row, rank]), rank + 1, name(other)))
        return entries

    def _retire(self, request: Request) -> None:
        del self._requests[request.request_id]
        for sequence in request.sequences:
            del self._owner[sequence]


def _check_alike(config: EngineConfig, model: ModelConfig, defaults: SamplingDefaults) -> None:
    """Raise ConfigError unless all processes are to build the same engine. Where the checkpoint lies may differ."""
    first = replace(config.processes, process_id=0)
    alike = replace(config, processes=first, model="", tokenizer=None)
    digest = sha256(repr((alike, model, sorted(defaults.items()))).encode()).digest()
    if others := processes.differs(digest):
        raise ConfigError(
            f"processes {', '.join(map(str, others))} were started with other flags, or another model, than process 0; "
            "give all of them the same but for --process-id"
        )
