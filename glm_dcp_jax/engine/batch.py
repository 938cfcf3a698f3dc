"""A step's work as arrays: plain numpy, on the host."""

from collections.abc import Sequence as Ids
from typing import NamedTuple

import numpy as np

from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.grammars import token_masks
from glm_dcp_jax.engine.logit_rules import Adjustments, adjustments
from glm_dcp_jax.engine.prompt_scores import ScoredRows
from glm_dcp_jax.engine.rounds import DecodeLines, SampledLines
from glm_dcp_jax.engine.sampling import RowParams
from glm_dcp_jax.engine.sequence import Sequence
from glm_dcp_jax.engine.slot_columns import SlotColumns
from glm_dcp_jax.engine.steps import BlockShape, StepShape
from glm_dcp_jax.engine.work import Chunk, Work
from glm_dcp_jax.parallel.batch import Block

_NO_DECODES, _NO_CHUNKS = BlockShape("decode", 0, 1, 0), BlockShape("prefill", 0, 0, 0)


class Line(NamedTuple):
    """A chunk of one sequence: its tokens, the position of the first, and its page table."""

    tokens: Ids[int]
    start: int
    pages: Ids[int]


class DraftLines(NamedTuple):
    """Where each line of a step may draft. page_table: [L, P] int32. limits: [L] int32, the highest position."""

    page_table: np.ndarray
    limits: np.ndarray


class Batch(NamedTuple):
    """Work in a step's shape. decodes: [0] arrays without a decode block. page_table: of the decode block, [C, P].

    chunks: the prefill block, None without one. logit_rows: [M] int32. params: of lines. adjustments: for asked rows,
    or None. masks: what these may draw, as `grammars.token_masks` says it, or None. random, filtered: see
    `sampling.sample`. logprobs: whether any line reports them. draws: whether any line gets a token. drafting: None
    where nothing drafts. scored: rows of prompts, or None.
    """

    shape: StepShape
    decodes: DecodeLines
    page_table: np.ndarray
    chunks: Block | None
    logit_rows: np.ndarray
    lines: SampledLines
    params: RowParams
    adjustments: Adjustments | None
    masks: np.ndarray | None
    random: bool
    filtered: bool
    logprobs: bool
    draws: bool
    drafting: DraftLines | None
    scored: ScoredRows | None


def shape_of(work: Work, buckets: Buckets) -> StepShape:
    """The step that holds the work."""
    reach = work.reaches
    counts, ends = [chunk.count for chunk in work.chunks], [chunk.end for chunk in work.chunks]
    if not work.chunks:
        return buckets.decode(len(reach), max(reach))
    if not work.decodes:
        return buckets.prefill(len(counts), max(counts), max(ends))
    return buckets.mixed(len(reach), max(reach), len(counts), max(counts), max(ends))


class BatchMaker:
    """Makes the arrays of steps. One for a device's slots: it keeps what it wrote of the sequences that hold them."""

    def __init__(self, columns: SlotColumns, vocab_size: int, page_tokens: int | None = None) -> None:
        """columns: empty, with a row for each slot; what is nobody's, padding writes to the last one.

        page_tokens: of a page over all ranks, where drafts follow the steps.
        """
        self._columns, self._vocab_size, self._page_tokens = columns, vocab_size, page_tokens

    def make(self, work: Work, shape: StepShape) -> Batch:
        """The arrays of a step of this shape. Chunks that sample nothing write to the idle slot, as padding does."""
        columns, idle = self._columns, self._columns.idle
        columns.note(work.sequences)
        by_kind = {block.kind: block for block in shape.blocks}
        decode, prefill = by_kind.get("decode", _NO_DECODES), by_kind.get("prefill", _NO_CHUNKS)
        decoding = np.full(decode.requests, idle, np.int32)
        decoding[: len(work.decodes)] = [sequence.slot for sequence in work.decodes]
        ending = np.full(prefill.requests, idle, np.int32)
        ending[: len(work.chunks)] = [chunk.sequence.slot if chunk.is_last else idle for chunk in work.chunks]
        lines = np.concatenate([decoding, ending])
        adjusting = bool(columns.has_rules[lines].any())
        return Batch(
            shape,
            _decode_lines(work.decodes, decoding, columns),
            columns.shown_pages(decoding, decode.pages),
            make_block(prefill, [_line(chunk) for chunk in work.chunks]) if prefill.requests else None,
            _logit_rows(work.chunks, decode, prefill),
            SampledLines(
                lines,
                columns.prompt_length[lines],
                _of_chunks([chunk.end for chunk in work.chunks], prefill),
                _of_chunks([_following(chunk) for chunk in work.chunks], prefill),
            ),
            columns.params_of(lines),
            _adjustments(work, decode, prefill, self._vocab_size) if adjusting else None,
            _masks(work, decode, prefill, self._vocab_size) if adjusting else None,
            bool(columns.is_random[lines].any()),
            bool(columns.is_filtered[lines].any()),
            bool(columns.wants_logprobs[lines].any()),
            bool((lines != idle).any()),
            None if self._page_tokens is None else _draft_lines(lines, shape, columns, self._page_tokens),
            _scored_rows(work.chunks, decode, prefill),
        )


def make_block(shape: BlockShape, lines: Ids[Line]) -> Block:
    """Pad lines to a block's shape: position -1 and the null page behind what is real."""
    tokens = np.zeros((shape.requests, shape.rows), np.int32)
    positions = np.full((shape.requests, shape.rows), -1, np.int32)
    for at, line in enumerate(lines):
        count = len(line.tokens)
        tokens[at, :count] = line.tokens
        positions[at, :count] = np.arange(line.start, line.start + count)
    return Block(tokens, positions, _page_table(shape, [line.pages for line in lines]))


def _decode_lines(decodes: Ids[Sequence], slots: np.ndarray, columns: SlotColumns) -> DecodeLines:
    token, position = np.zeros(len(slots), np.int32), np.full(len(slots), -1, np.int32)
    for at, sequence in enumerate(decodes):
        if not sequence.fed:
            token[at], position[at] = sequence.tokens[-1], len(sequence.tokens) - 1
    limit = np.maximum(columns.limit[slots] - 1, 0)  # nothing follows the last token
    return DecodeLines(slots, token, position, limit)


def _draft_lines(slots: np.ndarray, shape: StepShape, columns: SlotColumns, page_tokens: int) -> DraftLines:
    """A draft at position p guesses token p + 2, and a sequence's last token needs no guess: no row verifies it."""
    width = max(block.pages for block in shape.blocks)
    room = np.minimum(columns.page_counts[slots], width) * page_tokens
    limits = np.where(slots == columns.idle, -1, np.minimum(columns.limit[slots] - 4, room - 1))
    return DraftLines(columns.shown_pages(slots, width), limits.astype(np.int32))


def _following(chunk: Chunk) -> int:
    """The token behind a chunk; -1 where it is still to be drawn."""
    return -1 if chunk.is_last else chunk.sequence.tokens[chunk.end]


def _line(chunk: Chunk) -> Line:
    return Line(chunk.sequence.tokens[chunk.start : chunk.end], chunk.start, chunk.sequence.pages)


def _logit_rows(chunks: Ids[Chunk], decode: BlockShape, prefill: BlockShape) -> np.ndarray:
    """All rows that decode, and the last row of each chunk."""
    last = _of_chunks([chunk.count - 1 for chunk in chunks], prefill)
    of_chunks = decode.total_rows + np.arange(prefill.requests, dtype=np.int32) * prefill.rows + last
    return np.concatenate([np.arange(decode.total_rows, dtype=np.int32), of_chunks])


def _scored_rows(chunks: Ids[Chunk], decode: BlockShape, prefill: BlockShape) -> ScoredRows | None:
    """Rows whose requests want to know how likely the prompt's next token was."""
    tokens = [chunk.scored_tokens for chunk in chunks]
    if not any(tokens):
        return None
    starts = [decode.total_rows + at * prefill.rows + chunk.first_scored for at, chunk in enumerate(chunks)]
    rows = [np.arange(start, start + len(of)) for start, of in zip(starts, tokens, strict=True)]
    return ScoredRows(np.concatenate(rows).astype(np.int32), np.concatenate(tokens).astype(np.int32))


def _of_chunks(values: Ids[int], shape: BlockShape) -> np.ndarray:
    """[P] int32, 0 for padding."""
    return np.array([*values, *[0] * (shape.requests - len(values))], np.int32)


def _page_table(shape: BlockShape, tables: Ids[Ids[int]]) -> np.ndarray:
    """[requests, pages] int32; pages beyond the step's context are not needed in it."""
    table = np.zeros((shape.requests, shape.pages), np.int32)
    for row, pages in zip(table, tables, strict=False):  # behind the tables there is padding
        shown = pages[: shape.pages]
        row[: len(shown)] = shown
    return table


def _adjustments(work: Work, decode: BlockShape, prefill: BlockShape, vocab_size: int) -> Adjustments | None:
    """For asked rows: row j of a sequence that decodes comes behind its first j drafts."""
    rules: list[tuple | None] = [None] * (decode.total_rows + prefill.requests)
    for at, sequence in enumerate(work.decodes):
        if sequence.rules is not None and sequence.rules.adjusts:
            for row in range(decode.rows):
                rules[at * decode.rows + row] = (sequence.rules, sequence.drafts[:row])
    for at, chunk in enumerate(work.chunks, decode.total_rows):
        ruled = chunk.sequence.rules
        if chunk.is_last and ruled is not None and ruled.adjusts:
            rules[at] = (ruled, ())
    return adjustments(rules, len(rules), vocab_size)


def _masks(work: Work, decode: BlockShape, prefill: BlockShape, vocab_size: int) -> np.ndarray | None:
    """For asked rows: row j of a sequence that decodes comes behind its first j drafts."""
    asked = {
        at * decode.rows: (sequence.rules.grammar, sequence.drafts[: decode.rows - 1])
        for at, sequence in enumerate(work.decodes)
        if sequence.rules is not None and sequence.rules.grammar is not None
    }
    for at, chunk in enumerate(work.chunks, decode.total_rows):
        ruled = chunk.sequence.rules
        if chunk.is_last and ruled is not None and ruled.grammar is not None:
            asked[at] = (ruled.grammar, ())
    return token_masks(asked, decode.total_rows + prefill.requests, vocab_size)
