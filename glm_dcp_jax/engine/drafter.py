"""Drafts behind each step: the MTP layer's caches, and the programs that fill them and guess tokens."""

from typing import Any

import numpy as np

from glm_dcp_jax.cache.pools import Pools, make_pools
from glm_dcp_jax.engine.batch import Batch, DraftLines
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.draft_steps import DraftShape, FirstShape, NextShape
from glm_dcp_jax.engine.page_copies import page_copier
from glm_dcp_jax.engine.rounds import DecodeRows, Round, rows_with_next_tokens
from glm_dcp_jax.engine.steps import StepShape
from glm_dcp_jax.parallel.batch import Block

_NO_ROWS = DecodeRows(*[np.zeros((0, 0), np.int32)] * 2)


class Drafter:
    """Owns the MTP layer's donated pools, whose pages have the ids of the main model's. count: drafts per sequence."""

    def __init__(self, blueprint: Blueprint, count: int, num_pages: int, parameters: Any) -> None:
        self.count = count
        self._steps, self._parameters = blueprint.drafts, parameters
        self._pool_shapes = blueprint.mtp_pools(num_pages)
        self._copier = page_copier(blueprint.mesh, blueprint.layout.mtp_layout)
        self.pools: Pools

    def shapes(self, step: StepShape) -> tuple[DraftShape, ...]:
        """What runs behind a step of this shape."""
        return shapes_behind(step, self.count)

    def compile(self, shape: DraftShape) -> None:
        """Compile a program, if it is not."""
        self._steps.get(shape, self._parameters, self._pool_shapes)

    def reset(self) -> None:
        """Start over with empty, zeroed caches."""
        self.pools = make_pools(self._pool_shapes)

    def copy_pages(self, pairs: Any) -> None:
        """As the main model's: [8, 2] int32 of source and target."""
        self.pools = self._copier(self.pools, pairs)

    def draft(
        self,
        leaves: tuple[Any, ...],
        batch: Batch,
        rows: DecodeRows,
        found: Round,
        hidden: Any,
    ) -> tuple[Any, ...] | None:
        """Run behind a step that drew `found`; nothing is waited for. hidden: [T, H], its rows', behind the final norm.

        Returns `count` arrays [L] int32, each line's drafts, -1 where there is none; None if no line wants any.
        """
        blocks, at = _blocks(batch, rows, found)
        first = self._steps.first(_first(batch.shape), self._parameters, self.pools)
        out = first(leaves, self.pools, blocks, hidden, at)
        self.pools = out.pools
        if not batch.draws:
            return None
        drafts = [out.draft.tokens]
        for _ in range(1, self.count):
            further = self._steps.next(_next(batch.shape), self._parameters, self.pools)
            out = further(leaves, self.pools, out.draft, *_lines(batch))
            self.pools = out.pools
            drafts.append(out.draft.tokens)
        return tuple(drafts)

    def warm_up(self, batch: Batch, rows: DecodeRows, found: Round) -> tuple[Any, ...]:
        """Compile what is around the programs, for a batch of this shape. Returns drafts as `draft` does."""
        _, at = _blocks(batch, rows, found)
        return (at,) * self.count


def shapes_behind(step: StepShape, count: int) -> tuple[DraftShape, ...]:
    """What makes `count` drafts behind a step."""
    return (_first(step),) if count == 1 else (_first(step), _next(step))


def _first(step: StepShape) -> FirstShape:
    return FirstShape(step.blocks, sum(block.requests for block in step.blocks))


def _next(step: StepShape) -> NextShape:
    return NextShape(_first(step).lines, max(block.pages for block in step.blocks))


def _blocks(batch: Batch, rows: DecodeRows, found: Round) -> tuple[tuple[Block, ...], Any]:
    """The step's blocks, each row with its next token, and each line's last row."""
    chunks = batch.chunks
    given = _NO_ROWS if chunks is None else DecodeRows(chunks.tokens, chunks.positions)
    decodes, prefills, at = rows_with_next_tokens(found, rows, given, batch.lines)
    blocks = []
    if batch.page_table.size:
        blocks.append(Block(decodes.tokens, decodes.positions, batch.page_table))
    if chunks is not None:
        blocks.append(Block(prefills.tokens, prefills.positions, chunks.page_table))
    return tuple(blocks), at


def _lines(batch: Batch) -> DraftLines:
    assert batch.drafting is not None, "the batch was made for an engine without drafts"
    return batch.drafting
