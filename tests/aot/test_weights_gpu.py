"""Kernels over stored weights at GLM-5.2's sizes with 8 ranks, compiled for GPUs that are not here."""

import math
import re
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from glm_dcp_jax import plan
from glm_dcp_jax.kernels.experts import routed_experts
from glm_dcp_jax.kernels.linear import gated_linear, linear
from glm_dcp_jax.kernels.row_blocks import WORKSPACE_BYTES
from glm_dcp_jax.kernels.weights import Fp8Weight, Nvfp4Weight, PlainWeight, Weight, at, nbytes

TARGETS = {"H200": "sm_90a", "B200": "sm_100a", "RTX-PRO-6000": "sm_120"}
SHARED_MEMORY = {"H200": 227 * 1024, "B200": 227 * 1024, "RTX-PRO-6000": 99 * 1024}
GROUPS, EXPERTS, HIDDEN, WIDTH, EACH = 18, 256, 6144, 256, 8
ROUNDED = 8
"""Bytes that ptxas may spill of its own accord: at times it does so to end at 128 registers, or 56, of 255."""


def array(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def weight(kind: str, *shape: int) -> Weight:
    """FP8 has blocks of 128, or of 64 rows where there are 576."""
    *stack, outputs, inputs = shape
    if kind == "plain":
        return PlainWeight(array(jnp.bfloat16, *shape))
    if kind == "fp8":
        rows = outputs // (128 if outputs % 128 == 0 else 64)
        scales = array(jnp.float32, *stack, rows, inputs // 128)
        return Fp8Weight(array(jnp.float8_e4m3fn, *shape), scales)
    return Nvfp4Weight(
        array(jnp.uint8, *stack, outputs, inputs // 2),
        array(jnp.float8_e4m3fn, *stack, outputs, inputs // 16),
        array(jnp.float32, *stack),
    )


def maps(kind: str, rows: int) -> tuple[Callable, tuple, int]:
    """(function, its shapes, bytes of its smallest matrix): a scan over maps of attention and of a dense layer."""

    def run(x, weights):
        def group(x, number):
            q_a, kv_a, o, gate_up, down = weights
            latent = linear(x, q_a, number, backend="triton")
            extra = linear(x, kv_a, number, jnp.float32, backend="triton")
            x = x + linear(latent, o, number, backend="triton") + jnp.max(extra).astype(x.dtype)
            inner = gated_linear(x, gate_up, number, backend="triton")
            return x + linear(inner, down, number, backend="triton"), None

        return jax.lax.scan(group, x, jnp.arange(GROUPS))[0]

    weights = (
        weight(kind, GROUPS, 2048, HIDDEN),
        weight(kind, GROUPS, 576, HIDDEN),
        weight(kind, GROUPS, HIDDEN, 2048),
        weight(kind, GROUPS, 2, 1536, HIDDEN),
        weight(kind, GROUPS, HIDDEN, 1536),
    )
    smallest = min(nbytes(each) // GROUPS for each in weights if each is not weights[1])
    return run, (array(jnp.bfloat16, rows, HIDDEN), weights), smallest


def experts(kind: str, rows: int, groups: int = GROUPS) -> tuple[Callable, tuple, int]:
    """As `maps`: a scan over groups of routed experts."""

    def run(x, ids, factors, gate_up, down):
        def group(x, number):
            out = routed_experts(x, ids, factors, gate_up, down, number, backend="triton")
            return x + out.astype(x.dtype), None

        return jax.lax.scan(group, x, jnp.arange(groups))[0]

    gate_up, down = (
        weight(kind, groups, EXPERTS, 2, WIDTH, HIDDEN),
        weight(kind, groups, EXPERTS, HIDDEN, WIDTH),
    )
    routing = array(jnp.int32, rows, EACH), array(jnp.float32, rows, EACH)
    return run, (array(jnp.bfloat16, rows, HIDDEN), *routing, gate_up, down), nbytes(down) // groups


PAIRS = [("H200", "fp8"), ("B200", "nvfp4"), ("RTX-PRO-6000", "nvfp4")]
OTHERS = [(gpu, kind) for gpu in TARGETS for kind in ("plain", "fp8", "nvfp4") if (gpu, kind) not in PAIRS]
ROWS = (4, 2048)
MORE_ROWS = (1, 8, 16, 32, 64, 4096)
CASES = [(gpu, kind, rows) for gpu, kind in PAIRS for rows in ROWS]
SLOW = [(gpu, kind, rows) for gpu, kind in OTHERS for rows in ROWS] + [
    (gpu, kind, rows) for gpu, kind in PAIRS + OTHERS for rows in MORE_ROWS
]
PROGRAMS = {"maps": maps, "experts": experts}


def names(case: tuple) -> str:
    return "-".join(map(str, case))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(
            (program, *case), marks=[pytest.mark.slow] if case in SLOW else [], id=names((program, *case))
        )
        for case in CASES + SLOW
        for program in PROGRAMS
        if not (case[1] == "plain" and case[2] > 64)  # left to XLA
    ],
)
def compiled(request, absent_gpus) -> tuple[str, str, int, int, plan.Compiled]:
    """(program, gpu, rows, bytes of the smallest matrix, what came of it)."""
    program, gpu, kind, rows = request.param
    absent_gpus(gpu, 1)
    run, shapes, matrix = PROGRAMS[program](kind, rows)
    return program, gpu, rows, matrix, plan.compile_for(run, f"1x{gpu}", *shapes)


def own_kernels(program: plan.Compiled) -> dict[str, plan.PtxKernel]:
    prefixes = "linear", "gated_linear", "experts_"
    return {name: kernel for name, kernel in program.kernels.items() if name.startswith(prefixes)}


def test_kernels_are_as_the_hardware_wants_them(compiled) -> None:
    """Weights are read 16 bytes at a time, multiplied by tensor cores, and nothing spills."""
    program, gpu, rows, _, result = compiled
    kernels = own_kernels(result)
    assert len(kernels) >= 2
    resources = result.resources()
    assert resources is not None, "ptxas comes with the extra `aot`"
    for name, kernel in kernels.items():
        assert kernel.architecture == TARGETS[gpu]
        assert kernel.vector_loads and kernel.tensor_core_instructions, name
        assert kernel.local_accesses == 0
        assert kernel.launch is not None and kernel.launch.shared_memory_bytes <= SHARED_MEMORY[gpu]
        assert max(resources[name].spill_stores, resources[name].spill_loads) <= ROUNDED, (
            f"{name}: {resources[name]}"
        )
        if (
            rows <= 16 and math.prod(kernel.launch.grid) > 160
        ):  # several programs are to fit into a multiprocessor
            assert kernel.launch.shared_memory_bytes <= 48 * 1024


def test_no_weight_is_copied(compiled) -> None:
    """Inside a scan over groups, with the stacks outside of it."""
    program, _, rows, matrix, result = compiled
    if program == "experts":
        assert result.memory.temp_bytes < WORKSPACE_BYTES + 2**26 + 2**16 * rows
        if rows <= 32:
            assert result.memory.temp_bytes < matrix / 16
    elif rows <= 32:
        assert result.memory.temp_bytes < matrix
    else:  # values of all rows, between the maps
        assert result.memory.temp_bytes < 12 * rows * HIDDEN * 4
    copied = re.findall(r"= (?:u8|u32|f8e4m3fn|bf16)\[18,[\d,]*\]\S* (?:copy|fusion|transpose)\(", result.hlo)
    assert not copied


def test_decoding_takes_codes_two_at_a_time(compiled) -> None:
    program, gpu, rows, _, result = compiled
    for kernel in own_kernels(result).values():
        decoded = len(re.findall(r"fma\.rn\.bf16x2", kernel.body))
        plain = "cvt.rn.f16x2.e4m3x2" not in kernel.body and decoded == 0
        assert plain or decoded >= 16


@pytest.mark.parametrize("groups", [4, 18], ids=["between-2-and-4-GiB", "beyond-4-GiB"])
def test_offsets_reach_the_whole_stack(absent_gpus, groups: int) -> None:
    """Between 2 and 4 GiB, Pallas has 32-bit offsets of elements, and above 64-bit ones."""
    absent_gpus("H200", 1)
    run, shapes, _ = experts("fp8", 4, groups)
    size = nbytes(shapes[3].codes)
    assert (2**31 < size < 2**32) if groups == 4 else size > 2**32
    body = plan.compile_for(run, "1xH200", *shapes).kernels["experts_gate_up"].body
    of_bytes, of_words = WIDTH * HIDDEN, WIDTH * HIDDEN // 4
    wide = re.findall(rf"(?:mul\.wide|mad\.wide)\.[us]32 .*, {of_bytes}\b", body)
    narrow_words = re.findall(rf"(?:mul|mad)\.lo\.[us]32 .*, {of_words}\b", body)
    narrow_bytes = re.findall(rf"(?:mul|mad)\.lo\.[us]32 .*, {of_bytes}\b", body)
    assert not narrow_bytes
    assert narrow_words and not wide if groups == 4 else wide and not narrow_words


def test_shapes_of_one_matrix_need_no_stack(absent_gpus) -> None:
    absent_gpus("H200", 1)
    one = jax.eval_shape(lambda stack: at(stack, 0), weight("fp8", 2, 2048, HIDDEN))
    result = plan.compile_for(
        partial(linear, backend="triton"), "1xH200", array(jnp.bfloat16, 4, HIDDEN), one
    )
    assert result.memory.temp_bytes == 0 and list(result.kernels) == ["linear"]
