"""GLM-5.2's published forms: their parameters, tensors and bytes, counted on the abstract tree."""

from dataclasses import replace

import pytest

from glm_dcp_jax.config import ConfigError, EngineConfig, ParallelConfig, engine_config
from glm_dcp_jax.plan.gpus import target
from glm_dcp_jax.plan.planned_model import PlannedModel, planned_model
from glm_dcp_jax.plan.presets import nvfp4_formats, preset
from glm_dcp_jax.plan.sketch import all_leaves, sketch
from glm_dcp_jax.plan.weights import Parameters, bytes_by_part, parameters

TP = 8


def counted(planned: PlannedModel, **flags) -> Parameters:
    config = EngineConfig("glm-5.2", ParallelConfig(TP, TP, dcp_project_first="never"), **flags)
    leaves = all_leaves(sketch(config, planned, target("8xH200")), has_mtp=True)
    return parameters(leaves, planned.weights, itemsize=2)


@pytest.fixture(scope="module")
def forms() -> dict[str, Parameters]:
    return {
        name: counted(planned_model(engine_config(name)))
        for name in ("glm-5.2", "glm-5.2-fp8", "glm-5.2-nvfp4")
    }


def billions(number: int) -> float:
    return round(number / 1e9, 3)


def test_parameters_are_as_published_whatever_they_are_stored_as(forms):
    for found in forms.values():
        assert (billions(found.total), billions(found.trunk)) == (753.330, 743.377)
        assert billions(found.total - found.trunk) == 9.953


def test_tensors_are_as_published(forms):
    assert forms["glm-5.2"].tensors == 59_585
    assert forms["glm-5.2-fp8"].tensors == 118_629


def test_bytes_are_as_published(forms):
    gigabytes = {name: round(found.nbytes / 1e9, 1) for name, found in forms.items()}
    assert gigabytes == {"glm-5.2": 1506.7, "glm-5.2-fp8": 755.6, "glm-5.2-nvfp4": 460.7}
    assert round(forms["glm-5.2-nvfp4"].trunk_nbytes / 1e9, 1) == 440.8


def test_routed_experts_alone_in_nvfp4_take_a_little_more():
    planned = planned_model(engine_config("glm-5.2-nvfp4"))
    found = counted(replace(planned, weights=nvfp4_formats(planned.config, shared=False)))
    assert round(found.nbytes / 1e9, 1) == 464.8


def test_each_gpu_has_its_share_and_all_of_what_is_replicated():
    planned = planned_model(engine_config("glm-5.2-fp8"))
    config = EngineConfig("glm-5.2", ParallelConfig(TP, TP, dcp_project_first="never"))
    leaves = all_leaves(sketch(config, planned, target("8xH200")), has_mtp=True)
    parts = bytes_by_part(leaves, drafts=False)
    routed = 75 * 256 * 3 * 2048 * 6144
    assert parts["routed_experts"] == pytest.approx(routed / TP, rel=2e-3)  # scales on top
    indexer = 21 * (4096 * 2048 + 128 * 6144 + 4 * 32 * 6144)  # head weights are float32
    assert parts["indexer"] == pytest.approx(indexer, rel=2e-3)
    assert parts["embedding"] == parts["head"] == 154_880 * 6144 * 2 // TP
    assert parts["mtp"] == 0
    assert bytes_by_part(leaves, drafts=True)["mtp"] > 1.2e9


@pytest.mark.parametrize(
    ("name", "quantised", "plain"),
    [
        ("glm-5.2-fp8", "3.self_attn.indexer.wk", "3.self_attn.indexer.weights_proj"),
        ("glm-5.2-fp8", "78.mlp.experts.7.down_proj", "78.eh_proj"),
        ("glm-5.2-fp8", "3.self_attn.kv_a_proj_with_mqa", "3.mlp.gate"),
        ("glm-5.2-fp8", "0.mlp.down_proj", "0.self_attn.kv_a_layernorm"),
        ("glm-5.2-nvfp4", "3.mlp.shared_experts.up_proj", "78.mlp.shared_experts.up_proj"),
        ("glm-5.2-nvfp4", "77.mlp.experts.255.gate_proj", "77.self_attn.o_proj"),
    ],
)
def test_which_weights_are_quantised(name, quantised, plain):
    weights = preset(name).weights
    assert weights.of(f"model.layers.{quantised}.weight").kind == name.rpartition("-")[2]
    assert weights.of(f"model.layers.{plain}.weight").kind == "plain"


@pytest.mark.parametrize(
    ("quantization", "name"),
    [
        (None, "glm-5.2-bf16"),
        ("fp8", "glm-5.2-fp8"),
        ("modelopt", "glm-5.2-nvfp4"),
        ("modelopt_fp4", "glm-5.2-nvfp4"),
    ],
)
def test_the_flag_of_quantisation_chooses_the_form(quantization, name):
    assert preset("glm-5.2", quantization).name == name
    assert preset(name, quantization).name == name


def test_a_form_that_contradicts_the_flag_is_refused():
    with pytest.raises(
        ConfigError, match="quantization modelopt contradicts the model glm-5.2-fp8; leave it out"
    ):
        preset("glm-5.2-fp8", "modelopt")
    with pytest.raises(
        ConfigError, match="quantization compressed-tensors has no built-in form of glm-5.2; use fp8"
    ):
        preset("glm-5.2", "compressed-tensors")
