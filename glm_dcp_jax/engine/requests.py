"""What is asked of an engine, checked, and made into sequences."""

import itertools
from collections.abc import Sequence as Ids

from glm_dcp_jax.cache.prefix_cache import PrefixCache
from glm_dcp_jax.config import EngineConfig, ModelConfig
from glm_dcp_jax.engine.detokenizer import Detokenizer
from glm_dcp_jax.engine.grammars import Grammar, Grammars
from glm_dcp_jax.engine.logit_rules import LogitRules, bad_word_tokens
from glm_dcp_jax.engine.sampling_params import ParameterError, SamplingParams, check_vocabulary
from glm_dcp_jax.engine.sequence import Request, Sequence
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.engine.waiting import check_priority

_NEXT_REQUEST, _NEXT_OUTPUT = 0x9E3779B1, 0x85EBCA77
"""Far apart, so that seeds of requests and of their outputs do not meet."""


class RequestMaker:
    """Makes requests for one engine. tokenizer: None for one that knows token ids only."""

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        tokenizer: Tokenizer | None,
        max_model_len: int,
        prefixes: PrefixCache,
    ) -> None:
        self._config, self._tokenizer, self._prefixes = config, tokenizer, prefixes
        self._max_model_len, self._vocab_size = max_model_len, model.vocab_size
        self._eos = frozenset(model.eos_token_ids)
        self._grammars = None if tokenizer is None else Grammars(tokenizer, self._eos, self._vocab_size)
        self._arrivals = itertools.count()
        self._unseeded = 0

    def check(self, ids: Ids[int], params: SamplingParams, priority: int) -> None:
        """Raise ValueError for a request that can never run."""
        self.check_prompt(ids)
        check_vocabulary(params, self._vocab_size)
        if params.stop_strings and self._tokenizer is None:
            raise ValueError("stop strings need a tokenizer, and this model has none; use stop_token_ids")
        check_priority(priority, self._config.scheduler.scheduling_policy)

    def prepare(self, params: SamplingParams) -> None:
        """Compile what the request's output must look like, which may take a while, if it was not compiled before.

        For any thread. Raises ParameterError if it cannot be.
        """
        self._grammar(params)

    def make(
        self,
        request_id: str,
        ids: list[int],
        params: SamplingParams,
        prompt: str | None,
        priority: int,
        cache_salt: str,
    ) -> Request:
        """A request that was checked, and its sequences."""
        limit = self._max_model_len
        if params.max_tokens is not None:
            limit = min(limit, len(ids) + params.max_tokens)
        seed = params.seed
        if seed is None:
            # Unseeded requests differ from one another, yet a rerun of the same program repeats itself.
            seed = self._config.seed + _NEXT_REQUEST * self._unseeded
            self._unseeded += 1
        sequences = [
            Sequence(
                index=index,
                tokens=list(ids),
                prompt_length=len(ids),
                limit=limit,
                seed=seed + _NEXT_OUTPUT * index,
                params=params,
                detokenizer=Detokenizer(self._tokenizer, params)
                if self._tokenizer is not None and params.detokenize
                else None,
                priority=priority,
                arrival=next(self._arrivals),
                keys=self._prefixes.keys(ids, cache_salt),
                rules=self._rules(ids, params),
            )
            for index in range(params.n)
        ]
        for follower in sequences[1:]:
            follower.leader = sequences[0]
        return Request(request_id, prompt, ids, sequences)

    def check_prompt(self, ids: Ids[int]) -> None:
        """Raise ValueError unless these tokens can be a prompt: not empty, in the vocabulary, room for one more."""
        if not ids:
            raise ValueError("the prompt is empty; it needs at least one token")
        if len(ids) >= self._max_model_len:
            raise ValueError(
                f"This model's maximum context length is {self._max_model_len} tokens, but the prompt has {len(ids)}, "
                "which leaves no room for output"
            )
        self.check_tokens(ids)

    def check_tokens(self, ids: Ids[int]) -> None:
        """Raise ValueError for a token outside the vocabulary."""
        wrong = next((token for token in ids if not 0 <= token < self._vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is not in the vocabulary (0 to {self._vocab_size - 1})")

    def _rules(self, ids: list[int], params: SamplingParams) -> LogitRules | None:
        if not params.changes_logits:
            return None
        words = (
            bad_word_tokens(params.bad_words, self._tokenizer) if params.bad_words and self._tokenizer else ()
        )
        return LogitRules(params, ids, self._eos, words, self._vocab_size, self._grammar(params))

    def _grammar(self, params: SamplingParams) -> Grammar | None:
        if params.structured_outputs is None:
            return None
        if self._grammars is None:
            raise ParameterError(
                "structured_outputs", "structured outputs need a tokenizer, and this model has none"
            )
        return self._grammars.compile(params.structured_outputs)
