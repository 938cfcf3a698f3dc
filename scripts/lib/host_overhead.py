"""What a step costs the host: the real engine over a runner without a model, whose tokens are there at once.

Left out are the calls of jax (starting programs, moving arrays) and the server's threads. A step is cut where the
engine calls the scheduler and the runner, and nowhere else, so that measuring costs five looks at the clock.
"""

import time
from types import SimpleNamespace
from typing import Any

import numpy as np

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import CacheConfig, EngineConfig, ModelConfig, SchedulerConfig
from glm_dcp_jax.demo.description import VOCABULARY, describe
from glm_dcp_jax.demo.tokenizer import make_tokenizer
from glm_dcp_jax.engine.batch import Batch
from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.engine import Engine
from glm_dcp_jax.engine.exchange_stats import ExchangeTotals
from glm_dcp_jax.engine.rounds import Round
from glm_dcp_jax.engine.runner import Flight
from glm_dcp_jax.engine.sampling_params import SamplingParams
from glm_dcp_jax.engine.tokenizer import Tokenizer
from glm_dcp_jax.engine.work import Work

PARTS = ("schedule", "make_batch", "land")
"""Choosing the step's work; its arrays; taking its tokens and making outputs of them."""
_WARM_UP = 8
"""Decode steps that are not counted."""
_FIRST_TOKEN, _TOKENS = 32, 97
"""Which tokens are drawn: none of the special ones, and not the same one step after step."""


class FakeRunner:
    """As much of a Runner as an engine sees. Every request is brought one token a step."""

    def __init__(self, scheduler: SchedulerConfig, max_model_len: int, layout: Layout) -> None:
        self.layout, self.max_model_len = layout, max_model_len
        self.buckets = Buckets.of(scheduler, max_model_len, layout)
        self.num_pages = 1 + scheduler.max_num_seqs * (layout.pages_for(max_model_len) + 1)
        self.idle_slot = scheduler.max_num_seqs
        self.blueprint = SimpleNamespace(formats="none")
        self.record = SimpleNamespace(name="none")
        self.compiles = SimpleNamespace(after_warm_up=0)
        self.exchanges = SimpleNamespace(totals=ExchangeTotals)
        self.launched_at, self.launches = 0.0, 0

    def launch(self, batch: Batch, copies: Any = ()) -> Flight:
        """A step that is over already, of numpy arrays."""
        self.launched_at = time.thread_time()
        self.launches += 1
        lines, chunks = len(batch.decodes.slot), len(batch.lines.ends)
        token = _FIRST_TOKEN + self.launches % _TOKENS
        drawn = Round(
            decoded=np.full((lines, 1), token, np.int32),
            accepted=np.ones(lines, np.int32),
            drafts=np.zeros(lines, np.int32),
            first=np.full(chunks, token, np.int32),
            healthy=np.ones(lines + chunks, bool),
        )
        finite = np.ones(batch.shape.total_rows, bool)
        not_asked_for = dict.fromkeys(Flight._fields)
        return Flight(**not_asked_for | {"shape": batch.shape, "round": drawn, "finite": finite})


def measure(requests: int, prompt_len: int, steps: int, text: bool) -> dict[str, Any]:
    """`steps` decode steps of so many requests together, whose prompts are `prompt_len` tokens long.

    text: whether tokens are made text, as the server has it. In microseconds: medians of a step and its parts, per step
    and per 100 requests; the 99th percentile; and medians of the first and the last tenth of the steps, which tell
    whether a step's cost grows with the length of what was generated.
    """
    engine, runner = decoding_engine(requests, prompt_len, steps, text)
    parts = _decode(engine, runner, steps)
    whole = np.sum(list(parts.values()), axis=0)
    tenth = max(1, steps // 10)
    return {
        "requests": requests,
        "text": text,
        "steps": steps,
        **{f"{part}_us": float(np.median(times)) for part, times in parts.items()},
        "step_us": float(np.median(whole)),
        "step_us_per_100_requests": float(np.median(whole)) * 100 / requests,
        "p99_step_us": float(np.percentile(whole, 99)),
        "first_tenth_us": float(np.median(whole[:tenth])),
        "last_tenth_us": float(np.median(whole[-tenth:])),
    }


def _decode(engine: Engine, runner: FakeRunner, steps: int) -> dict[str, list[float]]:
    """Microseconds of each step by part, behind a few that are not counted."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    asked = chosen = 0.0
    choose = engine.scheduler.next

    def timed() -> Work:
        nonlocal asked, chosen
        asked = time.thread_time()
        work = choose()
        chosen = time.thread_time()
        return work

    engine.scheduler.next = timed  # type: ignore[method-assign]
    for step in range(-_WARM_UP, steps):
        began = time.thread_time()
        engine.step()
        ended, launched = time.thread_time(), runner.launched_at
        if step >= 0:
            parts = chosen - asked, launched - chosen, ended - launched + asked - began
            for part, seconds in zip(PARTS, parts, strict=True):
                times[part].append(1e6 * seconds)
    return times


def decoding_engine(requests: int, prompt_len: int, steps: int, text: bool) -> tuple[Engine, FakeRunner]:
    """An engine with the defaults of the command line whose requests all decode, and will for so many steps."""
    prefills = requests * (1 + prompt_len // SchedulerConfig.max_num_batched_tokens)
    output_len = prefills + steps + 2 * _WARM_UP
    max_model_len = prompt_len + output_len
    scheduler = SchedulerConfig(
        max_num_seqs=requests,
        max_model_len=max_model_len,
        max_num_batched_tokens=requests + SchedulerConfig.max_num_batched_tokens,
    )
    cache = CacheConfig()
    runner = FakeRunner(scheduler, max_model_len, Layout(cache.block_size))
    config = EngineConfig("none", cache=cache, scheduler=scheduler)
    model = ModelConfig.from_hf(describe([VOCABULARY - 1], 0))
    tokenizer = Tokenizer(make_tokenizer(VOCABULARY)) if text else None
    engine = Engine(config, model, runner, tokenizer, {})  # type: ignore[arg-type]
    params = SamplingParams(max_tokens=output_len, ignore_eos=True, detokenize=text)
    random = np.random.default_rng(0)
    for number in range(requests):
        engine.add_request(str(number), random.integers(VOCABULARY, size=prompt_len).tolist(), params)
    while len(engine.scheduler.waiting) or any(sequence.prefilling for sequence in engine.scheduler.running):
        engine.step()
    return engine, runner


def table(rows: list[dict[str, Any]]) -> str:
    """Microseconds as a Markdown table."""
    heads = [
        "requests",
        "text",
        *(part.replace("_", " ") for part in PARTS),
        "step",
        "per 100 requests",
        "P99",
    ]
    lines = [
        "| " + " | ".join([*heads, "first tenth", "last tenth"]) + " |",
        "|" + "---:|" * (len(heads) + 2),
    ]
    names = [f"{part}_us" for part in PARTS]
    names += ["step_us", "step_us_per_100_requests", "p99_step_us", "first_tenth_us", "last_tenth_us"]
    for row in rows:
        cells = [
            str(row["requests"]),
            "yes" if row["text"] else "no",
            *(f"{row[name]:,.0f}" for name in names),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
