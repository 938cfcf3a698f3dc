"""scripts/calibrate_nvfp4_scales.py: the latents that it finds, the file that it writes, and what it refuses."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "scripts"), str(ROOT / "tests" / "engine"), str(ROOT / "tests" / "oracle")]

import calibrate_nvfp4_scales  # noqa: E402
from numpy_reference import NumpyReference, load_checkpoint, rms_norm  # noqa: E402
from tiny import GREEDY, only, random_prompts, tiny_llm, write_tiny  # noqa: E402

from glm_dcp_jax.config.outer_scales import load_outer_scales  # noqa: E402

LAYERS, LATENT = 2, 32
PROMPTS = random_prompts(40, 7, 90, seed=1)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("model"))


def lines_of(directory: Path, prompts: list, name: str = "prompts.jsonl") -> Path:
    file = directory / name
    file.write_text("\n".join(map(json.dumps, prompts)))
    return file


def calibrate(model: Path, prompts: Path, *more: str) -> int:
    return calibrate_nvfp4_scales.main([str(model), "--prompts", str(prompts), *more])


def latents(model: Path, ids: list[int]) -> list[np.ndarray]:
    """Each layer's normalised latents, [tokens, C], by numpy."""
    config, tensors = load_checkpoint(model)
    hidden = NumpyReference(config, tensors)(ids).hidden
    found = []
    for layer in range(LAYERS):
        weight = lambda name, layer=layer: tensors[f"model.layers.{layer}.{name}.weight"].astype(np.float32)  # noqa: E731
        x = rms_norm(hidden[layer], weight("input_layernorm"), config["rms_norm_eps"])
        record = x @ weight("self_attn.kv_a_proj_with_mqa").T
        found.append(rms_norm(record[:, :LATENT], weight("self_attn.kv_a_layernorm"), 1e-6))
    return found


@pytest.fixture(scope="module")
def scales(model, tmp_path_factory) -> Path:
    """Calibrated on two devices."""
    directory = tmp_path_factory.mktemp("scales")
    file = directory / "scales.json"
    assert calibrate(model, lines_of(directory, PROMPTS), "--output", str(file), "-tp", "2") == 0
    return file


def test_scales_are_the_largest_latents_of_all_prompts(model, scales):
    found = load_outer_scales(scales, LAYERS, LATENT)
    largest = np.max([[np.abs(layer).max() for layer in latents(model, ids)] for ids in PROMPTS], axis=0)
    np.testing.assert_allclose(np.array(found) * 2688, largest, rtol=2**-8)  # records are bfloat16
    assert json.loads(scales.read_text())["max_abs"] == pytest.approx(largest, rel=2**-8)


@pytest.mark.slow
def test_nvfp4_is_served_with_them(model, scales):
    plain, scaled = (
        tiny_llm(model, kv_cache_dtype="nvfp4_ds_mla", nvfp4_scales=given) for given in (None, str(scales))
    )
    assert len(only(scaled, PROMPTS[0], GREEDY).token_ids) == GREEDY.max_tokens
    assert np.any(scaled.compute_logits(PROMPTS[0]) != plain.compute_logits(PROMPTS[0]))


@pytest.mark.slow
def test_a_line_of_text_is_a_prompt(model, tmp_path):
    (tmp_path / "prompts.txt").write_text("the cat sat\n\n[1, 2] is text here\n")
    assert calibrate(model, tmp_path / "prompts.txt", "--output", str(tmp_path / "out.json"), "-tp", "2") == 0
    assert len(load_outer_scales(tmp_path / "out.json", LAYERS, LATENT)) == LAYERS


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[]], "line 1: the prompt is empty"),
        ([[7], [9, 5000]], "line 2: token id 5000 is not in the vocabulary"),
        ([[7], list(range(20, 31))], "line 2: This model's maximum context length is 10 tokens"),
        ([[7, 1.5]], "line 1: token ids must be integers, but one is 1.5"),
        ([{"prompt": "x"}], "line 1: must be a JSON list of token ids"),
    ],
)
def test_a_prompt_that_cannot_run_is_named_by_its_line(model, tmp_path, capsys, prompts, message):
    output = tmp_path / "out.json"
    file = lines_of(tmp_path, prompts)
    assert calibrate(model, file, "--output", str(output), "--max-model-len", "10") == 2
    assert f"prompts.jsonl, {message}" in capsys.readouterr().err
    assert not output.exists()


def test_other_bad_input_is_named(model, tmp_path, capsys):
    prompts, empty, broken = (tmp_path / name for name in ("prompts.jsonl", "empty.txt", "broken.jsonl"))
    prompts.write_text("[7]")
    empty.write_text("\n \n")
    broken.write_text("[7]\n[8")
    for arguments, message in (
        ((model, tmp_path / "absent"), "absent cannot be read"),
        ((model, empty), "empty.txt holds no prompt"),
        ((model, broken), "broken.jsonl, line 2: this is no JSON"),
        ((tmp_path / "no model", prompts), "no model"),
        ((model, prompts, "--output", str(tmp_path / "absent" / "out.json")), "a directory that does not"),
    ):
        assert calibrate(*arguments) == 2
        assert message in capsys.readouterr().err
