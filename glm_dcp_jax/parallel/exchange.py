"""The exchange of records: every rank of a DCP group hands the same number of records to all of them.

`direct` is one all-gather. `ce` is W-1 collective permutes, which XLA can give to the copy engines of GPUs with peer
access; a rank's own part stays where it is. Both deliver the same records, each in an order of its own.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from glm_dcp_jax.parallel.mesh import DCP

Transport = Literal["direct", "ce"]


Parts = tuple[Shaped[Array, "n width"], ...]
"""What an exchange brings, as it arrives; `joined` makes one array of it."""


def exchange(mine: Shaped[Array, "n width"], transport: Transport) -> Parts:
    """All ranks' records. Who ties them to another value ties the parts: joining them is work behind the arrival."""
    if transport == "direct":
        return (jax.lax.all_gather(mine, DCP, tiled=True),)
    world = jax.lax.axis_size(DCP)
    shifts = [[(rank, (rank + shift) % world) for rank in range(world)] for shift in range(1, world)]
    return mine, *(jax.lax.ppermute(mine, DCP, shift) for shift in shifts)


def joined(parts: Parts) -> Shaped[Array, "W*n width"]:
    """The records of an exchange; `arrival` says where each lies."""
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts)


def arrival(owner: Int[Array, "*n"], ordinal: Int[Array, "*n"], count: int, transport: Transport) -> Array:
    """Where an exchange of `count` records a rank puts the owner's record number `ordinal`, as an index."""
    if transport == "direct":
        return owner * count + ordinal
    world, rank = jax.lax.axis_size(DCP), jax.lax.axis_index(DCP)
    return jax.lax.rem(rank - owner + world, world) * count + ordinal
