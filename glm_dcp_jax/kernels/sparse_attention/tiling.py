"""How the kernel of sparse attention cuts its work up."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import DTypeLike

from glm_dcp_jax.kernels import tiles

SHARED_MEMORY = 99 * 1024
"""Bytes of shared memory that a program may take on any GPU we know: compute capability 12 has this much, 9 and 10 have
227 KiB."""

_WIDE_SHARED_MEMORY = 160 * 1024
_FEW_HEADS = 16
_WIDE_HEADS = 64
_WIDE_ROWS = 16
"""With fewer rows, wide programs would spend more on partial outputs than they save on decoding."""

_SHARED_TILES = 4
"""Tiles of a program at least, of a list that several share: less than half of it is filled, and partial outputs of all
their heads are larger than the records of a tile."""

_PROGRAMS = 128
"""Programs to aim at: GPUs have 132 to 188 multiprocessors."""


class Tiling(NamedTuple):
    """heads: of a program. records: of a tile. splits: programs that share a row's list; each takes every nth tile.

    wide: whether heads or latents lead the output's tile. Tensor cores take 64 rows at once, so heads lead where there
    are 64 of them.
    """

    heads: int
    records: int
    splits: int
    wide: bool
    warps: int
    stages: int

    def head_blocks(self, heads: int) -> int:
        """Programs that share a row's heads."""
        return -(-heads // self.heads)


def tiling(
    rows: int,
    heads: int,
    count: int,
    dtype: DTypeLike,
    shared_memory: int = SHARED_MEMORY,
    shared_lists: bool = False,
) -> Tiling:
    """For `rows` queries of this dtype with `heads` heads, each over `count` slots. shared_lists: of several sharers.

    Every program decodes the records it needs for its own heads. So many heads are cheapest in one program, where they
    fit: in registers, the output of 16 heads over 512 latents takes 64 registers of each of 128 threads, that of 32
    heads 64 and of 64 heads 128 of 256; in shared memory, queries take 18, 36 or 72 KiB and a tile 32 KiB once or, when
    wide, twice. Float32 takes twice the room and has no tensor cores.
    """
    if jnp.dtype(dtype) == jnp.float32:
        shape = Tiling(heads=16, records=16, splits=1, wide=False, warps=4, stages=1)
    elif heads >= _WIDE_HEADS and rows >= _WIDE_ROWS and shared_memory >= _WIDE_SHARED_MEMORY:
        shape = Tiling(heads=_WIDE_HEADS, records=32, splits=1, wide=True, warps=8, stages=2)
    elif heads > _FEW_HEADS:
        shape = Tiling(heads=2 * _FEW_HEADS, records=32, splits=1, wide=False, warps=8, stages=2)
    else:
        shape = Tiling(heads=_FEW_HEADS, records=32, splits=1, wide=False, warps=4, stages=2)
    wanted = tiles.next_power(-(-_PROGRAMS // (rows * shape.head_blocks(heads))))
    least = shape.records * (_SHARED_TILES if shared_lists else 1)
    return shape._replace(splits=min(wanted, -(-count // least)))
