"""Row blocks of causal work, without the columns that no row of a block sees where the platform can branch."""

from collections.abc import Callable
from typing import TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES, map_row_blocks

Out = TypeVar("Out")

_ROWS = 256
"""Rows of a block: causal rows further apart see prefixes too different to share one."""

_PREFIXES = 4
"""How many prefixes of the columns are compiled."""

_SHORT = 512
"""Up to this many rows or columns, branches cost more to compile than they save."""


def map_seen_blocks(
    compute: Callable[..., Out], bytes_per_row: int, columns: int, seen: Int[Array, " S"], *rows: Array
) -> Out:
    """compute(n, *rows) on blocks of leading rows, which need only the first n of the columns.

    seen[s]: one past the last column that row s sees. n is static, and results must not depend on it in shape or
    value. On the CPU n is one of a few prefixes; elsewhere all columns, because a GPU runs requests together, where a
    branch for each would compute all branches.
    """
    if columns <= _SHORT or seen.shape[0] <= _SHORT:
        return map_row_blocks(lambda *block: compute(columns, *block), bytes_per_row, *rows)
    sizes = [-(-columns * part // _PREFIXES) for part in range(1, _PREFIXES + 1)]

    def on_prefix(block_seen: Array, *block: Array) -> Out:
        needed = jnp.searchsorted(jnp.array(sizes), jnp.max(block_seen))
        return jax.lax.switch(needed, [lambda *part, n=size: compute(n, *part) for size in sizes], *block)

    def in_prefixes(seen: Array, *rows: Array) -> Out:
        workspace = min(WORKSPACE_BYTES, _ROWS * bytes_per_row)
        return map_row_blocks(on_prefix, bytes_per_row, seen, *rows, workspace=workspace)

    def whole(seen: Array, *rows: Array) -> Out:
        return map_row_blocks(lambda *block: compute(columns, *block), bytes_per_row, *rows)

    return jax.lax.platform_dependent(seen, *rows, cpu=in_prefixes, default=whole)
