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


def exchange(mine: Shaped[Array, "n width"], transport: Transport) -> Shaped[Array, "W*n width"]:
    """All ranks' records; `arrival` says where each lies."""
    if transport == "direct":
        return jax.lax.all_gather(mine, DCP, tiled=True)
    world = jax.lax.axis_size(DCP)
    shifts = [[(rank, (rank + shift) % world) for rank in range(world)] for shift in range(1, world)]
    return jnp.concatenate([mine, *(jax.lax.ppermute(mine, DCP, shift) for shift in shifts)])


def arrival(owner: Int[Array, "*n"], ordinal: Int[Array, "*n"], count: int, transport: Transport) -> Array:
    """Where an exchange of `count` records a rank puts the owner's record number `ordinal`, as an index."""
    if transport == "direct":
        return owner * count + ordinal
    world, rank = jax.lax.axis_size(DCP), jax.lax.axis_index(DCP)
    return jax.lax.rem(rank - owner + world, world) * count + ordinal
