"""A step's work as arrays: plain numpy, on the host."""

from collections.abc import Sequence as Ids
from typing import NamedTuple

import numpy as np

from glm_dcp_jax.engine.buckets import Buckets
from glm_dcp_jax.engine.logit_rules import Adjustments, adjustments
from glm_dcp_jax.engine.prompt_scores import ScoredRows
from glm_dcp_jax.engine.rounds import DecodeLines, SampledLines
from glm_dcp_jax.engine.sampling import IDLE_ROW, RowParams, row_params
from glm_dcp_jax.engine.scheduler import Chunk, Work
from glm_dcp_jax.engine.sequence import Sequence
from glm_dcp_jax.engine.steps import BlockShape, StepShape
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
    or None. random, filtered: see `sampling.sample`. logprobs: whether any line reports them. draws: whether any line
    gets a token. drafting: None where nothing drafts. scored: rows of prompts, or None.
    """

    shape: StepShape
    decodes: DecodeLines
    page_table: np.ndarray
    chunks: Block | None
    logit_rows: np.ndarray
    lines: SampledLines
    params: RowParams
    adjustments: Adjustments | None
    random: bool
    filtered: bool
    logprobs: bool
    draws: bool
    drafting: DraftLines | None
    scored: ScoredRows | None


def shape_of(work: Work, buckets: Buckets) -> StepShape:
    """The step that holds the work."""
    reach = [line.reach for line in work.decodes]
    counts, ends = [chunk.count for chunk in work.chunks], [chunk.end for chunk in work.chunks]
    if not work.chunks:
        return buckets.decode(len(reach), max(reach))
    if not work.decodes:
        return buckets.prefill(len(counts), max(counts), max(ends))
    return buckets.mixed(len(reach), max(reach), len(counts), max(counts), max(ends))


def make_batch(
    work: Work, shape: StepShape, idle_slot: int, vocab_size: int, page_tokens: int | None = None
) -> Batch:
    """The arrays of a step. idle_slot: what padding, and chunks that sample nothing, write to.

    page_tokens: of a page over all ranks, where drafts follow the step.
    """
    by_kind = {block.kind: block for block in shape.blocks}
    decode, prefill = by_kind.get("decode", _NO_DECODES), by_kind.get("prefill", _NO_CHUNKS)
    decoding = _padded([line.sequence for line in work.decodes], decode)
    ending = _padded([chunk.sequence if chunk.is_last else None for chunk in work.chunks], prefill)
    lines = [*decoding, *ending]
    sampling = [line for line in lines if line is not None]
    return Batch(
        shape,
        _decode_lines(work, decode, idle_slot),
        _page_table(decode, [line.sequence.pages for line in work.decodes]),
        make_block(prefill, [_line(chunk) for chunk in work.chunks]) if prefill.requests else None,
        _logit_rows(work.chunks, decode, prefill),
        SampledLines(
            np.array([idle_slot if line is None else line.slot for line in lines], np.int32),
            np.array([0 if line is None else line.prompt_length for line in lines], np.int32),
            _of_chunks([chunk.end for chunk in work.chunks], prefill),
            _of_chunks([_following(chunk) for chunk in work.chunks], prefill),
        ),
        row_params([IDLE_ROW if line is None else (line.params, line.seed, 0) for line in lines], len(lines)),
        _adjustments(decoding, ending, decode.rows, vocab_size),
        any(not line.params.greedy for line in sampling),
        any(line.params.filtered for line in sampling),
        any(line.params.logprobs is not None for line in sampling),
        bool(sampling),
        None if page_tokens is None else _draft_lines(lines, shape, page_tokens),
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


def _decode_lines(work: Work, shape: BlockShape, idle_slot: int) -> DecodeLines:
    column = lambda fill: np.full(shape.requests, fill, np.int32)  # noqa: E731
    slot, token, position, limit = column(idle_slot), column(0), column(-1), column(0)
    for at, (sequence, _) in enumerate(work.decodes):
        slot[at], limit[at] = sequence.slot, sequence.limit - 1  # nothing follows the last token
        if not sequence.fed:
            token[at], position[at] = sequence.tokens[-1], len(sequence.tokens) - 1
    return DecodeLines(slot, token, position, limit)


def _draft_lines(lines: Ids[Sequence | None], shape: StepShape, page_tokens: int) -> DraftLines:
    """A draft at position p guesses token p + 2, and a sequence's last token needs no guess: no row verifies it."""
    block = BlockShape("decode", len(lines), 1, max(block.pages for block in shape.blocks))
    limits = np.full(len(lines), -1, np.int32)
    for at, line in enumerate(lines):
        if line is not None:
            limits[at] = min(line.limit - 4, min(len(line.pages), block.pages) * page_tokens - 1)
    return DraftLines(_page_table(block, [[] if line is None else line.pages for line in lines]), limits)


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


def _padded(lines: Ids[Sequence | None], shape: BlockShape) -> list[Sequence | None]:
    return [*lines, *[None] * (shape.requests - len(lines))]


def _adjustments(
    decodes: list[Sequence | None], chunks: list[Sequence | None], each: int, vocab_size: int
) -> Adjustments | None:
    """For asked rows: row j of a sequence that decodes comes behind its first j drafts."""
    rules: list[tuple | None] = [
        None if sequence is None or sequence.rules is None else (sequence.rules, sequence.drafts[:row])
        for sequence in decodes
        for row in range(each)
    ]
    rules += [
        None if sequence is None or sequence.rules is None else (sequence.rules, ()) for sequence in chunks
    ]
    return adjustments(rules, len(rules), vocab_size)
