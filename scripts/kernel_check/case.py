"""What is checked: sizes, the arrays that stay on the device, and a case, which is one op at one shape."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxtyping import Array, PRNGKeyArray

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.cost import Cost
from glm_dcp_jax.kernels.sparse_attention.tiling import SHARED_MEMORY

MIB = 2**20
LARGEST_L2 = 128 * MIB
"""What the largest second-level cache of the GPUs that we know holds."""
BLOCK_SIZE = 64
"""Tokens of a page, and of a block of quantised index keys."""


@dataclass(frozen=True)
class Sizes:
    """The model's sizes, and how much is checked. GLM-5.2's, unless said otherwise.

    records: the record formats. rows: query tokens of a decode step. heads: query heads of one device. selected: top-k.
    tokens: of the context, and slots of a pool's layer. full_layers: those with an indexer. shared_layers: planes that
    travel together. prefill: rows of a chunk that is written. pool_bytes: what one pool of records may take. calls:
    most calls of an op in an iteration of a timing loop. shared_memory: of a program of attention on the GPU, in bytes.
    weights: their kinds. hidden, expert_width: of the network, and of one of 8 ranks' part of an expert. experts,
    experts_each: of a layer, and that a row chooses.
    """

    records: tuple[RecordFormat, ...]
    rows: tuple[int, ...] = (1, 4, 32)
    heads: tuple[int, ...] = (8, 16, 64)
    selected: int = 2048
    index_heads: int = 32
    tokens: int = 128 * 1024
    full_layers: int = 21
    shared_layers: int = 3
    prefill: int = 2048
    pool_bytes: int = 3072 * MIB
    calls: int = 16
    shared_memory: int = SHARED_MEMORY
    weights: tuple[str, ...] = ("plain", "fp8", "nvfp4")
    hidden: int = 6144
    expert_width: int = 256
    experts: int = 256
    experts_each: int = 8

    @property
    def group(self) -> int:
        """Layers of a share group, whose records are written together."""
        return self.shared_layers + 1

    def planes(self, record: RecordFormat) -> int:
        """Layers that a pool of records holds: what fits, and no more than the calls can use."""
        fit = self.pool_bytes // (self.tokens * record.record_bytes)
        return min(max(fit, self.group), self.group * self.calls)


def record_formats(latent: int = 512, rope: int = 64, index_width: int = 128) -> tuple[RecordFormat, ...]:
    """bfloat16 and all quantised formats."""
    names = (("bfloat16", "bfloat16"), ("fp8_ds_mla", "bfloat16"), ("nvfp4_ds_mla", "bfloat16"))
    return tuple(
        RecordFormat.sized(name, latent, rope, index_width, rope_kind)
        for name, rope_kind in (*names, ("nvfp4_ds_mla", "fp8"))
    )


def tiny_sizes() -> Sizes:
    """For a rehearsal, whose kernels are interpreted."""
    return Sizes(
        records=record_formats(latent=32, rope=16, index_width=32),
        rows=(2,),
        heads=(4,),
        selected=16,
        index_heads=4,
        tokens=256,
        full_layers=2,
        prefill=8,
        pool_bytes=MIB // 2,
        calls=2,
        hidden=192,
        expert_width=64,
        experts=4,
        experts_each=2,
    )


def format_name(record: RecordFormat) -> str:
    """Tells the two layouts of nvfp4_ds_mla apart."""
    return f"{record.name}, fp8 rope" if record.has("rope_scale") else record.name


@dataclass(frozen=True)
class Resident:
    """Arrays that stay on the device while all cases that use them are checked. make is to be compiled."""

    name: str
    make: Callable[[PRNGKeyArray], tuple[Array, ...]]


@dataclass(frozen=True)
class Case:
    """One op at one shape.

    op, shape: what the report calls it. rotated_bytes: of the resident arrays that a timing loop's calls take turns on.
    calls: how many places for calls there are in them. place: (resident, number) to what a call is given of them;
    number 0 is their last place. fixed: inputs that are the same in every call. fresh: small ones that each iteration
    has anew; awkward ones have what the op must cope with: skipped slots, the last slot, short rows. run: the op,
    (place, fixed, fresh, backend) to its result. in_place: whether that is the resident array, changed. expected: what
    results are compared with, of (fixed, fresh), where it is to be computed on the CPU, whose divisions are exact.
    differences: (resident, fixed, fresh, expected, backend) to figures by name, each within its limit if all is well.
    """

    op: str
    shape: str
    cost: Cost
    resident: Resident
    rotated_bytes: int
    calls: int
    place: Callable[[tuple[Array, ...], int], Any]
    fixed: Callable[[PRNGKeyArray], Any]
    fresh: Callable[[PRNGKeyArray, bool], Any]
    run: Callable[..., Any]
    differences: Callable[..., dict[str, Array]]
    limits: Mapping[str, float]
    in_place: bool = False
    expected: Callable[[Any, Any], Array] | None = None

    @property
    def name(self) -> str:
        """For progress and errors."""
        return f"{self.op} ({self.shape})"
