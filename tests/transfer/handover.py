"""Hand-overs between pairs of engines of all kinds, and what one engine alone says of the same prompts.

A *walk* is a list of prompts that one pair hands over one after the other: of one token, around the border of the
consumer's (virtual) block, of several pieces, with what the consumer has of them growing from nothing to everything.
"""

import contextlib
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from engine_process import EngineProcess
from engine_process import result as as_json

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.transfer.packing import PARTS

sys.path.append(str(Path(__file__).parents[1] / "engine"))

from tiny import SETTINGS, random_prompts

Settings = dict[str, Any]
Result = dict[str, Any]
LOGPROBS, NEW_TOKENS = 20, 12
TOLERANCE = 2e-4
_LONGEST = 200
DRAFTS = {"speculative_config": {"method": "mtp", "num_speculative_tokens": 3}}
IN_CHUNKS = {"max_num_batched_tokens": 16, "precompile_token_paddings": (16,)}


@dataclass(frozen=True)
class Pair:
    """Two engines' settings. one: of the engine that they are compared with. drafting: whether the model has an MTP
    layer. tolerance: of logprobs."""

    producer: Settings
    consumer: Settings
    one: Settings = field(default_factory=dict)
    drafting: bool = False
    tolerance: float = TOLERANCE

    @property
    def block(self) -> int:
        """Tokens of the consumer's block."""
        return virtual_block(self.consumer)


def sized(tp: int, dcp: int, **more: Any) -> Settings:
    """An engine of these sizes."""
    return {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp} | more


def virtual_block(settings: Mapping[str, Any]) -> int:
    """Tokens of a page."""
    return settings.get("block_size", SETTINGS["block_size"]) * settings.get(
        "decode_context_parallel_size", 1
    )


def with_room(settings: Settings, requests: int = 4) -> Settings:
    """The settings of an engine that has pages for so many of the longest requests."""
    pages = requests * -(-_LONGEST // virtual_block(settings)) + 1
    room = {"max_model_len": _LONGEST, "num_gpu_blocks_override": pages}
    return SETTINGS | {"precompile_token_paddings": (64,)} | room | settings


def transfers(role: str, connector: str, **extra: Any) -> Settings:
    """Small pieces, and deadlines that a busy machine keeps."""
    options = {"piece_bytes": 8192, "handshake_seconds": 60.0, "lease_seconds": 120.0} | extra
    config = {"kv_connector": connector, "kv_role": role, "kv_connector_extra_config": options}
    return {"kv_transfer_config": config}


def _named(producer: tuple[int, int], consumer: tuple[int, int]) -> str:
    return "P TP{}/DCP{} -> D TP{}/DCP{}".format(*producer, *consumer)


SEED = [
    ((4, 1), (4, 1)),
    ((2, 1), (4, 1)),
    ((4, 4), (4, 4)),
    ((4, 1), (4, 4)),
    ((4, 4), (4, 1)),
    ((2, 2), (4, 4)),
    ((2, 1), (4, 4)),
]
"""The sizes that others have shown."""
FURTHER = [
    ((8, 8), (4, 1)),
    ((4, 1), (8, 8)),
    ((4, 4), (6, 6)),
    ((4, 4), (6, 3)),
    ((6, 3), (4, 1)),
    ((4, 2), (4, 4)),
    ((4, 4), (4, 2)),
    ((4, 2), (6, 3)),
]
"""Sizes that do not divide one another, and parts of a mesh."""


def _with_records(name: str, tolerance: float) -> Pair:
    """Rounded records are compared with one engine's that are rounded likewise. How a prompt is cut into chunks does
    not matter to them: a token is encoded once. But sums in another order move a value by 1e-7, which now and then
    takes it to the next code; the tolerance is what a few such steps do to logprobs, and less than the likeliest tokens
    are apart."""
    records = {"kv_cache_dtype": name}
    return Pair(sized(4, 4) | records, sized(2, 2) | records, records, tolerance=tolerance)


PAIRS = {
    **{_named(p, d): Pair(sized(*p), sized(*d)) for p, d in (*SEED, *FURTHER)},
    "block 16 -> 64": Pair(sized(2, 2, block_size=16), sized(2, 2, block_size=64)),
    "block 64 -> 16": Pair(sized(2, 1, block_size=64), sized(4, 4, block_size=16)),
    "interleave 1 -> block": Pair(sized(4, 4), sized(4, 4, cp_kv_cache_interleave_size=4)),
    "interleave block -> 1": Pair(sized(4, 4, cp_kv_cache_interleave_size=4), sized(2, 2)),
    "everything differs": Pair(
        sized(4, 2, block_size=8, cp_kv_cache_interleave_size=2, dcp_indexer_shards=2),
        sized(6, 6, cp_kv_cache_interleave_size=4, dcp_indexer_shards=3),
    ),
    "indexer shards 4 -> 1": Pair(sized(4, 4, dcp_indexer_shards=4), sized(4, 4)),
    "indexer shards 1 -> 3": Pair(sized(4, 4), sized(6, 6, dcp_indexer_shards=3)),
    "indexer shards 2 -> 4": Pair(sized(4, 4, dcp_indexer_shards=2), sized(4, 4, dcp_indexer_shards=4)),
    "chunks of 16 tokens on P": Pair(sized(4, 4, **IN_CHUNKS), sized(2, 2)),
    "drafts on both": Pair(sized(4, 4, **DRAFTS), sized(6, 3, **DRAFTS), drafting=True),
    "drafts on both, blocks 8 -> 4": Pair(
        sized(2, 1, block_size=8, **DRAFTS), sized(4, 4, **DRAFTS), drafting=True
    ),
    "drafts on P only": Pair(sized(4, 4, **DRAFTS), sized(2, 2), drafting=True),
    "bfloat16 records": _with_records("bfloat16", 0.002),
    "fp8 records": _with_records("fp8_ds_mla", 0.01),
    "nvfp4 records": _with_records("nvfp4_ds_mla", 0.01),
}


@dataclass(frozen=True)
class Step:
    """A prompt of a walk. known: of its tokens, how many the consumer has had before."""

    prompt: list[int]
    known: int = 0
    sampling: Mapping[str, Any] = field(default_factory=dict)

    def tokens_to_read(self, block: int) -> int:
        """What the consumer needs from its producer: all that it has no full block of, but for the last token."""
        rows = len(self.prompt) - 1
        known = min(self.known // block * block, rows)
        # A walk says again only what ends with a block that never filled: all of it is found, nothing is read.
        return 0 if self.known >= rows else rows - known


def walk(block: int, seed: int = 0) -> dict[str, Step]:
    """For a consumer with such a block. With seed 0 the two likeliest tokens are 2e-3 apart or more, everywhere and in
    every record format: no honest rounding draws another token."""
    one, below, just, above, long, other, drawn = random_prompts(
        1, block - 1, block, block + 1, 150, 20, 37, seed=seed
    )
    return {
        "one token": Step(one),
        "a block less one": Step(below),
        "a block": Step(just),
        "a block and one": Step(above),
        "long": Step(long),
        "known in part": Step(long[:140] + other, known=140),
        "known": Step(long, known=150),
        "drawn": Step(drawn, sampling={"temperature": 0.8, "seed": 11}),
    }


class Running(Protocol):
    """An engine, here or in a process of its own."""

    def add(self, prompt: list[int], params: dict[str, Any] | None = None, **sampling: Any) -> str:
        """Queue a request; its name."""

    def result(self, name: str) -> Result:
        """Wait for it."""


class EngineHere:
    """An engine in this process, used as an EngineProcess is; it steps while somebody waits for a result."""

    def __init__(self, llm: LLM) -> None:
        self.engine = llm.engine
        self._results: dict[str, Result] = {}
        self._names = itertools.count()

    def add(self, prompt: list[int], params: dict[str, Any] | None = None, **sampling: Any) -> str:
        """Queue a request; params are its kv_transfer_params."""
        name = str(next(self._names))
        extra = {"extra_args": {"kv_transfer_params": params}} if params else {}
        sampling = {"temperature": 0, "ignore_eos": True} | sampling | extra
        self.engine.add_request(name, prompt, SamplingParams(**sampling))
        return name

    def result(self, name: str) -> Result:
        """As EngineProcess has it, and prompt_logprobs."""
        while not self.is_done(name):
            self.step()
        return self._results.pop(name)

    def is_done(self, name: str) -> bool:
        """Whether `result` need not wait."""
        return name in self._results

    def step(self) -> None:
        """One of the engine's."""
        for progress in self.engine.step():
            if progress.finished:
                output = progress.output()
                scores = [
                    {str(token): entry.logprob for token, entry in entries.items()}
                    for entries in (output.prompt_logprobs or [])[1:]
                ]
                self._results[output.request_id] = as_json(output) | {"prompt_logprobs": scores}

    @property
    def sent_tokens(self) -> float:
        """Tokens whose rows it has handed over since the start."""
        caches = self.engine.runner.caches()
        sent = self.engine.connector.stats().sent.sent_bytes
        return sent / sum(caches.row_bytes(part) for part in PARTS)

    def wait_idle(self, seconds: float = 60.0) -> None:
        """Until it holds nothing for anybody. Raises AssertionError if that does not come."""
        deadline = time.monotonic() + seconds
        while self._is_busy():
            assert time.monotonic() < deadline, f"still held: {self.engine.connector.usage()}"
            self.step()
            time.sleep(0.002)
        self.engine.scheduler.allocator.check()

    def _is_busy(self) -> bool:
        connector = self.engine.connector
        goes_on = connector is not None and any(connector.usage().values())
        return goes_on or self.engine.has_unfinished or self.engine.scheduler.allocator.num_used > 0


@contextlib.contextmanager
def pair_here(model: Path, producer: Settings, consumer: Settings) -> Iterator[tuple[EngineHere, EngineHere]]:
    """Producer and consumer in this process."""
    with contextlib.ExitStack() as stack:
        engines = []
        for role, settings in (("kv_producer", producer), ("kv_consumer", consumer)):
            llm = LLM(str(model), **with_room(settings), **transfers(role, "inproc"))
            stack.callback(llm.engine.close)
            engines.append(EngineHere(llm))
        yield engines[0], engines[1]


@contextlib.contextmanager
def pair_of_processes(
    model: Path, producer: Settings, consumer: Settings, connector: str = "tcp"
) -> Iterator[tuple[EngineProcess, EngineProcess]]:
    """Producer and consumer in processes of their own."""
    with contextlib.ExitStack() as stack:
        processes = []
        for role, settings in (("kv_producer", producer), ("kv_consumer", consumer)):
            process = EngineProcess(model, **with_room(settings), **transfers(role, connector))
            stack.callback(process.close)
            processes.append(process)
        yield processes[0].wait_until_ready(), processes[1].wait_until_ready()


def ask(engine: Running, prompt: list[int], params: dict[str, Any] | None = None, **sampling: Any) -> str:
    """Queue a request whose logprobs can be compared."""
    return engine.add(prompt, params, **{"max_tokens": NEW_TOKENS, "logprobs": LOGPROBS} | sampling)


def ask_to_leave(producer: Running, prompt: list[int], **sampling: Any) -> str:
    """Queue a prompt whose cache is to be handed over."""
    return ask(producer, prompt, {"do_remote_decode": True}, **{"max_tokens": 1} | sampling)


def alone(one: Running, prompt: list[int], **sampling: Any) -> Result:
    """What one engine says."""
    return one.result(ask(one, prompt, **sampling))


def hand_over(
    producer: Running, consumer: Running, prompt: list[int], **sampling: Any
) -> tuple[Result, Result]:
    """What the producer said, and then the consumer."""
    drawing = {name: sampling[name] for name in ("temperature", "seed") if name in sampling}
    first = producer.result(ask_to_leave(producer, prompt, **drawing))
    assert first["kv_transfer_params"] is not None, first
    return first, consumer.result(ask(consumer, prompt, first["kv_transfer_params"], **sampling))


def check_same(found: Result, expected: Result, what: str, tolerance: float = TOLERANCE) -> None:
    """Raise AssertionError unless tokens are equal, and logprobs as good as equal."""
    assert found["all_token_ids"] == expected["all_token_ids"], what
    assert found["finish_reason"] == expected["finish_reason"], what
    check_logprobs(found["logprobs"], expected["logprobs"], what, tolerance)


def check_logprobs(
    found: list[dict[str, float]], expected: list[dict[str, float]], what: str, tolerance: float = TOLERANCE
) -> None:
    """Raise AssertionError unless all are within the tolerance. Of tokens that are as good as equally likely, either
    may be the last of the likeliest."""
    assert len(found) == len(expected), what
    for position, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        for token in ours.keys() | theirs.keys():
            pair = [entries.get(token, min(entries.values())) for entries in (ours, theirs)]
            away = abs(pair[0] - pair[1])
            assert away <= tolerance, f"{what}: position {position}, token {token}: {pair}, {away:.1e} apart"


def check_at_once(
    one: Running,
    producer: Running,
    consumer: Running,
    prompts: list[list[int]],
    tolerance: float = TOLERANCE,
    **sampling: Any,
) -> None:
    """All prompts are handed over side by side, and each is answered as one engine answers it."""
    firsts = [ask_to_leave(producer, prompt) for prompt in prompts]
    names = [
        ask(consumer, prompt, producer.result(first)["kv_transfer_params"], **sampling)
        for prompt, first in zip(prompts, firsts, strict=True)
    ]
    for prompt, name in zip(prompts, names, strict=True):
        expected = alone(one, prompt, **sampling)
        check_same(consumer.result(name), expected, f"{len(prompt)} tokens, at once", tolerance)
