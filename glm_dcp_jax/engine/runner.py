"""The device side of an engine: weights, pools and compiled steps. Batches in, logits out."""

import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from queue import Empty, SimpleQueue
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from tqdm import tqdm

from glm_dcp_jax import environment
from glm_dcp_jax.cache.capacity import resolve_max_model_len
from glm_dcp_jax.cache.pools import make_pools
from glm_dcp_jax.config import EngineConfig, ModelConfig
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.compiles import CompileCounter
from glm_dcp_jax.engine.exchange_stats import ExchangeStats
from glm_dcp_jax.engine.memory import check_exchange_memory, number_of_pages
from glm_dcp_jax.engine.sampling import row_params, sample
from glm_dcp_jax.engine.steps import StepOutput, StepShape, leaves_of
from glm_dcp_jax.model.load import load_parameters
from glm_dcp_jax.model.safetensors_reader import Checkpoint
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.calibrate import measured_link
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.parallel.policy import as_table

_log = logging.getLogger(__name__)

_COMPILE_THREADS = 2


class Line(NamedTuple):
    """One request's part of a step: its tokens, the position of the first, and its page table."""

    tokens: Sequence[int]
    start: int
    pages: Sequence[int]


class Runner:
    """Owns the mesh, the parameters, the donated pools and the compiled steps. One thread at a time may run steps."""

    def __init__(self, config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint) -> None:
        self.compiles = CompileCounter()
        self.blueprint = _blueprint(config, model)
        check_exchange_memory(config.parallel, self.blueprint.mesh)
        self.exchanges = ExchangeStats()
        self.mesh, self.layout, self.record = (
            self.blueprint.mesh,
            self.blueprint.layout,
            self.blueprint.record,
        )
        self.steps = self.blueprint.steps
        self.parameters = load_parameters(checkpoint, model, self.blueprint.shape, self.mesh)
        self._leaves = leaves_of(self.parameters)
        self.num_pages = number_of_pages(
            config.cache,
            model,
            self.layout,
            self.record,
            self.mesh,
            lambda pages: self._workspace(config, model, pages),
        )
        self.max_model_len = resolve_max_model_len(
            config.scheduler.max_model_len, model, self.num_pages, self.layout
        )
        self.buckets = Buckets.of(config.scheduler, self.max_model_len, self.layout)
        if self.layout.world > 1:
            _log.info("%s", self._prefill_paths())
            _log.info("%s", self._decode_paths())
        self._pool_shapes = self.blueprint.pools(self.num_pages)
        self.reset_pools()
        self._vocab_size = model.vocab_size
        self._lock = threading.Lock()

    def prefill(
        self, lines: Sequence[Line], all_logits: bool = False, capture: bool = False
    ) -> tuple[StepShape, StepOutput]:
        """Run chunks of prompts. Logits: [requests, V] of last rows, or [requests * rows, V] of all rows."""
        rows = max(len(line.tokens) for line in lines)
        context = max(line.start + len(line.tokens) for line in lines)
        shape = self.buckets.prefill(len(lines), rows, context, all_logits, capture)
        if all_logits:
            logit_rows = np.arange(shape.logits, dtype=np.int32)
        else:
            last = [len(line.tokens) - 1 for line in lines] + [0] * (shape.requests - len(lines))
            logit_rows = np.arange(shape.requests, dtype=np.int32) * shape.rows + np.array(last, np.int32)
        return shape, self._run(shape, lines, logit_rows)

    def decode(self, lines: Sequence[Line]) -> tuple[StepShape, StepOutput]:
        """Run one token of each line. Logits: [requests bucket, V], the lines' first."""
        shape = self.buckets.decode(len(lines), max(line.start + 1 for line in lines))
        out = self._run(shape, lines, np.arange(shape.logits, dtype=np.int32))
        if self.mesh.size > 1:
            estimate = self.blueprint.decode_estimate(shape)
            self.exchanges.add(estimate.path, estimate.received, out.moved, out.selection_hash)
        return shape, out

    def warm_up(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Compile every step serving can ask for, two at a time, with a progress bar; gives up when `stopped`."""
        began = time.perf_counter()
        shapes = self.buckets.all()
        compiled = self._compile_in_background(shapes, stopped)
        for _ in tqdm(shapes, desc="Compiling steps", unit="step"):
            failure = _next_of(compiled, stopped)
            if stopped():
                return
            if failure is not None:
                raise failure
        for rows in sorted({shape.logits for shape in shapes}):
            self._warm_up_sampling(rows)
        self.compiles.mark_warm()
        _log.info("Compiled %d steps in %.1f s", len(shapes), time.perf_counter() - began)

    def _compile_in_background(
        self, shapes: Sequence[StepShape], stopped: Callable[[], bool]
    ) -> "SimpleQueue[Exception | None]":
        """Start to compile; the queue gets one entry for each shape that is done, the exception of one that failed.

        In daemon threads: a process that is told to stop does not wait for a compilation.
        """
        waiting = iter(shapes)
        done: SimpleQueue[Exception | None] = SimpleQueue()

        def work() -> None:
            while not stopped() and (shape := next(waiting, None)) is not None:
                try:
                    self.steps.get(shape, self.parameters, self._pool_shapes)
                    done.put(None)
                except Exception as error:
                    done.put(error)

        for _ in range(_COMPILE_THREADS):
            threading.Thread(target=work, name="compile", daemon=True).start()
        return done

    def _decode_paths(self) -> str:
        """For the log: what each decode path would wait for in each bucket, and which is taken."""
        policy = self.blueprint.policy
        shapes = [shape for shape in self.buckets.all() if shape.kind == "decode"]
        buckets = [(shape.requests, shape.rows, shape.pages * self.layout.block_size) for shape in shapes]
        link = policy.link
        return (
            f"DCP decode: modelled wait for exchanges a step, by a latency of {1e6 * link.latency:.1f} us and "
            f"{link.bandwidth / 1e9:.1f} GB/s ({link.source})\n"
            + as_table(policy, self.blueprint.config.parallel.dcp_decode_path, buckets)
        )

    def _prefill_paths(self) -> str:
        """For the log: which contexts prefill gathers, and which stay where they are."""
        shapes = [shape for shape in self.buckets.all() if shape.kind == "prefill"]
        longest: dict[str, int] = {}
        for shape in shapes:
            path, context = self.blueprint.path(shape), shape.pages * self.layout.virtual_block
            longest[path] = max(longest.get(path, 0), context)
        return "DCP prefill: " + ", ".join(
            f"path {path} up to {context:,} tokens"
            for path, context in sorted(longest.items(), key=itemgetter(1))
        )

    def reset_pools(self) -> None:
        """Start over with an empty, zeroed cache."""
        self.pools = tuple(make_pools(shapes) for shapes in self._pool_shapes)

    def _workspace(self, config: EngineConfig, model: ModelConfig, pages: int) -> int:
        """Temporary bytes per device of the largest decode and prefill steps, compiled for a cache of `pages`."""
        longest = resolve_max_model_len(config.scheduler.max_model_len, model, pages, self.layout)
        buckets = Buckets.of(config.scheduler, longest, self.layout)
        placed, parameters = self.blueprint.pools(pages), self.blueprint.parameters()
        largest = (
            buckets.decode(config.scheduler.max_num_seqs, longest),
            buckets.prefill(1, buckets.largest_chunk, longest),
        )
        programs = [
            program for shape in largest for program in self.steps.compile(shape, parameters, placed).programs
        ]
        return max(program.memory_analysis().temp_size_in_bytes for program in programs)

    def _warm_up_sampling(self, rows: int) -> None:
        logits = jax.device_put(
            np.zeros((rows, self._vocab_size), np.float32), NamedSharding(self.mesh, PartitionSpec())
        )
        for random, logprobs in itertools.product((False, True), repeat=2):
            sample(logits, row_params([], rows), random, logprobs)

    def _run(self, shape: StepShape, lines: Sequence[Line], logit_rows: np.ndarray) -> StepOutput:
        with self._lock:
            step = self.steps.get(shape, self.parameters, self.pools)
            try:
                out = step(self._leaves, self.pools, make_block(shape, lines), logit_rows)
                self.pools = out.pools
            except BaseException:  # an interrupt too
                # The donated pools may be gone; whoever called must forget what they held.
                self.reset_pools()
                raise
        return out


def _blueprint(config: EngineConfig, model: ModelConfig) -> Blueprint:
    """With what the link between the devices was measured to do, where a choice rests on it."""
    blueprint = Blueprint(config, model, make_mesh(config.parallel))
    if blueprint.layout.world == 1:
        return blueprint
    choice = blueprint.transport
    _log.info("DCP transport: %s (%s)", choice.transport, choice.reason)
    if config.parallel.dcp_decode_path != "auto":
        return blueprint
    link = measured_link(blueprint.mesh, choice.transport, environment.cache_folder("links"))
    return replace(blueprint, link=link)


def _next_of(done: "SimpleQueue[Exception | None]", stopped: Callable[[], bool]) -> Exception | None:
    """The queue's next entry; None at once when `stopped`."""
    while not stopped():
        with contextlib.suppress(Empty):
            return done.get(timeout=0.1)
    return None


def make_block(shape: StepShape, lines: Sequence[Line]) -> Block:
    """Pad lines to a step's shape: position -1 and the null page behind what is real."""
    tokens = np.zeros((shape.requests, shape.rows), np.int32)
    positions = np.full((shape.requests, shape.rows), -1, np.int32)
    page_table = np.zeros((shape.requests, shape.pages), np.int32)
    for at, line in enumerate(lines):
        count, pages = len(line.tokens), min(len(line.pages), shape.pages)
        tokens[at, :count] = line.tokens
        positions[at, :count] = np.arange(line.start, line.start + count)
        page_table[at, :pages] = line.pages[:pages]
    return Block(tokens, positions, page_table)
