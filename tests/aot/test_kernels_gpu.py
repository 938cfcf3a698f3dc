"""Every Triton kernel at GLM-5.2's sizes, compiled for GPUs that are not here, and what the compiler made of it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from glm_dcp_jax import plan
from glm_dcp_jax.cache.records import IndexKeyFormat, RecordFormat
from glm_dcp_jax.kernels.index_keys import write_index_keys
from glm_dcp_jax.kernels.records import pack_records, unpack_records, write_records
from glm_dcp_jax.kernels.selection import select_paged
from glm_dcp_jax.kernels.sparse_attention import sparse_attention

TARGETS = {"H200": "sm_90a", "B200": "sm_100a", "RTX-PRO-6000": "sm_120"}
SHARED_MEMORY = {"H200": 227 * 1024, "B200": 227 * 1024, "RTX-PRO-6000": 99 * 1024}
FORMATS = {
    "bfloat16": RecordFormat.sized("bfloat16", 512, 64, 128),
    "fp8_ds_mla": RecordFormat.sized("fp8_ds_mla", 512, 64, 128),
    "nvfp4_ds_mla": RecordFormat.sized("nvfp4_ds_mla", 512, 64, 128),
    "nvfp4_ds_mla fp8 rope": RecordFormat.sized("nvfp4_ds_mla", 512, 64, 128, "fp8"),
}
LAYERS, FULL_LAYERS, SLOTS, TOP_K, ROWS = 78, 21, 131_072, 2048, 8
HEADS = (64, 16, 8)
BLOCK, WORLD = 64, 4
INDEX_KEYS = IndexKeyFormat("e4m3", 128)


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def pool_of(record: RecordFormat) -> jax.ShapeDtypeStruct:
    return array(record.dtype, LAYERS, SLOTS, record.width)


integers, halves, floats = (
    partial(array, jnp.int32),
    partial(array, jnp.bfloat16),
    partial(array, jnp.float32),
)


def index_pool() -> jax.ShapeDtypeStruct:
    return array(jnp.uint8, *INDEX_KEYS.pool_shape(FULL_LAYERS, SLOTS * WORLD, BLOCK))


def moves(record: RecordFormat) -> tuple[Callable, tuple]:
    """Three planes packed, unpacked into another pool, and new records of every layer written."""

    def run(pool, planes, slots, layers, latent, rope_key):
        packed = pack_records(pool, planes, slots, backend="triton")
        pool = unpack_records(pool, planes, slots, packed, backend="triton")
        return packed, write_records(pool, layers, slots[:ROWS], latent, rope_key, record, backend="triton")

    return run, (
        pool_of(record),
        integers(3),
        integers(TOP_K),
        integers(LAYERS),
        halves(LAYERS, ROWS, 512),
        halves(LAYERS, ROWS, 64),
    )


def attention(record: RecordFormat, heads: int) -> tuple[Callable, tuple]:
    def run(q, pool, plane, slots, current, current_valid):
        return sparse_attention(
            q, pool, plane, slots, record, 1 / 16, None, current, current_valid, backend="triton"
        )

    return run, (
        halves(ROWS, heads, 576),
        pool_of(record),
        integers(),
        integers(ROWS, TOP_K),
        array(record.dtype, ROWS, 4, record.width),
        array(jnp.bool_, ROWS, 4),
    )


def shared_attention(record: RecordFormat, drafts: int) -> tuple[Callable, tuple]:
    """Requests of 1 + drafts rows of 8 heads, which share a list."""
    rows = 1 + drafts

    def run(q, pool, plane, slots, seen_by, current, current_seen_by):
        own = (None, current, current_seen_by)
        return sparse_attention(
            q, pool, plane, slots, record, 1 / 16, *own, "triton", seen_by=seen_by, sharers=rows
        )

    return run, (
        halves(ROWS, rows * 8, 576),
        pool_of(record),
        integers(),
        integers(ROWS, rows * TOP_K),
        integers(ROWS, rows * TOP_K),
        array(record.dtype, ROWS, rows, record.width),
        integers(ROWS, rows),
    )


def selection() -> tuple[Callable, tuple]:
    """New index keys are written, then scored and the best 2,048 of 131,072 chosen."""

    def run(pool, layer, slots, keys, q, weights, page_table, visible):
        pool = write_index_keys(pool, layer, slots, keys, INDEX_KEYS, BLOCK, backend="triton")
        chosen = select_paged(
            *(q, weights, pool, layer, page_table, visible, TOP_K, INDEX_KEYS, BLOCK * WORLD, BLOCK, False),
            backend="triton",
        )
        return pool, chosen

    pages = SLOTS // (BLOCK * WORLD)
    return run, (
        index_pool(),
        integers(),
        integers(ROWS),
        halves(ROWS, 128),
        halves(ROWS, 1, 32, 128),
        floats(ROWS, 1, 32),
        integers(ROWS, pages),
        integers(ROWS, 1),
    )


PROGRAMS = (
    {f"moves {name}": partial(moves, record) for name, record in FORMATS.items()}
    | {
        f"attention {name} {heads} heads": partial(attention, record, heads)
        for name, record in FORMATS.items()
        for heads in HEADS
        if heads == 64 or name == "nvfp4_ds_mla"
    }
    | {
        f"attention {name} of {1 + drafts} rows": partial(shared_attention, FORMATS[name], drafts)
        for name, drafts in (("bfloat16", 3), ("fp8_ds_mla", 3), ("nvfp4_ds_mla", 1), ("nvfp4_ds_mla", 3))
    }
    | {"selection": selection}
)
DONATED = {"moves": 0, "selection": 0}


SLOW = {f"attention {name} of 4 rows" for name in ("bfloat16", "fp8_ds_mla")} | {
    "attention nvfp4_ds_mla of 2 rows",
    "attention nvfp4_ds_mla 16 heads",
    "attention nvfp4_ds_mla fp8 rope 64 heads",
}
"""Between others in all that matters."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((gpu, name), marks=pytest.mark.slow if name in SLOW else [], id=f"{gpu} {name}")
        for gpu in TARGETS
        for name in PROGRAMS
    ],
)
def compiled(request, absent_gpus) -> tuple[str, str, plan.Compiled]:
    """(gpu, program, what came of it)."""
    gpu, name = request.param
    run, shapes = PROGRAMS[name]()
    absent_gpus(gpu, 1)
    options = {"donate_argnums": 0} if name.split()[0] in DONATED else {}
    return gpu, name, plan.compile_for(run, f"1x{gpu}", *shapes, **options)


def kernels(program: plan.Compiled, prefix: str) -> list[plan.PtxKernel]:
    found = [kernel for name, kernel in program.kernels.items() if name.startswith(prefix)]
    assert found, f"no kernel {prefix} among {list(program.kernels)}"
    return found


def test_kernels_are_as_the_hardware_wants_them(compiled):
    """16-byte accesses of records, tensor cores in attention and scores, no spills, shared memory that there is."""
    gpu, name, program = compiled
    for kernel in program.kernels.values():
        assert kernel.architecture == TARGETS[gpu]
        assert kernel.local_accesses == 0
        assert kernel.launch is None or kernel.launch.shared_memory_bytes <= SHARED_MEMORY[gpu]
    if name.startswith("moves"):
        for kernel in (*kernels(program, "pack_records"), *kernels(program, "unpack_records")):
            assert kernel.vector_loads and kernel.vector_stores
        kernels(program, "write_records")
    elif name.startswith("attention"):
        for kernel in kernels(program, "sparse_attention"):
            assert kernel.vector_loads and kernel.tensor_core_instructions
    else:
        for kernel in kernels(program, "index_scores"):
            assert kernel.vector_loads and kernel.tensor_core_instructions
        kernels(program, "topk"), kernels(program, "write_index_keys")
        assert "[8,131072]" not in "".join(line for line in program.hlo.splitlines() if " sort(" in line)
    resources = program.resources()
    assert resources is not None, "ptxas comes with the extra `aot`"
    for kernel, used in resources.items():
        assert used.spill_stores == used.spill_loads == 0, f"{kernel} spills: {used}"


def test_pools_are_neither_copied_nor_sliced(compiled):
    gpu, name, program = compiled
    pool = PROGRAMS[name]()[1][1 if name.startswith("attention") else 0]
    size = pool.size * pool.dtype.itemsize
    if name.split()[0] in DONATED:
        assert program.memory.alias_bytes == size
    assert program.memory.temp_bytes < size / LAYERS
