"""What a compiled step reads, by part, and the least that it could: on programs of a few lines."""

from dataclasses import replace

import pytest
from scheduled import HEAD

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import engine_config
from glm_dcp_jax.model.parameters import Source
from glm_dcp_jax.plan import glm52
from glm_dcp_jax.plan.bytes_read import Program, bytes_read, ratio
from glm_dcp_jax.plan.floor import Floor
from glm_dcp_jax.plan.gpus import target
from glm_dcp_jax.plan.kernel_costs import Workload
from glm_dcp_jax.plan.planned_model import planned_model
from glm_dcp_jax.plan.schedule import parse_schedule
from glm_dcp_jax.plan.sketch import all_leaves, sketch
from glm_dcp_jax.plan.times import expected_experts
from glm_dcp_jax.plan.weights import Leaf

MODEL = glm52.glm52()
RECORD = RecordFormat.named("nvfp4_ds_mla", MODEL)
WORKLOAD = Workload(RECORD, visible=4096)

ARGUMENTS = """\
  %w = bf16[100,100]{1,0} parameter(0), metadata={op_name="leaves[0]"}
  %head = bf16[50,100]{1,0} parameter(1), metadata={op_name="leaves[1]"}
  %pool = u8[10,1000,432]{2,1,0} parameter(2), metadata={op_name="pools.ckv"}
  %x = bf16[4,100]{1,0} parameter(3), metadata={op_name="flow.x"}
"""


def leaf(part: str, nbytes: int) -> Leaf:
    return Leaf((part,), part, part, Source((part,), (1,)), (1,), nbytes, (None,))


LEAVES = [leaf("attention", 20_000), leaf("head", 10_000)]


def read(*entry: str, computations: str = "", times: float = 1.0, weight=lambda position: 1.0) -> dict:
    lines = "\n".join(f"  {line}" for line in entry)
    text = f"{HEAD}{computations}ENTRY %main (w: bf16[100,100]) -> bf16[4,100] {{\n{ARGUMENTS}{lines}\n}}"
    found = bytes_read([Program(parse_schedule(text), LEAVES, weight, times)], WORKLOAD)
    return {part: nbytes for part, nbytes in found.items() if nbytes}


BODY = "%f (a: bf16[4,100], b: bf16[100,100]) -> bf16[4,100] {{\n{}\n}}\n\n"
PRODUCT = "%y = bf16[4,100]{1,0} fusion(%x, %w), kind=kCustom, calls=%f"


def test_a_product_reads_its_operands_and_belongs_to_its_weight():
    assert read(PRODUCT) == {"attention": 20_000 + 800}


def test_what_is_bitcast_is_still_the_weight():
    lines = ["%b = u32[50,50]{1,0} bitcast(%head)", "%y = f32[4,50]{1,0} custom-call(%x, %b)"]
    assert read(*lines) == {"head": 10_000 + 800}


def test_a_fusion_reads_what_it_gathers():
    body = BODY.format(
        "  %a = bf16[4,100]{1,0} parameter(0)\n  %b = bf16[100,100]{1,0} parameter(1)\n"
        "  ROOT %g = bf16[4,100]{1,0} gather(%b, %a), offset_dims={1}"
    )
    assert read(PRODUCT, computations=body) == {"attention": 800 + 800}


def test_a_fusion_that_slices_and_adds_reads_all():
    body = BODY.format(
        "  %a = bf16[4,100]{1,0} parameter(0)\n  %b = bf16[100,100]{1,0} parameter(1)\n"
        "  %g = bf16[4,100]{1,0} slice(%b), slice={[0:4], [0:100]}\n"
        "  ROOT %s = bf16[100,100]{1,0} add(%b, %b)"
    )
    assert read(PRODUCT, computations=body) == {"attention": 20_000}  # what is not used is not read


def test_a_fusion_that_writes_into_an_array_does_not_read_it():
    body = BODY.format(
        "  %a = bf16[4,100]{1,0} parameter(0)\n  %b = bf16[100,100]{1,0} parameter(1)\n"
        "  ROOT %u = bf16[100,100]{1,0} dynamic-update-slice(%b, %a)"
    )
    assert read(PRODUCT, computations=body) == {"attention": 800}


def loop(trips: str) -> tuple[str, list[str]]:
    body = (
        "%body (t: (bf16[4,100], bf16[50,100])) -> (bf16[4,100], bf16[50,100]) {\n"
        "  %t = (bf16[4,100]{1,0}, bf16[50,100]{1,0}) parameter(0)\n"
        "  %i = bf16[4,100]{1,0} get-tuple-element(%t), index=0\n"
        "  %h = bf16[50,100]{1,0} get-tuple-element(%t), index=1\n"
        "  %y = bf16[4,100]{1,0} custom-call(%i, %h)\n"
        "  ROOT %r = (bf16[4,100]{1,0}, bf16[50,100]{1,0}) tuple(%y, %h)\n}\n\n"
    )
    lines = [
        "%c = (bf16[4,100]{1,0}, bf16[50,100]{1,0}) tuple(%x, %head)",
        f"%l = (bf16[4,100]{{1,0}}, bf16[50,100]{{1,0}}) while(%c), condition=%cond, body=%body{trips}",
    ]
    return body, lines


def test_a_loop_reads_what_it_carries_at_every_turn():
    body, lines = loop(', backend_config={"known_trip_count":{"n":"7"}}')
    assert read(*lines, computations=body) == {"head": 7 * (10_000 + 800)}


def test_of_branches_the_one_that_reads_least_counts():
    branches = "".join(
        f"%{name} ({name}_p: bf16[100,100]) -> bf16[4,100] {{\n"
        f"  %{name}_p = bf16[100,100]{{1,0}} parameter(0)\n"
        + "".join(f"  %{name}{turn} = bf16[4,100]{{1,0}} custom-call(%{name}_p)\n" for turn in range(turns))
        + "}\n\n"
        for name, turns in (("much", 2), ("little", 1))
    )
    line = "%c = bf16[4,100]{1,0} conditional(%x, %w, %head), branch_computations={%much, %little}"
    assert read(line, computations=branches) == {"head": 20_000}  # as large as its parameter says


def test_layers_that_stand_for_others_count_more_and_programs_as_often_as_they_run():
    assert read(PRODUCT, weight=lambda position: 17.0 if position == 4 else 1.0) == {"attention": 17 * 20_800}
    assert read(PRODUCT, times=3.0) == {"attention": 3 * 20_800}


def test_parts_are_told_apart_by_pools_kernels_and_scopes():
    kernel = 'custom_call_target="__gpu$xla.gpu.triton", backend_config={ir = "", name = "topk_choose", num_warps = 4}'
    lines = [
        f"%k = u32[4,100]{{1,0}} custom-call(%x), {kernel}",
        '%p = u8[432]{0} dynamic-slice(%pool), metadata={op_name="jit(f)/dynamic_slice"}',
        '%s = bf16[4,100]{1,0} sort(%x), metadata={op_name="jit(f)/top_k/sort"}',
        "%r = bf16[4,100]{1,0} all-reduce(%x), replica_groups={{0,1}}, to_apply=%add",
        '%o = bf16[4,100]{1,0} copy(%r), metadata={op_name="jit(f)/mul"}',
    ]
    assert read(*lines) == {
        "index_keys": 1600 + 800,  # what the kernel declares: 4 bytes for each maximum
        "records": 432,
        "collectives": 800,
        "other": 800,
    }


@pytest.fixture(scope="module")
def floor() -> Floor:
    config = engine_config("glm-5.2-fp8", tensor_parallel_size=8, decode_context_parallel_size=8)
    blueprint = sketch(config, planned_model(config), target("8xH200"))
    leaves = all_leaves(blueprint, has_mtp=True)
    return Floor(MODEL, leaves, Layout(64, 8), RECORD, "bulk", requests=1, rows=4, context=131_072, drafts=3)


def test_the_floor_is_used_weights_records_and_index_keys(floor):
    step = floor.step()
    expert = 3 * 6144 * 2048
    assert step["routed_experts"] == pytest.approx(75 * expected_experts(4, 256, 8) * expert / 8, rel=1e-3)
    replicated = 78 * (2048 + 576) * 6144
    shared_out = 78 * (16_384 * 2048 + 6144 * 16_384 + 2 * 28_672 * 512) / 8  # kv_b is dequantised
    assert step["attention"] == pytest.approx(replicated + shared_out, rel=1e-3)
    assert step["head"] == 154_880 * 6144 * 2 / 8
    assert step["embedding"] == 4 * 6144 * 2
    assert step["records"] == 78 * 2048 * 1.75 * 432
    assert step["index_keys"] == 21 * 131_072 * 132
    assert sum(step.values()) / 1e9 == pytest.approx(15.5, abs=0.1)


def test_on_path_queries_each_rank_reads_the_records_that_it_owns(floor):
    assert replace(floor, path="queries").step()["records"] == floor.step()["records"] / 8


def test_drafts_read_the_mtp_layer_and_the_head_each_time(floor):
    drafting = floor.drafting()
    assert drafting["head"] == 3 * floor.step()["head"]
    assert drafting["index_keys"] == 131_072 * 132 / 8  # once: further drafts share the selection
    routed = (expected_experts(4, 256, 8) + 2 * 8) * 3 * 6144 * 2048 / 8
    assert drafting["routed_experts"] == pytest.approx(routed, rel=1e-3)


def test_the_ratio_is_of_sums():
    read = {"a": 3.0, "b": 1.0, "collectives": 2.0}
    assert ratio(read, {"a": 2.0}) == 2.0
    assert ratio(read, {"a": 2.0}, sent=True) == 3.0
