"""Merging partial attention outputs of the same queries on one device, as a Pallas-Triton kernel.

XLA makes five kernels of the same arithmetic, which at one row take longer than the attention.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jaxtyping import Array, Float

from glm_dcp_jax.kernels import tiles
from glm_dcp_jax.kernels.cost import Cost

_TILE = 8192
"""Partial values that a program holds at once, in 64 registers of each of 128 threads."""


def combine(
    out: Float[Array, "T P H C"], lse: Float[Array, "T P H"], interpret: bool
) -> tuple[Float[Array, "T H C"], Float[Array, "T H"]]:
    """One output and LSE of P partial ones, each over its own records; all float32.

    A part with LSE -inf saw nothing: its output is not read and may hold anything. Where all parts are such, the output
    is 0.
    """
    rows, parts, heads, width = out.shape
    if parts == 1:
        return out[:, 0], lse[:, 0]
    columns = _columns(parts, width)
    return pl.pallas_call(
        partial(_combine, columns=columns),
        grid=(-(-width // columns), heads, rows),
        out_shape=(
            jax.ShapeDtypeStruct((rows, heads, width), jnp.float32),
            jax.ShapeDtypeStruct((rows, heads), jnp.float32),
        ),
        interpret=interpret,
        compiler_params=plt.CompilerParams(num_warps=4, num_stages=1),
        name="combine",
    )(out, lse)


def cost(rows: int, parts: int, heads: int, width: int) -> Cost:
    """What `combine` moves; its sums are not counted. One part is the result already."""
    if parts == 1:
        return Cost(0, 0)
    programs = rows * heads * -(-width // _columns(parts, width))
    read = rows * parts * heads * width + programs * parts
    return Cost(bytes_read=4 * read, bytes_written=4 * rows * heads * (width + 1))


def _columns(parts: int, width: int) -> int:
    """Output columns of a program."""
    return min(tiles.next_power(width), max(_TILE // tiles.next_power(parts), 1))


def _combine(out: jax.Ref, lse: jax.Ref, merged: jax.Ref, merged_lse: jax.Ref, columns: int) -> None:
    _, parts, _, width = out.shape
    chunk = pl.program_id(0)
    head, row = jnp.full((1,), pl.program_id(1)), jnp.full((1,), pl.program_id(2))
    part = jnp.arange(tiles.next_power(parts))
    column = chunk * columns + jnp.arange(columns)

    part_lse = tiles.load(lse, row, part, head, mask=part < parts, other=-jnp.inf)
    seen = part_lse != -jnp.inf
    top = jnp.max(part_lse)
    base = jnp.where(top == -jnp.inf, 0.0, top)
    weight = jnp.exp(part_lse - base)
    total = jnp.sum(weight)

    mask = seen[:, None] & (column < width)[None, :]
    values = tiles.load(out, row[:, None], part[:, None], head[:, None], column[None, :], mask=mask)
    result = jnp.sum(values * weight[:, None], axis=0) / jnp.where(total == 0, 1.0, total)
    tiles.store(merged, row, head, column, value=result, mask=column < width)
    merged_value = jnp.full((1,), base + jnp.log(total))
    tiles.store(merged_lse, row, head, value=merged_value, mask=jnp.full((1,), chunk == 0))
