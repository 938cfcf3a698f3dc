"""Which model is planned for: built in, a checkpoint, or a config.json alone."""

import json
from pathlib import Path

import pytest

from glm_dcp_jax.config import ConfigError, engine_config
from glm_dcp_jax.plan.glm52 import glm52
from glm_dcp_jax.plan.planned_model import planned_model
from glm_dcp_jax.plan.presets import ONE_SCALE, fp8_formats
from glm_dcp_jax.plan.remedies import _smaller_forms
from glm_dcp_jax.plan.weights import stored_bytes

TINY = Path(__file__).parents[1] / "oracle" / "golden" / "tiny-a"
MODELOPT = {"quant_method": "modelopt"}
EXPERT = "model.layers.{}.mlp.experts.0.up_proj.weight"


@pytest.fixture
def config_alone(tmp_path: Path):
    """A directory with tiny-a's config.json and no weights; `section` is its quantization_config."""

    def make(section: dict | None) -> str:
        config = json.loads((TINY / "config.json").read_text()) | {"quantization_config": section}
        (tmp_path / "config.json").write_text(json.dumps(config))
        return str(tmp_path)

    return make


def test_of_a_checkpoint_the_headers_count():
    planned = planned_model(engine_config(str(TINY)))
    assert planned.note == "BF16, F16 or F32, as the headers of its files say"
    assert planned.has_mtp and not planned.weights.quantised


@pytest.mark.parametrize(
    ("section", "kind", "of_mtp", "said"),
    [
        (None, "plain", "plain", "assumed bfloat16, as config.json has no quantisation"),
        ({"quant_method": "fp8"}, "fp8", "fp8", "assumed quantised as GLM-5.2's FP8 form"),
        ({"quant_method": "fp8", "fmt": "e4m3"}, "fp8", "fp8", "assumed quantised as GLM-5.2's FP8 form"),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 16}, "nvfp4", "plain", "assumed experts in NVFP4"),
        ({"quant_method": "modelopt_fp4"}, "nvfp4", "plain", "assumed experts in NVFP4"),
        (MODELOPT | {"quant_algo": "FP8"}, "fp8", "fp8", "with one scale each, by its quant_algo FP8"),
    ],
)
def test_without_weights_the_method_decides_and_that_is_said(config_alone, section, kind, of_mtp, said):
    planned = planned_model(engine_config(config_alone(section)))
    layers = planned.config.num_hidden_layers
    assert said in planned.note
    assert planned.weights.of(EXPERT.format(layers - 1)).kind == kind
    assert planned.weights.of(EXPERT.format(layers)).kind == of_mtp


@pytest.mark.parametrize(
    ("section", "said"),
    [
        (
            MODELOPT | {"quant_algo": algorithm},
            f"quant_algo '{algorithm}' is not among .*: NVFP4, FP8; add the",
        )
        for algorithm in ("MXFP8", "W4A8_AWQ", "FP8_PB_WO", "INT4_AWQ", "MIXED_PRECISION")
    ]
    + [
        (MODELOPT, "quant_algo is left out, and is not among"),
        (MODELOPT | {"quant_algo": "NVFP4", "group_size": 32}, "group_size 32 is not among .*: 16; add"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt 'e5m2' is not among .*: e4m3; add"),
        (
            {"quant_method": "modelopt_fp4", "quant_algo": "FP8"},
            "quant_method modelopt_fp4 contradicts quant_algo FP8",
        ),
        (
            {"quant_method": "modelopt_fp8", "quant_algo": "NVFP4"},
            "quant_method modelopt_fp8 contradicts quant_algo NVFP4",
        ),
        ({"quant_method": "int4"}, "method 'int4'; weights of fp8, modelopt, compressed-tensors can be"),
    ],
)
def test_without_weights_what_is_not_known_is_not_taken_for_something_else(config_alone, section, said):
    with pytest.raises(ConfigError, match=said):
        planned_model(engine_config(config_alone(section)))


def test_the_section_of_modelopts_own_file_counts_as_the_engine_counts_it(config_alone, tmp_path):
    directory = config_alone(None)
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "W4A8_AWQ"}}')
    with pytest.raises(ConfigError, match="quant_algo 'W4A8_AWQ' is not among"):
        planned_model(engine_config(directory))


def test_one_scale_for_a_weight_is_one_number():
    weights, shape = fp8_formats(glm52(), ONE_SCALE), (576, 6144)
    stored = weights.of("model.layers.0.self_attn.kv_a_proj_with_mqa.weight")
    assert stored_bytes(stored, shape, 2) == (2, 576 * 6144 + 4)


def test_a_method_that_does_not_say_how_weights_are_stored_needs_their_files(config_alone):
    directory = config_alone({"quant_method": "compressed-tensors"})
    with pytest.raises(
        ConfigError, match="quant_method compressed-tensors does not say what they would be stored"
    ):
        planned_model(engine_config(directory))


def test_the_flag_of_quantisation_is_checked(config_alone):
    with pytest.raises(
        ConfigError, match="quantization modelopt was asked for, but the checkpoint's method is fp8"
    ):
        planned_model(engine_config(config_alone({"quant_method": "fp8"}), quantization="modelopt"))


def test_the_flag_may_name_an_algorithm_that_is_not_the_sections(config_alone):
    directory = config_alone(MODELOPT | {"quant_algo": "FP8"})
    assert planned_model(engine_config(directory, quantization="modelopt_fp8")).weights.quantised
    with pytest.raises(ConfigError, match="modelopt_fp4 was asked for, but the weights are stored as FP8"):
        planned_model(engine_config(directory, quantization="modelopt_fp4"))


@pytest.mark.parametrize("field", ["hidden_size", "moe_intermediate_size"])
def test_nvfp4_needs_whole_groups_of_inputs(config_alone, field):
    directory = config_alone({"quant_method": "modelopt_fp4"})
    with pytest.raises(ConfigError, match=f"cannot be stored in NVFP4.*{field} 50 is no multiple of 16"):
        planned_model(engine_config(directory, hf_overrides={field: 50}))


@pytest.mark.parametrize(
    ("width", "forms"), [(48, ["FP8 weights", "experts in NVFP4"]), (50, ["FP8 weights"])]
)
def test_nvfp4_is_no_remedy_for_experts_without_whole_groups(config_alone, width, forms):
    planned = planned_model(
        engine_config(config_alone(None), hf_overrides={"hidden_size": 64, "moe_intermediate_size": width})
    )
    assert [called for called, _ in _smaller_forms(planned)] == forms


def test_overrides_are_for_directories(config_alone):
    overrides = {"num_nextn_predict_layers": 0}
    with pytest.raises(ConfigError, match="hf_overrides is for a checkpoint's config.json"):
        planned_model(engine_config("glm-5.2", hf_overrides=overrides))
    assert not planned_model(engine_config(config_alone(None), hf_overrides=overrides)).has_mtp


def test_a_checkpoint_that_is_cut_short_is_named(tmp_path):
    (tmp_path / "config.json").write_text((TINY / "config.json").read_text())
    (tmp_path / "model.safetensors").write_bytes((TINY / "model.safetensors").read_bytes()[:100])
    with pytest.raises(ConfigError, match="model.safetensors"):
        planned_model(engine_config(str(tmp_path)))
