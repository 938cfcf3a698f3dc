"""The device side of an engine: weights, pools and compiled steps. Batches in, logits out."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from glm_dcp_jax import environment
from glm_dcp_jax.cache.capacity import check_max_model_len, resolve_max_model_len
from glm_dcp_jax.cache.pools import Pools, make_pools
from glm_dcp_jax.config import EngineConfig, ModelConfig
from glm_dcp_jax.config.quantisation import FP8_BLOCK, Quantisation
from glm_dcp_jax.engine.batch import Batch, BatchMaker, Line, make_block
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.compiles import CompileCounter
from glm_dcp_jax.engine.drafter import Drafter, shapes_behind
from glm_dcp_jax.engine.exchange_stats import ExchangeStats
from glm_dcp_jax.engine.grammars import mask_words
from glm_dcp_jax.engine.logit_rules import adjustment_sizes, no_adjustments
from glm_dcp_jax.engine.memory import check_exchange_memory, number_of_pages, pages_by_flags
from glm_dcp_jax.engine.page_copies import COPIES_AT_ONCE, page_copier
from glm_dcp_jax.engine.pool_access import State
from glm_dcp_jax.engine.prompt_scores import PromptScorer
from glm_dcp_jax.engine.rounds import DecodeRows, Round, Slots, decode_rows, draw, note_drafts
from glm_dcp_jax.engine.sampling import Scores, adjust, forbid, score
from glm_dcp_jax.engine.slot_columns import SlotColumns
from glm_dcp_jax.engine.steps import BlockShape, Kind, StepOutput, StepShape, leaves_of
from glm_dcp_jax.engine.warm_up import Compilation, compile_all
from glm_dcp_jax.engine.work import Work
from glm_dcp_jax.model.checksums import verify_checksums
from glm_dcp_jax.model.converted import ConvertedCheckpoint
from glm_dcp_jax.model.load import load_parameters
from glm_dcp_jax.model.restore import restore_parameters
from glm_dcp_jax.model.safetensors_reader import Checkpoint
from glm_dcp_jax.model.stored_weights import StoredWeights, WeightFormats
from glm_dcp_jax.parallel import processes
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.calibrate import measured_link
from glm_dcp_jax.parallel.mesh import make_mesh
from glm_dcp_jax.parallel.policy import as_table
from glm_dcp_jax.progress import progress
from glm_dcp_jax.transfer.packing import Caches

_log = logging.getLogger(__name__)


class Flight(NamedTuple):
    """What a step under way brings; arrays on the device, which nobody has waited for.

    finite: [T], rows without NaN or infinity. scores: of the drawn tokens, [M] rows, or None. drafts: n arrays [L] of
    what is guessed behind them, or None. prompt_scores: of the batch's scored rows, in blocks, or None.
    """

    shape: StepShape
    round: Round
    finite: Any
    scores: Scores | None
    drafts: tuple[Any, ...] | None
    prompt_scores: tuple[Scores, ...] | None


class Runner:
    """Owns the mesh, the parameters, the donated pools and the compiled steps. One thread at a time may run steps."""

    def __init__(
        self, config: EngineConfig, model: ModelConfig, checkpoint: Checkpoint | ConvertedCheckpoint
    ) -> None:
        check_max_model_len(config.scheduler.max_model_len, model)
        self.compiles = CompileCounter()
        stored = stored_weights(checkpoint, model, config)
        self.blueprint = _blueprint(config, model, stored)
        check_exchange_memory(config.parallel, self.blueprint.mesh)
        self.exchanges = ExchangeStats()
        self.mesh, self.layout, self.record = (
            self.blueprint.mesh,
            self.blueprint.layout,
            self.blueprint.record,
        )
        self.device_kind: str = self.mesh.devices.flat[0].device_kind
        self.steps = self.blueprint.steps
        cpu, mtp_layers = self.blueprint.on_cpu, self.blueprint.mtp_layers
        known = pages_by_flags(config.cache, model, self.layout, self.record, cpu, mtp_layers)
        if known is not None:  # better now than when the weights are loaded
            resolve_max_model_len(config.scheduler.max_model_len, model, known, self.layout)
        self.parameters = (
            restore_parameters(stored, self.blueprint.shape, self.mesh)
            if isinstance(stored, ConvertedCheckpoint)
            else load_parameters(stored, model, self.blueprint.shape, self.mesh)
        )
        self._leaves = leaves_of(self.parameters)
        pages = number_of_pages(
            config.cache,
            model,
            self.layout,
            self.record,
            self.mesh,
            lambda pages: self._workspace(config, model, pages),
            mtp_layers,
        )
        self.num_pages = processes.least(pages)
        self.max_model_len = resolve_max_model_len(
            config.scheduler.max_model_len, model, self.num_pages, self.layout
        )
        self.buckets = Buckets.of(
            config.scheduler, self.max_model_len, self.layout, self.blueprint.drafts_each
        )
        if self.layout.world > 1:
            _log.info("%s", self._prefill_paths())
            _log.info("%s", self._decode_paths())
        self._pool_shapes = self.blueprint.pools(self.num_pages)
        self._max_num_seqs = config.scheduler.max_num_seqs
        self._slots: Slots
        self.generation = 0
        self.pools: tuple[Pools, ...]
        self._copier = page_copier(self.mesh, self.layout)
        self._score_prompt = PromptScorer(self.mesh, self.blueprint.shape)
        self._drafter = None
        if drafts := self.blueprint.drafts_each:
            self._drafter = Drafter(self.blueprint, drafts, self.num_pages, self.parameters)
        self.reset_pools()
        self._vocab_size = model.vocab_size
        self._lock = threading.Lock()
        self._more: list[Compilation] = []

    def launch(self, batch: Batch, copies: Sequence[tuple[int, int]] = ()) -> Flight:
        """Start a step, and the drawing of its tokens. copies: pages (source, target) that are copied first."""
        with self._lock:
            try:
                return self._launch(batch, copies)
            except BaseException:  # an interrupt too
                # The donated pools may be gone; whoever called must forget what they held.
                self.reset_pools()
                raise

    def prefill(
        self, lines: Sequence[Line], all_logits: bool = False, capture: bool = False
    ) -> tuple[StepShape, StepOutput]:
        """Run chunks of prompts alone, and draw nothing. Logits: [requests, V] of last rows, or [requests * rows, V]
        of all rows."""
        rows = max(len(line.tokens) for line in lines)
        context = max(line.start + len(line.tokens) for line in lines)
        shape = self.buckets.prefill(len(lines), rows, context, all_logits, capture)
        (block,) = shape.blocks
        if all_logits:
            logit_rows = np.arange(shape.logits, dtype=np.int32)
        else:
            last = [len(line.tokens) - 1 for line in lines] + [0] * (block.requests - len(lines))
            logit_rows = np.arange(block.requests, dtype=np.int32) * block.rows + np.array(last, np.int32)
        with self._lock:
            try:
                return shape, self._run(shape, (make_block(block, lines),), logit_rows)
            except BaseException:
                self.reset_pools()
                raise

    def _launch(self, batch: Batch, copies: Sequence[tuple[int, int]]) -> Flight:
        self._copy_pages(copies)
        rows = decode_rows(self._slots, batch.decodes)
        decodes = Block(rows.tokens, rows.positions, batch.page_table) if batch.page_table.size else None
        blocks = tuple(block for block in (decodes, batch.chunks) if block is not None)
        out = self._run(batch.shape, blocks, batch.logit_rows)
        logits = out.logits if batch.masks is None else forbid(out.logits, batch.masks)
        if batch.adjustments is not None:
            logits = adjust(logits, batch.adjustments)
        found = self._draw(logits, batch, rows, batch.random, batch.filtered)
        scores = None
        if batch.logprobs:
            scores = score(out.logits, jnp.concatenate([found.decoded.reshape(-1), found.first]))
        of_prompts = None
        if batch.scored is not None:
            of_prompts = self._score_prompt(self._leaves, out.hidden, batch.scored)
        drafts = self._draft(batch, rows, found, out.hidden)
        return Flight(batch.shape, found, out.finite, scores, drafts, of_prompts)

    def _draft(self, batch: Batch, rows: DecodeRows, found: Round, hidden: Any) -> tuple[Any, ...] | None:
        if self._drafter is None:
            return None
        drafts = self._drafter.draft(self._leaves, batch, rows, found, hidden)
        if drafts is not None:
            self._slots = note_drafts(self._slots, batch.lines.slot, drafts)
        return drafts

    def _draw(self, logits: Any, batch: Batch, rows: DecodeRows, random: bool, filtered: bool) -> Round:
        found, self._slots = draw(
            logits, self._slots, batch.params, rows, batch.lines, random=random, filtered=filtered
        )
        return found

    def _copy_pages(self, copies: Sequence[tuple[int, int]]) -> None:
        for at in range(0, len(copies), COPIES_AT_ONCE):
            some = [*copies[at : at + COPIES_AT_ONCE], *[(0, 0)] * COPIES_AT_ONCE][:COPIES_AT_ONCE]
            pages = np.array(some, np.int32)
            self.pools = tuple(self._copier(part, pages) for part in self.pools)
            if self._drafter is not None:
                self._drafter.copy_pages(pages)

    def with_pools(self, change: Callable[[State], State | None]) -> None:
        """Start programs over the pools between two steps: `change` gets them, and may return others in their places.

        What fails resets them, unless it returned None before. From any thread.
        """
        with self._lock:
            state = self.pools, None if self._drafter is None else self._drafter.pools
            try:
                changed = change(state)
            except BaseException:
                if any(pool.is_deleted() for pool in jax.tree.leaves(state)):
                    self.reset_pools()
                raise
            if changed is not None:
                self.pools, of_drafts = changed
                if self._drafter is not None and of_drafts is not None:
                    self._drafter.pools = of_drafts

    def caches(self) -> Caches:
        """What of its caches travels to other engines."""
        mtp = self.blueprint.mtp_pools(self.num_pages) if self.blueprint.mtp_layers else None
        return Caches(self.mesh, self.layout, self.record, self._pool_shapes, mtp)

    def compile_too(self, compilations: Sequence[Compilation]) -> None:
        """Have more programs compiled at warm-up."""
        self._more += compilations

    def warm_up(self, stopped: Callable[[], bool] = lambda: False) -> None:
        """Compile every step serving can ask for, two at a time, with a progress bar; gives up when `stopped`."""
        began = time.perf_counter()
        shapes = self.buckets.all()
        compilations = self._compilations(shapes)
        if not compile_all(compilations, stopped):
            return
        processes.wait_for_all("compiled")  # what follows runs on the mesh, and some processes compile faster
        lines = {_lines_of(shape): shape for shape in shapes}
        for shape in progress("Compiling sampling", unit="program", steps=lines.values()):
            self._warm_up_sampling(shape)
        for rows in {shape.total_rows for shape in shapes if shape.blocks[-1].kind == "prefill"}:
            self._score_prompt.warm_up(self._leaves, rows)
        self._copy_pages([(0, 0)])
        self.compiles.mark_warm()
        _log.info("Compiled %d steps in %.1f s", len(compilations), time.perf_counter() - began)

    def _compilations(self, shapes: Sequence[StepShape]) -> list[Compilation]:
        """Of the steps, and of what drafts behind them."""
        steps: list[Compilation] = [
            functools.partial(self.steps.get, shape, self.parameters, self._pool_shapes) for shape in shapes
        ]
        if self._drafter is None:
            return steps + self._more
        behind = dict.fromkeys(each for shape in shapes for each in self._drafter.shapes(shape))
        return steps + [functools.partial(self._drafter.compile, each) for each in behind] + self._more

    def _decode_paths(self) -> str:
        """For the log: what each decode path would wait for in each bucket, and which is taken."""
        policy = self.blueprint.policy
        shapes = self._blocks("decode")
        buckets = [(shape.requests, shape.rows, shape.pages * self.layout.block_size) for shape in shapes]
        link = policy.link
        for block in shapes:
            rounds = policy.rounds(block.requests, block.rows, block.pages * self.layout.block_size)
            if rounds and self.blueprint.path(block) != "queries":
                _log.warning(
                    "--dcp-exchange-memory %d is too little for %d requests: each layer exchanges in %d rounds more",
                    self.blueprint.settings.exchange_bytes,
                    block.requests,
                    rounds,
                )
                break
        return (
            f"DCP decode: modelled wait for exchanges a step, by a latency of {1e6 * link.latency:.1f} us and "
            f"{link.bandwidth / 1e9:.1f} GB/s ({link.source})\n"
            + as_table(policy, self.blueprint.config.parallel.dcp_decode_path, buckets)
        )

    def _prefill_paths(self) -> str:
        """For the log: which contexts prefill gathers, and which stay where they are."""
        shapes = self._blocks("prefill")
        longest: dict[str, int] = {}
        for shape in shapes:
            path, context = self.blueprint.path(shape), shape.pages * self.layout.virtual_block
            longest[path] = max(longest.get(path, 0), context)
        return "DCP prefill: " + ", ".join(
            f"path {path} up to {context:,} tokens"
            for path, context in sorted(longest.items(), key=itemgetter(1))
        )

    def _blocks(self, kind: Kind) -> list[BlockShape]:
        """Shapes of all blocks of a kind that serving can ask for."""
        found = (block for shape in self.buckets.all() for block in shape.blocks)
        return list(dict.fromkeys(block for block in found if block.kind == kind))

    def reset_pools(self) -> None:
        """Start over with an empty, zeroed cache."""
        self.generation += 1
        self.pools = tuple(make_pools(shapes) for shapes in self._pool_shapes)
        if self._drafter is not None:
            self._drafter.reset()
        empty = Slots.empty(self._max_num_seqs, self.buckets.rows_each - 1)
        self._slots = jax.device_put(empty, NamedSharding(self.mesh, PartitionSpec()))

    @property
    def idle_slot(self) -> int:
        """The slot that belongs to no sequence."""
        return self._max_num_seqs

    def _workspace(self, config: EngineConfig, model: ModelConfig, pages: int) -> int:
        """Temporary bytes per device of the largest decode and prefill steps, compiled for a cache of `pages`."""
        longest = resolve_max_model_len(config.scheduler.max_model_len, model, pages, self.layout)
        drafts = self.blueprint.drafts_each
        buckets = Buckets.of(config.scheduler, longest, self.layout, drafts)
        placed, parameters = self.blueprint.pools(pages), self.blueprint.parameters()
        largest = (
            buckets.decode(config.scheduler.max_num_seqs, longest),
            buckets.prefill(1, buckets.largest_chunk, longest),
        )
        programs = [
            program for shape in largest for program in self.steps.compile(shape, parameters, placed).programs
        ]
        if drafts:
            mtp_pools = self.blueprint.mtp_pools(pages)
            programs += [
                self.blueprint.drafts.compile(behind, parameters, mtp_pools)
                for shape in largest
                for behind in shapes_behind(shape, drafts)
            ]
        return max(program.memory_analysis().temp_size_in_bytes for program in programs)

    def _warm_up_sampling(self, shape: StepShape) -> None:
        """Draw from zeros in every way that this shape's rows can be drawn from."""
        replicated = NamedSharding(self.mesh, PartitionSpec())
        logits = jax.device_put(np.zeros((shape.logits, self._vocab_size), np.float32), replicated)
        for size in adjustment_sizes(self._vocab_size):
            adjust(logits, no_adjustments(shape.logits, size, self._vocab_size))
        forbid(logits, np.full((shape.logits, mask_words(self._vocab_size)), -1, np.int32))
        batch = BatchMaker(SlotColumns(self._max_num_seqs, 0), self._vocab_size).make(Work(), shape)
        rows = decode_rows(self._slots, batch.decodes)
        for random, filtered in ((False, False), (True, False), (True, True)):
            found = self._draw(logits, batch, rows, random, filtered)
        score(logits, jnp.concatenate([found.decoded.reshape(-1), found.first]))
        if self._drafter is not None:
            drafts = self._drafter.warm_up(batch, rows, found)
            self._slots = note_drafts(self._slots, batch.lines.slot, drafts)

    def _run(self, shape: StepShape, blocks: tuple[Block, ...], logit_rows: np.ndarray) -> StepOutput:
        step = self.steps.get(shape, self.parameters, self.pools)
        out = step(self._leaves, self.pools, blocks, logit_rows)
        self.pools = out.pools
        if self.layout.world > 1 and shape.blocks[0].kind == "decode":
            estimate = self.blueprint.decode_estimate(shape.blocks[0])
            self.exchanges.add(estimate.path, estimate.received, out.moved, out.selection_hash)
        return out


def stored_weights(
    checkpoint: Checkpoint | ConvertedCheckpoint, model: ModelConfig, config: EngineConfig
) -> StoredWeights | ConvertedCheckpoint:
    """How the checkpoint stores its weights. Raises ConfigError if they are not quantised as the flags ask."""
    if isinstance(checkpoint, ConvertedCheckpoint):
        Quantisation.check(config.quantization, model.quantisation, checkpoint.kinds)
        if config.verify_checksums:
            checkpoint.verify_checksums()
        return checkpoint
    block = FP8_BLOCK if model.quantisation is None else model.quantisation.block
    stored = StoredWeights(checkpoint, block)
    Quantisation.check(config.quantization, model.quantisation, stored.kinds)
    if config.verify_checksums:
        verify_checksums(checkpoint.directory, checkpoint.files)
    return stored


def _blueprint(config: EngineConfig, model: ModelConfig, weights: WeightFormats) -> Blueprint:
    """With what the link between the devices was measured to do, where a choice rests on it."""
    blueprint = Blueprint(config, model, make_mesh(config.parallel), weights=weights)
    if blueprint.layout.world == 1:
        return blueprint
    choice = blueprint.transport
    _log.info("DCP transport: %s (%s)", choice.transport, choice.reason)
    if config.parallel.dcp_decode_path != "auto":
        return blueprint
    link = measured_link(blueprint.mesh, choice.transport, environment.cache_folder("links"))
    latency, bandwidth = processes.of_first(np.array([link.latency, link.bandwidth], np.float32)).tolist()
    return replace(blueprint, link=link._replace(latency=latency, bandwidth=bandwidth))


def _lines_of(shape: StepShape) -> tuple[tuple[str, int, int], ...]:
    """What the drawing of tokens depends on: lines and rows of the blocks."""
    return tuple((block.kind, block.requests, block.rows) for block in shape.blocks)
