"""The device side of an engine that drafts, driven by hand: steps of the main model, each followed by the MTP layer."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.pools import make_pools
from glm_dcp_jax.config import ModelConfig, engine_config
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.draft_steps import Draft, DraftOutput, DraftSteps, FirstShape, NextShape
from glm_dcp_jax.engine.steps import BlockShape, Kind, StepShape, leaves_of
from glm_dcp_jax.model.load import load_parameters
from glm_dcp_jax.model.safetensors_reader import Checkpoint
from glm_dcp_jax.model.stored_weights import StoredWeights
from glm_dcp_jax.parallel.batch import Block
from glm_dcp_jax.parallel.mesh import make_mesh

SETTINGS = {"dtype": "float32", "speculative_config": {"num_speculative_tokens": 3}}


class Part(NamedTuple):
    """A request's rows of a step: the first one's position, and tokens. following: the tokens behind the first rows, as
    many as are known and kept.
    """

    start: int
    tokens: list[int]
    following: list[int]


class Given(NamedTuple):
    """A block of all requests, `rows` each, of which those without a part are padding."""

    kind: Kind
    rows: int
    parts: Mapping[int, Part]


class Seen(NamedTuple):
    """By request: the main model's and the MTP layer's logits [rows, V], and its last row that has a following token.

    out: the MTP layer's, with a line for every row of all blocks.
    """

    logits: dict[int, np.ndarray]
    mtp_logits: dict[int, np.ndarray]
    last: dict[int, int]
    out: DraftOutput


@dataclass
class Drafting:
    """requests: how many, of at most `longest` tokens each, with pages of their own. settings: engine_config's."""

    directory: Path
    requests: int
    longest: int
    settings: Mapping[str, object]

    def __post_init__(self) -> None:
        config = engine_config(str(self.directory), **SETTINGS, **self.settings)
        model = ModelConfig.load(self.directory)
        self.blueprint = Blueprint(config, model, make_mesh(config.parallel))
        checkpoint, mesh = Checkpoint.open(self.directory), self.blueprint.mesh
        self.parameters = load_parameters(StoredWeights(checkpoint), model, self.blueprint.shape, mesh)
        self.leaves = leaves_of(self.parameters)
        self.pages = int(self.blueprint.layout.pages_for(self.longest))
        ids = 1 + np.arange(self.requests * self.pages, dtype=np.int32)
        self.page_table = ids.reshape(self.requests, self.pages)
        self.reset()

    def reset(self) -> None:
        """Empty all caches."""
        pages = 1 + self.page_table.size
        self.pools = tuple(make_pools(shapes) for shapes in self.blueprint.pools(pages))
        self.mtp_pools = make_pools(self.blueprint.mtp_pools(pages))

    def step(self, *blocks: Given) -> Seen:
        """One step of the main model and then of the MTP layer."""
        shapes = tuple(BlockShape(given.kind, self.requests, given.rows, self.pages) for given in blocks)
        rows = sum(shape.total_rows for shape in shapes)
        current, shifted = (tuple(parts) for parts in zip(*map(self._blocks, blocks), strict=True))
        every_row = np.arange(rows, dtype=np.int32)
        steps, drafts = self.blueprint.steps, self.blueprint.drafts
        main = steps.get(StepShape(shapes, rows), self.parameters, self.pools)
        done = main(self.leaves, self.pools, current, every_row)
        self.pools = done.pools
        first = drafts.first(FirstShape(shapes, rows, logits=True), self.parameters, self.mtp_pools)
        out = first(self.leaves, self.mtp_pools, shifted, done.hidden, every_row)
        self.mtp_pools = out.pools
        return self._seen(blocks, np.asarray(done.logits), out)

    def further(
        self, draft: Draft, requests: list[int], limits: list[int], share: bool = True
    ) -> DraftOutput:
        """One more draft of the lines of `draft`, which are of these requests; -1: of none, an idle line."""
        drafts = self.blueprint.drafts if share else self._selecting_anew
        wanted = NextShape(len(requests), self.pages, logits=True)
        another = drafts.next(wanted, self.parameters, self.mtp_pools)
        page_table = self.page_table[np.maximum(requests, 0)]
        given = draft if share else draft._replace(selection=None)
        out = another(self.leaves, self.mtp_pools, given, page_table, np.array(limits, np.int32))
        self.mtp_pools = out.pools
        return out

    def mtp_cache(self, request: int, length: int) -> list[np.ndarray]:
        """What the MTP layer's caches hold of a request's first positions: records and index keys, in their order."""
        layout = self.blueprint.layout.mtp_layout
        return [
            self._in_order(np.asarray(pool), own, request, length)
            for pool, own in zip(self.mtp_pools, (layout, layout.index_layout), strict=True)
        ]

    def _in_order(self, pool: np.ndarray, layout: Layout, request: int, length: int) -> np.ndarray:
        positions = np.arange(length)
        pages = self.page_table[request][layout.page_index(positions)]
        slots = layout.owner(positions) * (pool.shape[1] // layout.world) + layout.slot(positions, pages)
        return pool[0, slots]

    @cached_property
    def _selecting_anew(self) -> DraftSteps:
        """The same network's programs without index sharing."""
        blueprint = self.blueprint
        return DraftSteps(blueprint.mesh, blueprint.shape, blueprint.settings, blueprint.path, share=False)

    def _blocks(self, given: Given) -> tuple[Block, Block]:
        """As the main model takes it, and as the MTP layer does."""
        tokens = np.zeros((self.requests, given.rows), np.int32)
        positions = np.full_like(tokens, -1)
        following, kept = tokens.copy(), positions.copy()
        for request, part in given.parts.items():
            count, known = len(part.tokens), len(part.following)
            tokens[request, :count] = part.tokens
            positions[request, :count] = part.start + np.arange(count)
            following[request, :known] = part.following
            kept[request, :known] = positions[request, :known]
        # In an engine these come from the sampling before, and never leave the devices.
        on_devices = NamedSharding(self.blueprint.mesh, PartitionSpec())
        shifted = Block(*jax.device_put((following, kept), on_devices), self.page_table)
        return Block(tokens, positions, self.page_table), shifted

    def _seen(self, blocks: tuple[Given, ...], logits: np.ndarray, out: DraftOutput) -> Seen:
        seen, of_mtp, first = Seen({}, {}, {}, out), np.asarray(out.logits), 0
        for given in blocks:
            for request, part in given.parts.items():
                begin = first + request * given.rows
                known = begin + len(part.following)
                seen.logits[request] = logits[begin : begin + len(part.tokens)]
                seen.mtp_logits[request] = of_mtp[begin:known]
                seen.last[request] = known - 1
            first += self.requests * given.rows
        return seen


def lines_of(draft: Draft, rows: list[int]) -> Draft:
    """Some lines of a draft, in this order; -1 for an idle one."""
    at = np.array(rows)
    chosen: Draft = jax.tree.map(lambda part: np.asarray(part)[np.maximum(at, 0)], draft)
    return chosen._replace(positions=np.where(at < 0, -1, chosen.positions).astype(np.int32))
