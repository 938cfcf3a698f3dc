"""Which model is planned for: built in, a checkpoint, or a config.json alone."""

import json
from pathlib import Path

import pytest

from glm_dcp_jax.config import ConfigError, engine_config
from glm_dcp_jax.plan.planned_model import planned_model

TINY = Path(__file__).parents[1] / "oracle" / "golden" / "tiny-a"
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
    assert planned.note == "as the headers of its files say"
    assert planned.has_mtp and not planned.weights.quantised


@pytest.mark.parametrize(
    ("section", "kind", "of_mtp", "said"),
    [
        (None, "plain", "plain", "assumed bfloat16, as config.json has no quantisation"),
        ({"quant_method": "fp8"}, "fp8", "fp8", "assumed quantised as GLM-5.2's FP8 form"),
        ({"quant_method": "modelopt"}, "nvfp4", "plain", "assumed experts in NVFP4"),
    ],
)
def test_without_weights_the_method_decides_and_that_is_said(config_alone, section, kind, of_mtp, said):
    planned = planned_model(engine_config(config_alone(section)))
    layers = planned.config.num_hidden_layers
    assert said in planned.note
    assert planned.weights.of(EXPERT.format(layers - 1)).kind == kind
    assert planned.weights.of(EXPERT.format(layers)).kind == of_mtp


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
