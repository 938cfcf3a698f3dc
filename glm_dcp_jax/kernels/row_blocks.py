"""Run a per-row computation in blocks of rows, so that its workspace stays bounded."""

from collections.abc import Callable
from typing import TypeVar

import jax
from jaxtyping import Array

Out = TypeVar("Out")

WORKSPACE_BYTES = 256 * 2**20
"""What one block's largest intermediate may take."""


def map_row_blocks(
    compute: Callable[..., Out], bytes_per_row: int, *rows: Array, workspace: int = WORKSPACE_BYTES
) -> Out:
    """compute(*rows), on as few equal blocks of leading rows as keep bytes_per_row * block within the workspace.

    `rows` share their leading axis, as do the results. A row count that does not divide evenly is cut at the largest
    divisor that fits.
    """
    count = rows[0].shape[0]
    fit = max(1, workspace // max(bytes_per_row, 1))
    if count <= fit:
        return compute(*rows)
    block = max(size for size in range(1, fit + 1) if count % size == 0)
    cut = tuple(array.reshape(count // block, block, *array.shape[1:]) for array in rows)
    out = jax.lax.map(lambda parts: compute(*parts), cut)
    return jax.tree.map(lambda array: array.reshape(count, *array.shape[2:]), out)
