"""Random requests to one engine: arrivals, aborts, lost pages, shared prefixes; each compared with itself alone."""

import random
import sys
from dataclasses import dataclass, field
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from tiny import CONFIG, generate

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.engine.outputs import RequestOutput
from glm_dcp_jax.engine.sampling import row_params

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from numpy_reference import NumpyReference

MARGIN = 1e-4
"""Decisions closer than this may fall either way: float32 rounds by where a row stands in its batch."""
MOST_TOKENS = 90
STOPS = (["a"], ["the", "o"], None, None)


@dataclass(frozen=True)
class Asked:
    """A request."""

    prompt: tuple[int, ...]
    params: SamplingParams
    priority: int


@dataclass
class Soak:
    """engine: the one under load. alone: a plain one, on the same checkpoint, that runs requests one at a time."""

    engine: LLM
    alone: LLM
    reference: NumpyReference
    seed: int
    live: dict[str, Asked] = field(default_factory=dict)
    ended: int = 0
    aborted: int = 0
    excused: int = 0
    added: int = 0
    hits: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        vocabulary = range(6, CONFIG["vocab_size"])
        self.prefixes = [self.random.choices(vocabulary, k=length) for length in (9, 16, 23, 40)]

    # ---- what may happen

    def arrive(self) -> None:
        """A new request, which may begin as others do."""
        pick = self.random
        prefix = pick.choice([[], *self.prefixes])
        tail = pick.choices(range(6, CONFIG["vocab_size"]), k=pick.choice([1, 2, 5, 12, 30]))
        prompt = [*prefix[: pick.choice([len(prefix), len(prefix) // 2])], *tail]
        params = SamplingParams(
            n=pick.choice([1, 1, 1, 2, 3]),
            temperature=pick.choice([0.0, 0.0, 0.8, 1.3]),
            top_p=pick.choice([1.0, 0.9]),
            top_k=pick.choice([0, 0, 20]),
            seed=pick.randrange(1000),
            max_tokens=pick.choice([1, 3, 8, 20, MOST_TOKENS - len(prompt)]),
            ignore_eos=pick.random() < 0.7,
            stop=pick.choice(STOPS),
            stop_token_ids=pick.choice([None, None, [pick.randrange(6, CONFIG["vocab_size"])]]),
            presence_penalty=pick.choice([0.0, 0.0, 0.0, 1.0]),
            min_tokens=pick.choice([0, 0, 1]),
            logprobs=pick.choice([None, None, 1]),
            prompt_logprobs=pick.choice([None, None, None, 0]),
        )
        priority = (
            pick.choice([0, 1, 2])
            if self.engine.engine.config.scheduler.scheduling_policy == "priority"
            else 0
        )
        name = str(self.added)
        self.engine.engine.add_request(name, prompt, params, priority=priority)
        self.live[name] = Asked(tuple(prompt), params, priority)
        self.added += 1

    def step(self) -> None:
        """One step; what it finishes is compared."""
        for progress in self.engine.engine.step():
            if progress.finished:
                self.compare(self.live.pop(progress.request_id), progress.output())

    def abort(self) -> None:
        """Somebody goes away, whatever becomes of the request just now."""
        if self.live:
            name = self.random.choice(sorted(self.live))
            self.engine.engine.abort(name)
            del self.live[name]
            self.aborted += 1

    def forget(self) -> None:
        """Drop what the prefix cache holds of ended requests."""
        self.engine.engine.reset_prefix_cache()

    def drain(self) -> None:
        """Until nothing is left; then nothing may be held."""
        while self.engine.engine.has_unfinished:
            self.step()
        assert not self.live
        scheduler = self.engine.engine.scheduler
        self.check()
        assert scheduler.allocator.num_used == 0 and self.engine.engine.stats().cache_usage == 0

    # ---- what must hold

    def check(self) -> None:
        """Page ids, references, and what the prefix cache says of pages agree."""
        self.engine.engine.scheduler.allocator.check()
        self.engine.engine.scheduler.prefixes.check()

    def compare(self, asked: Asked, found: RequestOutput) -> None:
        """An ended request against the same one alone."""
        (expected,) = generate(self.alone, [list(asked.prompt)], asked.params)
        self.ended += len(found.outputs)
        self.hits += found.num_cached_tokens
        for ours, theirs in zip(found.outputs, expected.outputs, strict=True):
            if ours.token_ids != theirs.token_ids:
                at = next(
                    (
                        at
                        for at, pair in enumerate(zip(ours.token_ids, theirs.token_ids, strict=False))
                        if len(set(pair)) > 1
                    ),
                    min(len(ours.token_ids), len(theirs.token_ids)),
                )
                drawn = [*ours.token_ids[at : at + 1], *theirs.token_ids[at : at + 1]]
                close = self.is_close(asked, ours.index, theirs.token_ids[:at], drawn)
                assert close, (asked, ours.token_ids, theirs.token_ids)
                self.excused += 1
                continue
            assert (ours.text, ours.finish_reason, ours.stop_reason) == (
                theirs.text,
                theirs.finish_reason,
                theirs.stop_reason,
            ), asked
            assert (ours.logprobs is None) == (theirs.logprobs is None)
            for one, other in zip(ours.logprobs or [], theirs.logprobs or [], strict=True):
                token = next(iter(other))
                assert abs(one[token].logprob - other[token].logprob) < 1e-3
        assert (found.prompt_logprobs is None) == (asked.params.prompt_logprobs is None)
        if found.prompt_logprobs is not None:
            assert len(found.prompt_logprobs) == len(asked.prompt)

    def is_close(self, asked: Asked, index: int, before: list[int], drawn: list[int]) -> bool:
        """Whether some decision up to the next token was so close that rounding may have made another one.

        drawn: the next tokens, of an output under load and of the same one alone.
        """
        forward = self.reference([*asked.prompt, *before])
        margins = [forward.index_margin.min(), forward.expert_margin.min()]
        params = asked.params
        if len(drawn) == 2 and not params.presence_penalty and len(before) >= params.min_tokens:
            scores = self.scores(asked, index, before)
            margins.append(abs(scores[drawn[0]] - scores[drawn[1]]))
        return min(margins) < MARGIN

    def scores(self, asked: Asked, index: int, before: list[int]) -> np.ndarray:
        """What the next token has the most of: a logit, or one over the temperature with the token's own noise."""
        logits = np.asarray(self.alone.compute_logits([*asked.prompt, *before])[-1])
        if asked.params.greedy:
            return logits
        (seed,) = row_params([(asked.params, asked.params.seed + 0x85EBCA77 * index, 0)], 1).seed
        key = jax.random.wrap_key_data(jnp.asarray(seed), impl="threefry2x32")
        noise = jax.random.gumbel(jax.random.fold_in(key, len(before)), logits.shape)
        return logits / asked.params.temperature + np.asarray(noise)

    def summary(self) -> str:
        """For a report."""
        stats = self.engine.engine.stats()
        return (
            f"{self.added} requests, {self.ended} outputs compared, {self.excused} excused, {self.aborted} aborted, "
            f"{stats.preemptions} preemptions, {self.hits} prompt tokens from the cache, "
            f"{stats.prefix_cache.evictions} evictions, drafts {stats.drafts.accepted} of {stats.drafts.proposed}"
        )
