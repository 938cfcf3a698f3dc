"""Exact top-k in plain JAX, as positions (sorted) or as a mask (threshold search, no sort)."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32


def select_positions(scores: Float[Array, "T L"], visible: Int[Array, " T"], k: int) -> Int[Array, "T k"]:
    """See the op."""
    columns = jnp.arange(scores.shape[1])
    visible = jnp.minimum(visible, scores.shape[1])
    shown = (columns < visible[:, None]) & ~jnp.isnan(scores)
    _, positions = jax.lax.top_k(jnp.where(shown, scores, -jnp.inf), min(k, scores.shape[1]))
    positions = jnp.pad(positions, ((0, 0), (0, k - positions.shape[1])))
    return jnp.where(jnp.arange(k) < visible[:, None], positions, -1)


def select_mask(scores: Float[Array, "S L"], visible: Int[Array, " S"], k: int) -> Bool[Array, "S L"]:
    """See the op.

    A binary search over the bits of the k-th largest score, then one over the position up to which scores equal to it
    are still taken: about 32 + log2(L) counting passes.
    """
    columns = jnp.arange(scores.shape[1])
    shown = columns < visible[:, None]
    keys = jnp.where(shown, sortable(scores), 0)
    threshold = _largest(lambda t: jnp.sum(keys >= t[:, None], axis=1) >= k, 32, scores.shape[0])
    above, equal = keys > threshold[:, None], shown & (keys == threshold[:, None])
    room = k - jnp.sum(above, axis=1)
    bits = scores.shape[1].bit_length()
    stop = _largest(lambda c: jnp.sum(equal & (columns < c[:, None]), axis=1) <= room, bits, scores.shape[0])
    return above | (equal & (columns < stop[:, None]))


def sortable(scores: Float[Array, "*rows"]) -> UInt32[Array, "*rows"]:
    """Map float32 to uint32 so that order is kept and every number is above 0; NaN is mapped as -inf."""
    bits = jax.lax.bitcast_convert_type(jnp.where(jnp.isnan(scores), -jnp.inf, scores), jnp.int32)
    ordered = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return jax.lax.bitcast_convert_type(ordered, jnp.uint32) ^ jnp.uint32(0x80000000)


def _largest(holds: Callable[[Array], Array], bits: int, rows: int) -> UInt32[Array, " S"]:
    """Per row, the largest `bits`-bit number for which `holds` is true; true for 0 and monotone."""

    def try_bit(step: Array, found: Array) -> Array:
        candidate = found | (jnp.uint32(1) << (bits - 1 - step).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, found)

    return jax.lax.fori_loop(0, bits, try_bit, jnp.zeros(rows, jnp.uint32))
