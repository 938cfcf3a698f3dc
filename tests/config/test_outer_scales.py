"""The file of calibrated outer scales: what is read, and every way it can be wrong."""

import json
from pathlib import Path

import pytest

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.config.outer_scales import load_outer_scales

GOOD = {
    "format": "nvfp4_ds_mla_outer_scale_v1",
    "num_layers": 3,
    "latent_dim": 512,
    "denominator": 2688.0,
    "scales": [0.001, 2, 0.5],
    "max_abs": [2.688, 5376, 1344],
}


def read(directory: Path, **changes: object) -> tuple[float, ...]:
    file = directory / "scales.json"
    file.write_text(json.dumps({key: value for key, value in (GOOD | changes).items() if value is not None}))
    return load_outer_scales(file, 3, 512)


def test_one_scale_per_layer(tmp_path):
    assert read(tmp_path) == (0.001, 2.0, 0.5)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        (
            {"format": "other"},
            r"format must be 'nvfp4_ds_mla_outer_scale_v1' \(no other .*\), but is 'other'",
        ),
        ({"num_layers": 78}, r"num_layers must be 3 \(as many as the model has\), but is 78"),
        ({"latent_dim": 128}, r"latent_dim must be 512 \(the model's kv_lora_rank\), but is 128"),
        ({"denominator": None}, r"denominator must be 2688\.0 \(the format divides .*\), but is None"),
        ({"scales": [1.0, 1.0]}, "scales must be a list of 3 numbers"),
        ({"scales": None}, "scales must be a list of 3 numbers"),
        ({"scales": [1.0, 0, 1.0]}, "the scale of layer 1 must be a number of 2.*, but is 0"),
        ({"scales": [1.0, 1.0, -2.0]}, "layer 2"),
        ({"scales": [True, 1.0, 1.0]}, "layer 0"),
        ({"scales": [1.0, "1", 1.0]}, "layer 1"),
        ({"scales": [1e-39, 1.0, 1.0]}, "layer 0"),
        ({"scales": [1e39, 1.0, 1.0]}, "layer 0"),
        ({"scales": [10**400, 1.0, 1.0]}, "layer 0"),
        ({"scales": [float("nan"), 1.0, 1.0]}, "layer 0"),
        ({"scales": [float("inf"), 1.0, 1.0]}, "layer 0"),
    ],
)
def test_a_wrong_file_is_refused_with_what_is_wrong(tmp_path, changes, named):
    with pytest.raises(ConfigError, match=rf"scales\.json: .*{named}"):
        read(tmp_path, **changes)


def test_the_example_in_the_documents_can_be_read(tmp_path):
    page = (Path(__file__).parents[2] / "docs" / "cache-formats.md").read_text()
    example = tmp_path / "scales.json"
    example.write_text(page.split("```json\n")[1].split("```")[0])
    assert load_outer_scales(example, 2, 512) == (0.0012, 0.0019)


def test_a_missing_file_and_one_that_is_no_json(tmp_path):
    with pytest.raises(ConfigError, match="--nvfp4-scales .*absent.json is not a file"):
        load_outer_scales(tmp_path / "absent.json", 3, 512)
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"bad\.json cannot be read as JSON"):
        load_outer_scales(tmp_path / "bad.json", 3, 512)
