"""What `auto` comes to, and combinations of flags that contradict each other."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from glm_dcp_jax.config import ConfigError, ModelConfig, engine_config
from glm_dcp_jax.engine.formats import Formats

sys.path.append(str(Path(__file__).parents[1] / "config"))

from published import GLM_5_2

GLM = ModelConfig.from_hf(GLM_5_2)


def chosen(model: ModelConfig = GLM, on_cpu: bool = True, **flags) -> Formats:
    return Formats.of(engine_config("m", **flags), model, on_cpu)


@pytest.mark.parametrize(
    ("on_cpu", "flags", "compute", "record"),
    [
        (True, {}, "float32", "float32"),
        (False, {}, "bfloat16", "bfloat16"),
        (True, {"dtype": "bfloat16"}, "bfloat16", "bfloat16"),
        (False, {"dtype": "float16"}, "float16", "float32"),
        (True, {"kv_cache_dtype": "nvfp4_ds_mla"}, "float32", "nvfp4_ds_mla"),
        (True, {"kv_cache_dtype": "fp8"}, "float32", "fp8_ds_mla"),
        (True, {"kv_cache_dtype": "fp8_e4m3"}, "float32", "fp8_ds_mla"),
        (False, {"dtype": "half"}, "float16", "float32"),
        (False, {"dtype": "float"}, "float32", "float32"),
    ],
)
def test_records_follow_the_arithmetic_where_nothing_is_said(on_cpu, flags, compute, record):
    found = chosen(on_cpu=on_cpu, **flags)
    assert (found.compute, found.record.name) == (jnp.dtype(compute), record)


def test_the_checkpoints_scheme_comes_before_the_arithmetic_and_the_flag_before_both():
    scheme = replace(GLM, cache_scheme="fp8_ds_mla")
    assert chosen(scheme).record.name == "fp8_ds_mla"
    assert chosen(scheme, kv_cache_dtype="bfloat16").record.name == "bfloat16"


def test_a_scheme_that_is_not_supported_is_named_and_can_be_overruled():
    odd = replace(GLM, cache_scheme="kv_cache_quant_algo 'INT8'")
    with pytest.raises(ConfigError, match="kv_cache_quant_algo 'INT8'.*--kv-cache-dtype: float32, bfloat16"):
        chosen(odd)
    assert chosen(odd, kv_cache_dtype="float32").record.name == "float32"


def test_the_log_says_what_a_token_costs():
    said = str(chosen(kv_cache_dtype="nvfp4_ds_mla", nvfp4_rope_dtype="fp8"))
    assert said == (
        "nvfp4_ds_mla, roped key in fp8: 368 bytes a token and layer; index keys e4m3: 132 bytes a token and Full layer"
    )


def test_the_roped_key_of_nvfp4_records():
    sizes = [
        chosen(kv_cache_dtype="nvfp4_ds_mla", nvfp4_rope_dtype=kind).record.record_bytes
        for kind in ("bfloat16", "fp8")
    ]
    assert sizes == [432, 368]


@pytest.mark.parametrize("flags", [{"nvfp4_rope_dtype": "fp8"}, {"nvfp4_scales": "scales.json"}])
@pytest.mark.parametrize("format", ["auto", "fp8_ds_mla"])
def test_nvfp4_settings_need_nvfp4_records(flags, format):
    name = "--" + next(iter(flags)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"{name}.* is for nvfp4_ds_mla records, .*add --kv-cache-dtype"):
        chosen(kv_cache_dtype=format, **flags)


def test_outer_scales_are_read_for_this_model(tmp_path):
    file = tmp_path / "scales.json"
    content = {
        "format": "nvfp4_ds_mla_outer_scale_v1",
        "num_layers": 78,
        "latent_dim": 512,
        "denominator": 2688.0,
        "scales": [0.5] * 78,
    }
    file.write_text(json.dumps(content))
    assert chosen(kv_cache_dtype="nvfp4_ds_mla", nvfp4_scales=str(file)).latent_scales == (0.5,) * 78
    with pytest.raises(ConfigError, match="num_layers must be 40"):
        chosen(replace(GLM, num_hidden_layers=40), kv_cache_dtype="nvfp4_ds_mla", nvfp4_scales=str(file))


def test_triton_kernels_need_a_gpu():
    assert chosen(on_cpu=False, kernels="triton").kernels == "triton"
    with pytest.raises(ConfigError, match="kernels 'triton' run on NVIDIA GPUs only; use auto or reference"):
        chosen(kernels="triton")
