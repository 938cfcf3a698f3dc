"""What a step brought, sequence by sequence, once the host has read it."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Any, NamedTuple

import jax
import numpy as np

from glm_dcp_jax.engine.prompt_scores import fetched
from glm_dcp_jax.engine.runner import Flight
from glm_dcp_jax.engine.sampling import Scores
from glm_dcp_jax.engine.sequence import Sequence
from glm_dcp_jax.engine.work import Work


class Token(NamedTuple):
    """A token of a prompt, and its row of the prompt scores."""

    token: int
    row: int


@dataclass(slots=True)
class Landing:
    """A sequence's part of a step. decoded: rows of it that are in the cache now and were not counted when it began.

    end: tokens that the cache then holds, of a chunk; None where they follow from the tokens. drawn: its new tokens.
    first_row: the asked row that the first of them was drawn from; the others' follow. draws: whether it waited for
    any. healthy: no NaN or infinity. verified: drafts that were up for it.

    drafts: what is guessed behind; fetched for sequences whose sampling needs it, else empty. scored: tokens of its
    prompt whose probability is known now.
    """

    sequence: Sequence
    decoded: int
    end: int | None
    drawn: list[int]
    first_row: int
    draws: bool
    healthy: bool
    verified: int = 0
    drafts: tuple[int, ...] = ()
    scored: tuple[Token, ...] = ()


class Landed(NamedTuple):
    """A step's results on the host. scores: of asked rows, or None. prompt_scores: of rows of prompts, or None."""

    landings: tuple[Landing, ...]
    scores: Scores | None
    prompt_scores: Scores | None


def land(work: Work, flight: Flight) -> Landed:
    """Wait for a step's results."""
    round, finite, scores = jax.device_get((flight.round, flight.finite, flight.scores))
    rows = sum(block.total_rows for block in flight.shape.blocks if block.kind == "decode")
    found = (*_decodes(work, round, finite[:rows]), *_chunks(work, flight, round, finite[rows:], rows))
    if flight.drafts is not None and any(_asks_for_drafts(landing) for landing in found):
        found = tuple(_with_drafts(work, found, flight, np.stack(jax.device_get(flight.drafts), axis=1)))
    if flight.prompt_scores is None:
        return Landed(found, scores, None)
    found = (*found[: len(work.decodes)], *_with_scored(work, found[len(work.decodes) :]))
    rows = sum(len(landing.scored) for landing in found)
    return Landed(found, scores, fetched(flight.prompt_scores, rows))


def _with_scored(work: Work, landings: Iterable[Landing]) -> Iterator[Landing]:
    """Which rows of the prompt scores are whose."""
    row = 0
    for chunk, landing in zip(work.chunks, landings, strict=True):
        tokens = chunk.scored_tokens
        yield replace(landing, scored=tuple(map(Token, tokens, range(row, row + len(tokens)))))
        row += len(tokens)


def _asks_for_drafts(landing: Landing) -> bool:
    """The host changes the logits of rows behind drafts, so it must know them."""
    return landing.draws and landing.sequence.rules is not None


def _with_drafts(
    work: Work, landings: Iterable[Landing], flight: Flight, drafts: np.ndarray
) -> Iterator[Landing]:
    """drafts: [L, n], -1 where there is none, of the step's padded lines."""
    first_chunk = sum(block.requests for block in flight.shape.blocks if block.kind == "decode")
    lines = [*range(len(work.decodes)), *range(first_chunk, first_chunk + len(work.chunks))]
    for line, landing in zip(lines, landings, strict=True):
        guesses = tuple(token for token in drafts[line].tolist() if token >= 0)
        yield replace(landing, drafts=guesses) if _asks_for_drafts(landing) else landing


def _decodes(work: Work, round: Any, finite: np.ndarray) -> Iterator[Landing]:
    """finite: [C * S] bool. All lines at once, as numpy's cost is by the call."""
    each = round.decoded.shape[1]
    healthy = (finite & round.healthy[: len(finite)]).reshape(-1, each)
    is_rejected = np.arange(each) >= round.accepted[:, None]
    accepted = round.accepted.tolist()
    drawn = round.decoded.tolist()
    if each > 1:
        drawn = [tokens[:count] for tokens, count in zip(drawn, accepted, strict=True)]
    return map(
        Landing,
        work.decodes,  # the shortest: behind the sequences there is padding
        accepted,
        repeat(None),
        drawn,
        range(0, len(finite), each),
        repeat(True),
        (healthy | is_rejected).all(axis=1).tolist(),
        round.drafts.tolist(),
    )


def _chunks(work: Work, flight: Flight, round: Any, finite: np.ndarray, first_row: int) -> Iterator[Landing]:
    each = flight.shape.blocks[-1].rows
    for line, chunk in enumerate(work.chunks):
        row = first_row + line
        healthy = bool(finite[line * each : line * each + chunk.count].all())
        if not chunk.is_last:
            yield Landing(chunk.sequence, 0, chunk.end, [], row, False, healthy)
            continue
        healthy = healthy and bool(round.healthy[row])
        yield Landing(chunk.sequence, 0, chunk.end, [int(round.first[line])], row, True, healthy)
