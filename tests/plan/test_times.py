"""Modelled times of instructions: which estimate is taken, and what a kernel's shapes in HLO come to.

The memory moves 1,000 bytes a microsecond.
"""

import jax.numpy as jnp
import pytest
from scheduled import program

from glm_dcp_jax import plan
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.kernels.index_keys.cost import write_cost as index_keys_cost
from glm_dcp_jax.kernels.index_scores.cost import cost as index_scores_cost
from glm_dcp_jax.kernels.records.cost import pack_cost, write_cost
from glm_dcp_jax.kernels.sparse_attention.cost import cost as attention_cost
from glm_dcp_jax.plan.kernel_costs import Workload
from glm_dcp_jax.plan.times import Times, expected_experts

RECORD = RecordFormat.sized("nvfp4_ds_mla", 512, 64, 128)
WORKLOAD = Workload(RECORD, visible=4096)
TIMES = Times(WORKLOAD, bandwidth=1e9)


def estimate(line: str, *operands: str, times: Times = TIMES) -> tuple[float, str]:
    """(microseconds, basis) of an instruction `line` whose operands are %o0, %o1, ... of these shapes."""
    inputs = [f"%o{number} = {shape} parameter({number})" for number, shape in enumerate(operands)]
    computation = program(*inputs, line).entry
    shapes = {instruction.name: instruction.shape for instruction in computation.instructions}
    seconds, basis, _ = times.of(computation.instructions[-1], shapes)
    return round(seconds * 1e6, 6), basis


def fusion(kind: str = "", **models: tuple[float, float]) -> str:
    """models: (total, memory) microseconds by name, with _ for -; `performance` has no name in HLO."""
    costs = ",".join(
        f'{{"exec_time_us":{total},"compute_time_us":{total},"memory_access_time_us":{memory},'
        f'"name":"{"" if name == "performance" else name.replace("_", "-")}"}}'
        for name, (total, memory) in models.items()
    )
    told = f'"fusion_backend_config":{{"kind":"{kind}"}},' if kind else ""
    return (
        f"%k = u8[1000]{{0}} fusion(%o0), kind=kLoop, calls=%f, "
        f'backend_config={{{told}"reification_cost":[{costs}]}}'
    )


def kernel(name: str, result: str, operands: int) -> str:
    given = ", ".join(f"%o{number}" for number in range(operands))
    return (
        f'%k = {result} custom-call({given}), custom_call_target="__gpu$xla.gpu.triton", '
        f'backend_config={{ir = "ML\\EF", name = "{name}", num_warps = 4}}'
    )


def us(cost) -> float:
    return round(cost.bytes_moved / 1e3, 6)


def test_a_fusion_takes_what_xla_says():
    assert estimate(fusion(performance=(3, 2), sol=(0.01, 0)), "u8[8]{0}") == (3, "xla")


def test_of_two_models_of_a_fusion_the_quicker_counts():
    models = {"performance": (3646.1, 3575.3), "indexing_cost_model": (0.6, 0.5)}
    assert estimate(fusion("__triton", **models), "u8[8]{0}") == (0.6, "xla")


def test_a_matrix_product_takes_as_long_as_its_memory():
    models = {
        "performance": (80, 49),
        "experimental_gemm_cost_model": (145, 81),
        "indexing_cost_model": (90, 89),
    }
    assert estimate(fusion("__triton_nested_gemm_fusion", **models), "u8[8]{0}") == (49, "xla")


def test_a_matrix_product_whose_weights_one_model_reads_again_and_again_takes_what_the_other_says():
    models = {"performance": (14.216, 14.203), "indexing_cost_model": (0.98075, 0.95475)}
    assert estimate(fusion("__triton_nested_gemm_fusion", **models), "u8[8]{0}") == (0.98075, "xla")


@pytest.mark.parametrize("opcode", ["copy", "fusion", "sort", "dynamic-slice"])
def test_without_a_model_bytes_count(opcode):
    assert estimate(f"%k = u8[1000]{{0}} {opcode}(%o0, %o1)", "u8[2000]{0}", "f32[250]{0}") == (4, "bytes")


def test_a_copy_that_runs_beside_takes_its_time_at_its_start():
    line = "%k = (u8[1000]{0}, u8[1000]{0}, u32[]) copy-start(%o0)"
    assert estimate(line, "u8[1000]{0}") == (2, "bytes")


def test_a_library_product_is_its_bytes_without_the_workspace():
    line = '%k = (bf16[500]{0}, s8[4194304]{0}) custom-call(%o0), custom_call_target="__cublas$gemm"'
    assert estimate(line, "u8[2000]{0}") == (3, "bytes")


@pytest.mark.parametrize(
    "line",
    [
        '%k = u8[8]{0} custom-call(%o0), custom_call_target="mystery"',
        kernel("a_kernel_of_others", "u8[8]{0}", 1),
        "%k = u8[8]{0} async-start(%o0)",
    ],
)
def test_what_nothing_is_known_of_is_unknown(line):
    assert estimate(line, "u8[2000]{0}") == (0, "unknown")


@pytest.mark.parametrize("opcode", ["bitcast", "get-tuple-element", "tuple", "async-done"])
def test_names_for_data_take_no_time(opcode):
    assert estimate(f"%k = u8[8]{{0}} {opcode}(%o0)", "u8[2000]{0}") == (0, "nothing")


def test_every_kernel_takes_some_time_if_asked_for():
    slow = Times(WORKLOAD, bandwidth=1e9, least_seconds=2e-6)
    assert estimate(fusion(performance=(3, 2)), "u8[8]{0}", times=slow) == (3, "xla")
    assert estimate(fusion(performance=(0.1, 0.1)), "u8[8]{0}", times=slow) == (2, "xla")
    assert estimate("%k = u8[8]{0} bitcast(%o0)", "u8[8]{0}", times=slow) == (0, "nothing")


POOL = "u32[14,16448,108]{2,1,0}"


def test_packing_moves_records_not_the_pool():
    line = kernel("pack_records", "u32[3,576,108]{2,1,0}", 3)
    assert estimate(line, "s32[3]{0}", "s32[576]{0}", POOL) == (us(pack_cost(3, 576, 432)), "declared")


def test_unpacking_is_the_same():
    operands = "s32[14]{0}", "s32[4]{0}", "u32[14,4,108]{2,1,0}", POOL
    assert estimate(kernel("unpack_records", POOL, 4), *operands) == (us(pack_cost(14, 4, 432)), "declared")


@pytest.mark.parametrize("scales", [False, True])
def test_writing_records_reads_latents_and_roped_keys(scales):
    operands = ["s32[14]{0}", "s32[4]{0}", "bf16[14,4,512]{2,1,0}", "bf16[14,4,64]{2,1,0}"]
    operands += ["f32[14]{0}"] * scales + [POOL]
    expected = us(write_cost(14, 4, RECORD, 2, scales))
    assert estimate(kernel("write_records", POOL, len(operands)), *operands) == (expected, "declared")


def test_writing_index_keys():
    operands = "s32[1]{0}", "s32[4]{0}", "bf16[4,128]{1,0}", "u32[5,2056,2112]{2,1,0}"
    expected = us(index_keys_cost(4, 2, RECORD.index))
    assert estimate(kernel("write_index_keys", operands[3], 4), *operands) == (expected, "declared")


SCORE_OPERANDS = (
    "bf16[1,4,32,128]{3,2,1,0}",
    "f32[1,4,32]{2,1,0}",
    "u32[5,2056,2112]{2,1,0}",
    "s32[1]{0}",
    "s32[1,256]{1,0}",
    "s32[1,4]{1,0}",
)
SCORES = kernel("index_scores", "f32[1,4,131072]{2,1,0}", 6)


def test_scores_read_the_keys_that_are_visible():
    cost = index_scores_cost(1, 4, 32, 131_072, 4096, RECORD.index, 2)
    assert estimate(SCORES, *SCORE_OPERANDS) == (us(cost), "declared")


def test_products_count_where_they_take_longer_than_bytes():
    cost = index_scores_cost(1, 4, 32, 131_072, 4096, RECORD.index, 2)
    slow = Times(WORKLOAD, bandwidth=1e15, products=1e12)
    assert estimate(SCORES, *SCORE_OPERANDS, times=slow) == (round(cost.flops / 1e6, 6), "declared")


ATTENTION_OPERANDS = (
    "bf16[4,8,576]{2,1,0}",
    "u32[1,4608,108]{2,1,0}",
    "s32[1]{0}",
    "s32[4,2048]{1,0}",
    "u32[4,4,108]{2,1,0}",
    "pred[4,4]{1,0}",
)
PARTIALS = "(f32[4,33,8,512]{3,2,1,0}, f32[4,33,8]{2,1,0})"


@pytest.mark.parametrize(
    ("operands", "options"),
    [
        (ATTENTION_OPERANDS, {"current": 4}),
        (ATTENTION_OPERANDS[:4], {}),
        ((*ATTENTION_OPERANDS[:4], "f32[1]{0}"), {"outer_scale": True}),
        (
            (*ATTENTION_OPERANDS[:4], "f32[1]{0}", *ATTENTION_OPERANDS[4:]),
            {"outer_scale": True, "current": 4},
        ),
    ],
)
def test_attention_costs_what_the_op_declares(operands, options):
    cost = attention_cost(4, 8, 2048, RECORD, jnp.bfloat16, **options)
    assert estimate(kernel("sparse_attention", PARTIALS, len(operands)), *operands) == (us(cost), "declared")


def test_a_rank_that_owns_a_quarter_attends_over_a_quarter():
    quarter = Times(Workload(RECORD, visible=4096, listed=0.25), bandwidth=1e9)
    cost = attention_cost(4, 8, 2048, RECORD, jnp.bfloat16, current=4, listed=0.25)
    line = kernel("sparse_attention", PARTIALS, 6)
    assert estimate(line, *ATTENTION_OPERANDS, times=quarter) == (us(cost), "declared")


def test_merging_partials_is_part_of_attention():
    operands = "f32[4,33,8,512]{3,2,1,0}", "f32[4,33,8]{2,1,0}"
    line = kernel("combine", "(f32[4,8,512]{2,1,0}, f32[4,8]{1,0})", 2)
    assert estimate(line, *operands) == (0, "declared")


def test_top_k_reads_all_scores_for_the_maxima_of_groups():
    line = kernel("topk_maxima", "(u32[4,512]{1,0}, u32[4,64]{1,0})", 2)
    of_programs = 4 * 4 * 2  # each reads how many are visible
    assert estimate(line, "f32[4,4096]{1,0}", "s32[4]{0}") == (
        (4 * 4 * 4096 + of_programs + 4 * 4 * 576) / 1e3,
        "declared",
    )


def test_top_k_reads_all_maxima_for_those_of_larger_groups():
    assert estimate(kernel("topk_maxima", "u32[4,512]{1,0}", 1), "u32[4,4096]{1,0}") == (
        4 * 4 * (4096 + 512) / 1e3,
        "declared",
    )


@pytest.mark.parametrize(
    ("operands", "read"),
    [
        (("u32[4,512]{1,0}",), 512),
        (("u32[4,4096]{1,0}", "s32[4,64]{1,0}"), 8 * 64 + 64),
        (("f32[4,4096]{1,0}", "s32[4]{0}", "s32[4,64]{1,0}"), 8 * 64 + 64 + 1),
        (("f32[4,4096]{1,0}", "s32[4]{0}"), 4096 + 1),
    ],
    ids=["largest groups", "groups in groups", "columns in groups", "columns"],
)
def test_top_k_reads_members_of_the_groups_that_it_chose(operands, read):
    line = kernel("topk_choose", "s32[4,64]{1,0}", len(operands))
    assert estimate(line, *operands) == (4 * 4 * (read + 64) / 1e3, "declared")


def test_a_gpu_brings_its_data_sheet():
    for gpu in plan.known_gpus():
        target = plan.target(f"1x{gpu}")
        times = Times.on(target, WORKLOAD)
        assert times.bandwidth == target.memory_bandwidth
        assert times.products is not None


def test_expected_experts():
    assert expected_experts(1, 256, 8) == pytest.approx(8)
    assert expected_experts(4, 256, 8) == pytest.approx(30.5, abs=0.1)
    assert expected_experts(10_000, 256, 8) == pytest.approx(256)
