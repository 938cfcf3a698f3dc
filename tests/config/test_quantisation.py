"""What a quantisation section says of weights, and what --quantization checks."""

import json

import pytest
from published import GLM_5_2

from glm_dcp_jax.config import ConfigError, EngineConfig, ModelConfig
from glm_dcp_jax.config.quantisation import Quantisation

FP8 = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def compressed(*structures: object) -> dict:
    """A section with a group for each block_structure, None for one without."""
    groups = {
        f"group_{number}": {"targets": ["Linear"], "weights": {"num_bits": 8, "block_structure": structure}}
        for number, structure in enumerate(structures)
    }
    return {"quant_method": "compressed-tensors", "config_groups": groups}


@pytest.mark.parametrize(
    ("section", "method", "block"),
    [
        (FP8, "fp8", (128, 128)),
        (FP8 | {"weight_block_size": [64, 32]}, "fp8", (64, 32)),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "modelopt", (128, 128)),
        ({"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]}, "modelopt", (128, 128)),
        ({"quant_method": "modelopt_fp4"}, "modelopt", (128, 128)),
        (
            {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
            "compressed-tensors",
            (128, 128),
        ),
        (compressed([64, 32]), "compressed-tensors", (64, 32)),
        (compressed([64, 32], [64, 32], None), "compressed-tensors", (64, 32)),
        (compressed(None), "compressed-tensors", (128, 128)),
        (
            {"quant_method": "compressed-tensors", "config_groups": {"FP8": ["Linear"]}},
            "compressed-tensors",
            (128, 128),
        ),
    ],
)
def test_methods_and_blocks(section, method, block):
    found = ModelConfig.from_hf(GLM_5_2 | {"quantization_config": section}).quantisation
    assert found == Quantisation(method, block)


@pytest.mark.parametrize("section", [{}, {"quant_method": None}, {"kv_cache_quant_algo": "FP8"}])
def test_sections_that_say_nothing_of_weights(section):
    assert Quantisation.of(section) is None


@pytest.mark.parametrize("method", ["awq", "gptq", 4, ["fp8"]])
def test_other_methods_are_refused_by_name(method):
    with pytest.raises(ConfigError, match="fp8, modelopt, compressed-tensors can be loaded") as raised:
        Quantisation.of({"quant_method": method})
    assert repr(method) in str(raised.value)


@pytest.mark.parametrize(
    "block", [128, [128], [128, 0], [128, "128"], [True, True], "128x128", [1.0, 128], [128, 2**31]]
)
def test_blocks_that_are_none(block):
    with pytest.raises(ConfigError, match="weight_block_size must be two positive integers"):
        Quantisation.of(FP8 | {"weight_block_size": block})
    with pytest.raises(ConfigError, match="block_structure of config_groups' group_1 must be two positive"):
        Quantisation.of(compressed([128, 128], block))


def test_blocks_of_two_sizes():
    said = r"group_0 is \[128, 128\] and block_structure of config_groups' group_1 is \[64, 64\], but"
    with pytest.raises(ConfigError, match=said):
        Quantisation.of(compressed([128, 128], [64, 64]))


@pytest.mark.parametrize(
    ("asked", "found", "kinds"),
    [
        (None, None, None),
        (None, "fp8", {"plain"}),
        ("fp8", "fp8", None),
        ("fp8", "fp8", {"plain", "fp8", "nvfp4"}),
        ("fp8", None, {"plain", "fp8"}),
        ("modelopt_fp4", "modelopt", {"plain", "nvfp4"}),
        ("modelopt_fp4", None, {"nvfp4"}),
        ("modelopt_fp8", "modelopt", {"fp8"}),
        ("modelopt", "modelopt", {"fp8"}),
        ("modelopt", "modelopt", None),
        ("compressed-tensors", "compressed-tensors", {"nvfp4"}),
    ],
)
def test_what_is_asked_for_and_there(asked, found, kinds):
    Quantisation.check(asked, None if found is None else Quantisation(found), kinds)


@pytest.mark.parametrize(
    ("asked", "found", "kinds", "message"),
    [
        ("fp8", None, None, "the checkpoint is not quantised: weights"),
        ("fp8", "modelopt", None, "the checkpoint's method is modelopt"),
        ("modelopt_fp4", "fp8", {"fp8"}, "the checkpoint's method is fp8"),
        ("fp8", None, {"plain"}, "the checkpoint is not quantised: weights"),
        ("fp8", "fp8", {"plain"}, "the checkpoint is not quantised, though config.json says fp8"),
        ("fp8", "fp8", {"nvfp4", "plain"}, "the weights are stored as NVFP4 and BF16, F16 or F32"),
        ("modelopt_fp4", "modelopt", {"fp8"}, "the weights are stored as FP8; leave it out"),
        ("modelopt_fp8", "modelopt", {"nvfp4"}, "the weights are stored as NVFP4; leave it out"),
    ],
)
def test_what_is_asked_for_and_not_there(asked, found, kinds, message):
    with pytest.raises(ConfigError, match=message):
        Quantisation.check(asked, None if found is None else Quantisation(found), kinds)


@pytest.mark.parametrize("name", ["awq", "modelopt_fp6", "fp4"])
def test_what_cannot_be_asked_for(name):
    with pytest.raises(
        ConfigError, match="fp8, modelopt, compressed-tensors, modelopt_fp4.* modelopt_fp8"
    ) as raised:
        EngineConfig("", quantization=name)
    assert repr(name) in str(raised.value)


@pytest.mark.parametrize(
    ("written", "found"),
    [
        (
            {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}},
            Quantisation("modelopt"),
        ),
        ({"producer": {"name": "modelopt"}, "quant_algo": "NVFP4"}, Quantisation("modelopt")),
        ({"quant_algo": "FP8", "kv_cache_quant_algo": None}, Quantisation("modelopt")),
        ({"producer": {"name": "modelopt"}}, None),
        ({"producer": {"name": "modelopt"}, "quantization": None}, None),
    ],
)
def test_modelopts_file_with_and_without_an_object_around_it(written, found, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2 | {"quantization_config": None}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(written))
    assert ModelConfig.load(tmp_path).quantisation == found
