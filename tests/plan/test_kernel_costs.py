"""What kernels over stored weights cost in a compiled step, from the shapes that HLO shows of them."""

import jax
import jax.numpy as jnp
import pytest

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels import weight_tiles
from glm_dcp_jax.kernels.experts import cost as experts
from glm_dcp_jax.kernels.experts.tiling import tiling
from glm_dcp_jax.kernels.linear import cost as linear
from glm_dcp_jax.kernels.weights import Fp8Weight, Nvfp4Weight, PlainWeight, Weight
from glm_dcp_jax.plan.kernel_costs import Workload, declared_cost
from glm_dcp_jax.plan.schedule import ArrayShape

WORKLOAD = Workload(RecordFormat.sized("nvfp4_ds_mla", 512, 64, 128), visible=4096)
KINDS = ("plain", "fp8", "nvfp4")
NAMES = {"bfloat16": "bf16", "float32": "f32", "uint8": "u8", "uint32": "u32", "int32": "s32"}


def weight(kind: str, *shape: int) -> Weight:
    *stack, outputs, inputs = shape

    def array(dtype, *sizes: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*stack, *sizes), dtype)

    if kind == "plain":
        return PlainWeight(array(jnp.bfloat16, outputs, inputs))
    if kind == "fp8":
        codes = array(jnp.float8_e4m3fn, outputs, inputs)
        return Fp8Weight(codes, array(jnp.float32, outputs // 128, inputs // 128))
    codes, scales = array(jnp.uint8, outputs, inputs // 2), array(jnp.float8_e4m3fn, outputs, inputs // 16)
    return Nvfp4Weight(codes, scales, array(jnp.float32))


def shapes(*arrays: jax.ShapeDtypeStruct | tuple) -> list[ArrayShape]:
    """Arrays as HLO writes them; (dtype, *sizes) or what jax knows of one."""
    found = []
    for array in arrays:
        dtype, sizes = (array[0], array[1:]) if isinstance(array, tuple) else (array.dtype, array.shape)
        found.append(ArrayShape(NAMES[jnp.dtype(dtype).name], tuple(sizes)))
    return found


def stored(weight: Weight) -> tuple[jax.ShapeDtypeStruct, ...]:
    return jax.eval_shape(weight_tiles.as_stored, weight)


@pytest.mark.parametrize("rows", [4, 32, 2048])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_maps(kind: str, rows: int) -> None:
    for name, matrices in (("linear", 1), ("gated_linear", 2)):
        own = weight(kind, 18, *[2] * (matrices - 1), 1536, 6144)
        operands = shapes(("bfloat16", rows, 6144), ("int32", 1), *stored(own))
        form = weight_tiles.form_of(own, jnp.bfloat16)
        for dtype, itemsize in (("bfloat16", 2), ("float32", 4)):
            results = shapes((dtype, 1, 1, rows, 1536))
            expected = linear.cost(rows, form, matrices, 2, itemsize)
            assert declared_cost(name, operands, results, WORKLOAD) == expected


@pytest.mark.parametrize("ranks", [1, 8])
@pytest.mark.parametrize("rows", [1, 4, 512])
@pytest.mark.parametrize("kind", KINDS)
def test_routed_experts_read_those_that_are_used(kind: str, rows: int, ranks: int) -> None:
    local, width = 256 // ranks, 256 * ranks
    gate_up, down = weight(kind, 18, local, 2, width, 6144), weight(kind, 18, local, 6144, width)
    forms = [weight_tiles.form_of(each, jnp.bfloat16) for each in (gate_up, down)]
    cut = tiling(rows, 8, local, *forms)
    plan, chosen = ("int32", cut.tiles, cut.rows), ("int32", 8 * rows)
    first = shapes(plan, chosen, ("int32", 1), ("bfloat16", rows, 6144), *stored(gate_up))
    inner = ("bfloat16", 8 * rows, width)
    second = shapes(*(plan, chosen, ("int32", 1), ("int32", 1), inner, ("float32", 8 * rows)), *stored(down))
    for used in (None, 5):
        workload = Workload(WORKLOAD.record, visible=4096, expert_ranks=ranks, used_experts=used)
        share = experts.expected_experts(rows, 256, 8) / ranks if used is None else used
        costs = [
            declared_cost("experts_gate_up", first, shapes(inner), workload),
            declared_cost("experts_down", second, shapes(("float32", 8 * rows, 6144)), workload),
        ]
        expected = experts.cost(rows, 8, local, *forms, share, 2)
        for found, wanted in zip(map(sum, zip(*costs, strict=True)), expected, strict=True):
            assert found == pytest.approx(wanted, rel=1e-6)


def test_a_turn_of_down_costs_its_outputs() -> None:
    own = weight("fp8", 256, 6144, 256)
    operands = shapes(
        *(("int32", 512, 64), ("int32", 16384), ("int32", 1), ("int32", 1)),
        *(("bfloat16", 16384, 256), ("float32", 16384)),
        *stored(own),
    )
    whole, half = (
        declared_cost("experts_down", operands, shapes(("float32", 16384, outputs)), WORKLOAD)
        for outputs in (6144, 3072)
    )
    assert whole is not None and half is not None
    assert (half.flops, half.bytes_written) == (whole.flops / 2, whole.bytes_written / 2)
