"""What goes from step to step on the device: last tokens, their positions, drafts. The host need not have read them.

A running sequence has a slot. A step that samples for it leaves there the token that it drew last, and behind it the
drafts; the next step takes its rows from there. So steps can start before the host knows what the last one brought.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from glm_dcp_jax.engine.sampling import RowParams, sample


class Slots(NamedTuple):
    """Per slot, one more than sequences can run, which takes what is nobody's. token, position: [R] int32, the last
    token and where it belongs. drafts: [R, n] int32, guesses of the tokens behind it."""

    token: Any
    position: Any
    drafts: Any

    @staticmethod
    def empty(sequences: int, drafts: int) -> "Slots":
        """For so many sequences with so many drafts each, as numpy arrays."""
        rows = sequences + 1
        return Slots(np.zeros(rows, np.int32), np.zeros(rows, np.int32), np.zeros((rows, drafts), np.int32))


class DecodeLines(NamedTuple):
    """A decode block before its tokens are known. slot: [C], the last slot for padding. token, position: [C] of those
    the slot knows nothing of, position -1 for all others. limit: [C], rows at it and beyond stay empty; 0 for padding.
    All int32.
    """

    slot: Any
    token: Any
    position: Any
    limit: Any


class DecodeRows(NamedTuple):
    """tokens, positions: [C, S] int32, the last token and its drafts; position -1 for what is not there."""

    tokens: Any
    positions: Any


class SampledLines(NamedTuple):
    """Lines of a step, those that decode first; L = C + P. slot: [L] int32, where a line's state goes, the last slot
    for none. prompt_length: [L] int32: behind position p comes output token p + 1 - prompt_length. ends: [P] int32,
    how many tokens are in the cache behind each chunk. following: [P] int32, the token behind each, -1 if drawn here.
    """

    slot: Any
    prompt_length: Any
    ends: Any
    following: Any


class Round(NamedTuple):
    """What a step drew. decoded: [C, S] int32. accepted: [C] int32, how many of them count. drafts: [C] int32, how many
    were verified. first: [P] int32, behind each chunk. healthy: [C * S + P] bool, rows without NaN."""

    decoded: Any
    accepted: Any
    drafts: Any
    first: Any
    healthy: Any


@jax.jit
def decode_rows(slots: Slots, lines: DecodeLines) -> DecodeRows:
    """Rows of the lines: the last token, and its drafts where the slot has them."""
    explicit = lines.position >= 0
    drafts = slots.drafts[lines.slot]
    last = jnp.where(explicit, lines.token, slots.token[lines.slot])
    first = jnp.where(explicit, lines.position, slots.position[lines.slot])
    offsets = jnp.arange(1 + drafts.shape[1], dtype=jnp.int32)
    positions = first[:, None] + offsets
    real = (positions < lines.limit[:, None]) & ((offsets == 0) | ~explicit[:, None])
    tokens = jnp.concatenate([last[:, None], drafts], axis=1)
    return DecodeRows(tokens, jnp.where(real & (tokens >= 0), positions, -1))


def accepted_rows(drawn: Int[Array, "C S"], rows: DecodeRows) -> Int[Array, " C"]:
    """How many of a line's drawn tokens count: drafts are accepted while each is what the row before it drew.

    Since a draft is one guess (its distribution is a single point), this is the rejection rule of speculative sampling:
    the guess is accepted with its probability, and else the drawn token is distributed as the others are among
    themselves (Leviathan et al., 2023).
    """
    right = (drawn[:, :-1] == rows.tokens[:, 1:]) & (rows.positions[:, 1:] >= 0)
    return 1 + jnp.sum(jnp.cumprod(right.astype(jnp.int32), axis=1), axis=1)


@functools.partial(jax.jit, static_argnames=("random", "filtered"), donate_argnames="slots")
def draw(
    logits: Float[Array, "M V"],
    slots: Slots,
    params: RowParams,
    rows: DecodeRows,
    lines: SampledLines,
    random: bool,
    filtered: bool,
) -> tuple[Round, Slots]:
    """Draw a token in every asked row, see which drafts stand, and note the lines' state.

    logits: M = C * S + P, decode rows first. params: of lines, [C + P] each; steps are found here.
    """
    count, each = rows.positions.shape
    of_line = np.concatenate([np.repeat(np.arange(count), each), count + np.arange(len(lines.ends))])
    behind = jnp.concatenate([rows.positions.reshape(-1) + 1, lines.ends])
    step = jnp.maximum(behind - lines.prompt_length[of_line], 0)
    of_rows = RowParams(*(jnp.asarray(column)[of_line] for column in params))._replace(step=step)
    drawn = sample(logits, of_rows, random, False, filtered)
    decoded, first = jnp.split(drawn.token.astype(jnp.int32), [count * each])
    decoded = decoded.reshape(count, each)
    accepted = accepted_rows(decoded, rows)
    last = jnp.take_along_axis(decoded, accepted[:, None] - 1, axis=1)[:, 0]
    new = Slots(
        slots.token.at[lines.slot].set(jnp.concatenate([last, first])),
        slots.position.at[lines.slot].set(jnp.concatenate([rows.positions[:, 0] + accepted, lines.ends])),
        slots.drafts,
    )
    drafts = jnp.sum(rows.positions[:, 1:] >= 0, axis=1)
    return Round(decoded, accepted, drafts, first, drawn.healthy), new


@jax.jit
def rows_with_next_tokens(
    found: Round, rows: DecodeRows, chunk: DecodeRows, lines: SampledLines
) -> tuple[DecodeRows, DecodeRows, Int[Array, " L"]]:
    """What the MTP layer runs over: a step's rows, each with the token behind it, without those that were rejected.

    chunk: the prefill block's rows, [P, S]. Also each line's last row among all rows, those that decode first; -1 for
    chunks that draw nothing, and for padding.
    """
    (count, each), (chunks, length) = rows.positions.shape, chunk.positions.shape
    stands = (jnp.arange(each) < found.accepted[:, None]) & (rows.positions >= 0)
    decodes = DecodeRows(found.decoded, jnp.where(stands, rows.positions, -1))
    last = jnp.sum(stands, axis=1) - 1
    of_decodes = jnp.where(last < 0, -1, jnp.arange(count) * each + last)
    ends = jnp.sum(chunk.positions >= 0, axis=1) - 1
    behind = jnp.where(lines.following < 0, found.first, lines.following)
    shifted = jnp.concatenate([chunk.tokens[:, 1:], jnp.zeros((chunks, min(length, 1)), jnp.int32)], axis=1)
    shifted = jnp.where(jnp.arange(length) == ends[:, None], behind[:, None], shifted)
    draws = (lines.following < 0) & (ends >= 0)
    of_chunks = jnp.where(draws, count * each + jnp.arange(chunks) * length + ends, -1)
    at = jnp.concatenate([of_decodes, of_chunks]).astype(jnp.int32)
    return decodes, DecodeRows(shifted, chunk.positions), at


@functools.partial(jax.jit, donate_argnums=0)
def note_drafts(slots: Slots, slot: Int[Array, " L"], drafts: tuple[Int[Array, " L"], ...]) -> Slots:
    """The slots with the drafts of all lines."""
    return slots._replace(drafts=slots.drafts.at[slot].set(jnp.stack(drafts, axis=1)))
