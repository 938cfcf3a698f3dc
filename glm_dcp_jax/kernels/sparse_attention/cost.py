"""What `sparse_attention` moves and computes."""

import math

import jax.numpy as jnp
from jaxtyping import DTypeLike

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels import combine, record_tiles
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY, tiling

_FLOAT32, _INT32, _BOOL = 4, 4, 1


def cost(
    rows: int,
    heads: int,
    count: int,
    record: RecordFormat,
    dtype: DTypeLike,
    current: int = 0,
    outer_scale: bool = False,
    shared_memory: int = SHARED_MEMORY,
    shared_lists: bool = False,
    listed: float = 1.0,
) -> Cost:
    """Of the kernel and of the merge of its partials, if every current record is valid.

    rows, heads, count: T, H and K of the op; current: S. dtype: of q. Heads that share a program share its records.
    shared_lists: whether `seen_by` says who sees what. listed: the share of slots that are valid, and come first.
    """
    cut = tiling(rows, heads, count, dtype, shared_memory, shared_lists)
    blocks, partials = cut.head_blocks(heads), cut.splits + bool(current)
    attended = rows * (math.ceil(listed * count) + current)
    queries = rows * partials * heads * (record.latent_width + record.rope_width) * jnp.dtype(dtype).itemsize
    entries = rows * blocks * (count * _INT32 + current * _BOOL)
    if shared_lists:
        entries += rows * blocks * (math.ceil(listed * count) * _INT32 + current * (_INT32 - _BOOL))
    scalars = rows * blocks * (cut.splits * _INT32 + partials * outer_scale * _FLOAT32)
    results = rows * heads * (record.latent_width + 1) * _FLOAT32
    merge = combine.cost(rows, partials, heads, record.latent_width)
    return Cost(
        bytes_read=blocks * attended * record_tiles.read_bytes(record)
        + queries
        + entries
        + scalars
        + merge.bytes_read,
        bytes_written=partials * results + merge.bytes_written,
        flops=2 * attended * heads * (2 * record.latent_width + record.rope_width),
    )
