"""What lies between the end of a prompt on one engine and its first token on another, in parts."""

import argparse
import contextlib
import json
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from lib.transfer_child import Child
from lib.transfer_failures import MeasurementFailed, TransferFailed
from lib.transfer_flags import EngineLayout, transfer_settings

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.config import ConfigError, ModelConfig
from glm_dcp_jax.demo import tiny_model_directory
from glm_dcp_jax.engine.engine import Engine
from glm_dcp_jax.model.locate import locate_model

NEW_TOKENS = 9
"""Of a request on the consumer: the first, and some to time decode steps by."""
PARTS = ("relay", "wait", "open", "read", "confirm", "rest")
"""One after the other they are the hand-over."""
_FIRST_TOKEN = 32
"""Tokens below are left out of prompts: some are special."""
_LARGEST_CHUNK, _SMALLEST_CHUNK = 2048, 16

Row = dict[str, Any]


@dataclass(frozen=True)
class Said:
    """One request: its tokens, and when it was added and each of them came, of time.monotonic()."""

    tokens: list[int]
    added: float
    times: list[float]

    @property
    def first(self) -> float:
        """When the first token came."""
        return self.times[0]

    @property
    def step(self) -> float:
        """Seconds of a decode step."""
        return statistics.median(np.diff(self.times))


def measure(
    given: argparse.Namespace,
    transports: list[str],
    environ: Mapping[str, str],
    report: Callable[[Row], None],
    failed: Callable[[str, TransferFailed], None],
) -> None:
    """A row for each transport and prompt length. environ: of the producer's process.

    failed: told of a transport that failed; the others go on. Raises ConfigError for what the model or the machine
    cannot do, and MeasurementFailed.
    """
    directory = locate_model(given.model) if given.model else tiny_model_directory()
    model = ModelConfig.load(directory)
    if max(given.prompt_tokens) + NEW_TOKENS > model.max_position_embeddings:
        raise ConfigError(
            f"a prompt of {max(given.prompt_tokens)} tokens and {NEW_TOKENS} of output are more than the model's "
            f"{model.max_position_embeddings}; lower --prompt-tokens"
        )
    for transport in transports:
        settings = {
            side: json.dumps(_settings(given, layout, transport, f"kv_{side}"))
            for side, layout in (("producer", given.producer), ("consumer", given.consumer))
        }
        producer = Child("engine", str(directory), settings["producer"], environ=environ)
        with (
            contextlib.closing(producer),
            contextlib.closing(_engine(directory, settings["consumer"])) as consumer,
        ):
            producer.ready()
            rng = np.random.default_rng(0)
            try:
                for length in given.prompt_tokens:
                    prompts = rng.integers(
                        _FIRST_TOKEN, model.vocab_size, (given.repeat + 1, length)
                    ).tolist()
                    row = _middle([_hand_over(producer, consumer, prompt) for prompt in prompts][1:])
                    report({"transport": transport, "prompt_tokens": length} | row)
            except TransferFailed as error:
                failed(transport, error)


def _settings(given: argparse.Namespace, side: EngineLayout, transport: str, role: str) -> dict[str, Any]:
    """Of an engine for one request at a time. Steps are compiled for the prompts' own lengths."""
    layout, longest = side.layout, max(given.prompt_tokens) + NEW_TOKENS
    chunk = min(_LARGEST_CHUNK, max(_SMALLEST_CHUNK, *given.prompt_tokens))
    lengths = {_SMALLEST_CHUNK, *given.prompt_tokens}
    return {
        "tensor_parallel_size": side.tp,
        "decode_context_parallel_size": layout.world,
        "block_size": layout.block_size,
        "cp_kv_cache_interleave_size": layout.interleave,
        "dcp_indexer_shards": layout.index_shards,
        "max_model_len": longest,
        "max_num_seqs": 1,
        "max_num_batched_tokens": chunk,
        "precompile_token_paddings": sorted(length for length in lengths if length <= chunk),
        "num_gpu_blocks_override": 3 * layout.pages_for(longest),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "kv_transfer_config": transfer_settings(transport, given.piece_bytes, role),
    }


def _engine(directory: Path, settings: str) -> Engine:
    engine = LLM(str(directory), **json.loads(settings)).engine
    engine.runner.warm_up()
    return engine


def _hand_over(producer: Child, consumer: Engine, prompt: list[int]) -> Row:
    """Seconds of one hand-over and its parts; and of the same prompt without a producer."""
    left = producer.ask("prefill", prompt=prompt)
    brought = _say(consumer, prompt, left["params"])
    transfers = consumer.stats().transfers
    assert transfers is not None and transfers.received is not None
    phases = transfers.received.recent[-1]
    alone = _say(consumer, prompt, None)
    same = brought.tokens == alone.tokens or (
        brought.tokens == producer.ask("alone", prompt=prompt, tokens=NEW_TOKENS)["tokens"]
    )
    relay, whole = brought.added - left["done_at"], brought.first - left["done_at"]
    read = sum(phases[name] for name in ("wait", "open", "read", "confirm"))
    return phases | {
        "prefill": left["seconds"],
        "handover": whole,
        "relay": relay,
        "rest": whole - relay - read,
        "step": alone.step,
        "own_prefill": alone.first - alone.added,
        "same": same,
    }


def _middle(rows: list[Row]) -> Row:
    """The hand-over of median length with its parts, and medians of what is beside it.

    Two engines of different layouts may differ at a near tie; raises MeasurementFailed if most texts do.
    """
    middle = sorted(rows, key=lambda row: row["handover"])[len(rows) // 2]
    beside = {
        name: statistics.median(row[name] for row in rows) for name in ("prefill", "step", "own_prefill")
    }
    same = sum(row["same"] for row in rows)
    if 2 * same < len(rows):
        raise MeasurementFailed(
            f"only {same} of {len(rows)} prompts went on, when they were handed over, as they do on D or P alone"
        )
    return middle | beside | {"same": same, "every_handover": [row["handover"] for row in rows]}


def _say(engine: Engine, prompt: list[int], params: dict[str, Any] | None) -> Said:
    """Run one greedy request; params: where its cache is. Raises TransferFailed if it fails."""
    extra = None if params is None else {"kv_transfer_params": params}
    sampling = SamplingParams(temperature=0, max_tokens=NEW_TOKENS, ignore_eos=True, extra_args=extra)
    added = time.monotonic()
    engine.add_request("request", prompt, sampling)
    times: list[float] = []
    while True:
        for progress in engine.step():
            output = progress.output().outputs[0]
            times += [time.monotonic()] * (len(output.token_ids) - len(times))
            if output.finish_reason == "error":
                raise TransferFailed(f"a prompt of {len(prompt)} tokens was not continued; see the log")
            if progress.finished:
                return Said(output.token_ids, added, times)


def table(rows: list[Row]) -> str:
    """Markdown: milliseconds."""
    heads = [
        "transport",
        "prompt",
        "P's prefill",
        "hand-over",
        *(f"= {PARTS[0]}", *(f"+ {part}" for part in PARTS[1:])),
    ]
    heads += ["busy: pack", "fetch", "D's decode step", "D's own prefill", "same text"]
    names = ["prefill", "handover", *PARTS, "pack", "fetch", "step", "own_prefill"]
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    for row in rows:
        cells = [
            row["transport"],
            f"{row['prompt_tokens']:,}",
            *(f"{1e3 * row[name]:,.1f}" for name in names),
        ]
        cells.append(f"{row['same']} of {len(row['every_handover'])}")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)
