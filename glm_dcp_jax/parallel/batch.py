"""What a step works on: blocks of rows, a rectangle of requests by rows each."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


class Block(NamedTuple):
    """Rows of N requests, S each, at consecutive positions; a decode block has S = 1, a prefill block S = a chunk.

    tokens: [N, S] int32. positions: [N, S] int32, -1 behind a request's last row (a padded request has only -1).
    page_table: [N, P] int32, page ids, 0 (the null page) behind the last; P fixes the context the block can see.
    Arrays of jax or numpy, or ShapeDtypeStructs to compile for, hence the open types.
    """

    tokens: Any
    positions: Any
    page_table: Any

    @property
    def rows(self) -> int:
        """Rows of the block, padded ones included."""
        return self.positions.shape[0] * self.positions.shape[1]

    @property
    def start(self) -> Int[Array, " N"]:
        """Tokens of each request that earlier steps committed: its first row's position (0 for padding)."""
        return jnp.maximum(self.positions[:, 0], 0)

    @property
    def visible(self) -> Int[Array, "N S"]:
        """Positions each row may see: its own and all before it; 0 for padded rows."""
        return self.positions + 1

    @property
    def valid(self) -> Bool[Array, "N S"]:
        """Which rows are real."""
        return self.positions >= 0


class Selection(NamedTuple):
    """What a Full layer chose for each row of a block, in one of two forms.

    positions: [N, S, K] int32, valid ones first, -1 behind. mask: [N, S, L] bool over the context's positions.
    """

    positions: Int[Array, "N S K"] | None
    mask: Bool[Array, "N S L"] | None
