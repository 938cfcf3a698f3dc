"""What a checkpoint asks of the cache, in every spelling, and that plain weights stay welcome."""

import json

import pytest
from published import GLM_5_2

from glm_dcp_jax.config import ConfigError, ModelConfig

NVFP4_CACHE = {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "NVFP4", "exclude_modules": ["x"]}}


def model(section: dict) -> ModelConfig:
    return ModelConfig.from_hf(GLM_5_2 | {"quantization_config": section})


@pytest.mark.parametrize(
    ("section", "format"),
    [
        ({"kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False}}, "fp8_ds_mla"),
        ({"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 4, "type": "float"}}, "nvfp4_ds_mla"),
        ({"quant_method": "modelopt", "quant_algo": None, "kv_cache_quant_algo": "FP8"}, "fp8_ds_mla"),
        ({"kv_cache_quant_algo": "NVFP4"}, "nvfp4_ds_mla"),
    ],
)
def test_a_scheme_names_a_record_format(section, format):
    assert model(section).cache_scheme == format


def test_without_a_section_there_is_no_scheme():
    assert ModelConfig.from_hf(GLM_5_2).cache_scheme is None


@pytest.mark.parametrize(
    ("section", "named"),
    [
        ({"kv_cache_quant_algo": "INT8"}, "kv_cache_quant_algo 'INT8'"),
        ({"kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "'int'"),
        ({"kv_cache_scheme": "fp8"}, "kv_cache_scheme 'fp8'"),
        ({"kv_cache_quant_algo": ["FP8"]}, "kv_cache_quant_algo ['FP8']"),
        ({"kv_cache_quant_algo": {}}, "kv_cache_quant_algo {}"),
        ({"kv_cache_quant_algo": 8}, "kv_cache_quant_algo 8"),
        ({"kv_cache_scheme": {"num_bits": True}}, "'num_bits': True"),
        (
            {"kv_cache_quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 4, "type": "float"}},
            "kv_cache_quant_algo 'FP8', but kv_cache_scheme {'num_bits': 4",
        ),
    ],
)
def test_an_unknown_scheme_is_kept_as_it_is_written(section, named):
    """It is an error only where --kv-cache-dtype does not choose another format."""
    assert named in model(section).cache_scheme


def test_both_spellings_may_say_the_same():
    both = {"kv_cache_quant_algo": "FP8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    assert model(both).cache_scheme == "fp8_ds_mla"


@pytest.mark.parametrize("section", [{}, {"kv_cache_quant_algo": None}, {"kv_cache_scheme": None}])
def test_an_empty_section_says_nothing_and_hides_no_file(section, tmp_path):
    assert model(section).cache_scheme is None
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2 | {"quantization_config": section}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(NVFP4_CACHE))
    assert ModelConfig.load(tmp_path).cache_scheme == "nvfp4_ds_mla"


def test_a_malformed_file_of_modelopt_is_named(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2))
    (tmp_path / "hf_quant_config.json").write_text('{"quantization": "FP8"}')
    with pytest.raises(
        ConfigError, match="hf_quant_config.json: quantization must be an object, but is 'FP8'"
    ):
        ModelConfig.load(tmp_path)


@pytest.mark.parametrize(
    "more", [{"quant_algo": "FP8"}, {"config_groups": {"group_0": {}}}, {"weight_block_size": [128, 128]}]
)
def test_quantised_weights_beside_a_cache_scheme(more):
    found = model({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"} | more)
    assert (found.cache_scheme, found.quantisation.method) == ("fp8_ds_mla", "modelopt")


def test_modelopts_own_file_counts_where_config_json_is_silent(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(NVFP4_CACHE))
    assert ModelConfig.load(tmp_path).cache_scheme == "nvfp4_ds_mla"
    said = {"quantization_config": {"kv_cache_quant_algo": "FP8"}}
    (tmp_path / "config.json").write_text(json.dumps(GLM_5_2 | said))
    assert ModelConfig.load(tmp_path).cache_scheme == "fp8_ds_mla"
