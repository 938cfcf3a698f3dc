"""Directories with weights: planned from what describes them, and refused where the engine refuses to load them."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from glm_dcp_jax import LLM
from glm_dcp_jax.model.safetensors_reader import CheckpointError
from glm_dcp_jax.plan.__main__ import main
from glm_dcp_jax.plan.weights import WEIGHT_PARTS

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from quantised_models import make_quantised
from random_models import write_checkpoint

TINY = Path(__file__).parents[1] / "oracle" / "golden" / "tiny-a"
KV_A = "model.layers.1.self_attn.kv_a_proj_with_mqa.weight"
EXPERT = "model.layers.3.mlp.experts.1.up_proj.weight"


@pytest.fixture
def planned(capsys):
    """Exit code, the plan or nothing, and what was said of it."""

    def answer(directory: Path, *flags: str) -> tuple[int, dict, str]:
        code = main(["--no-compile", "--json", "--model", str(directory), "--gpus", "2xH200", *flags])
        printed = capsys.readouterr()
        return code, json.loads(printed.out or "{}"), printed.err

    return answer


def _without(name, tensors):
    del tensors[name]


def _cut(name, tensors):
    tensors[name] = tensors[name][:-1].copy()


def _as_e5m2(name, tensors):
    tensors[name] = tensors[name].view(ml_dtypes.float8_e5m2)


DEFECTS = {
    "codes without scales": (
        lambda each: _without(f"{KV_A}_scale_inv", each),
        "with no scales, which cannot be",
    ),
    "scales of a lost row": (lambda each: _cut(f"{KV_A}_scale_inv", each), "in blocks of [128, 128] has"),
    "another kind of codes": (lambda each: _as_e5m2(KV_A, each), "is stored as F8_E5M2"),
    "a missing expert": (
        lambda each: [_without(name, each) for name in (EXPERT, f"{EXPERT}_scale_inv")],
        "1 missing",
    ),
    "a matrix of another size": (
        lambda each: _cut("model.norm.weight", each),
        "1 mis-shaped: model.norm.weight",
    ),
    "a tensor of something else": (
        lambda each: each.update({"model.vision.weight": np.zeros(3, np.float32)}),
        "1 unexpected: model.vision.weight",
    ),
}


@pytest.mark.parametrize("defect", DEFECTS)
def test_what_the_engine_refuses_is_refused_with_its_words(defect, planned, tmp_path, devices):
    spoil, said = DEFECTS[defect]
    config, tensors, _ = make_quantised("fp8")
    spoil(tensors)
    directory = write_checkpoint(tmp_path, config, tensors)
    code, _, error = planned(directory)
    assert code == 2 and said in error
    devices(1)
    with pytest.raises(CheckpointError) as refused:
        LLM(model=str(directory))
    assert error == f"error: {refused.value}\n"


def test_an_mtp_layer_that_is_not_there_cannot_draft(planned, tmp_path):
    config, tensors, _ = make_quantised("fp8")
    directory = write_checkpoint(tmp_path, config, tensors)
    assert planned(directory)[0] == 0
    code, _, error = planned(directory, "--speculative-config", '{"num_speculative_tokens": 1}')
    assert code == 2 and "has no tensors of the MTP layer (model.layers.13.*)" in error


MTP_KV_A = "model.layers.13.self_attn.kv_a_proj_with_mqa.weight"
MTP_DEFECTS = {
    "a norm is missing": lambda each: _without("model.layers.13.enorm.weight", each),
    "scales are missing": lambda each: _without(f"{MTP_KV_A}_scale_inv", each),
    "a matrix is cut": lambda each: _cut("model.layers.13.eh_proj.weight", each),
}


@pytest.mark.parametrize("defect", MTP_DEFECTS)
def test_an_mtp_layer_that_cannot_be_loaded_is_needed_for_drafts_alone(defect, planned, tmp_path):
    """As for the engine, which leaves it out then."""
    config, tensors, _ = make_quantised("fp8", mtp=True)
    whole = planned(write_checkpoint(tmp_path / "whole", config, tensors))[1]
    MTP_DEFECTS[defect](tensors)
    directory = write_checkpoint(tmp_path / "cut", config, tensors)
    code, found, error = planned(directory)
    assert (code, error) == (0, "")
    assert found["weights_stored"].endswith("are not all there, or cannot be read, and are not counted")
    assert found["memory_per_gpu"] == whole["memory_per_gpu"]
    counted, before = found["parameters"], whole["parameters"]
    assert counted["total"] == counted["trunk"] == before["trunk"] < before["total"]
    assert counted["checkpoint_bytes"] == before["checkpoint_bytes_without_mtp"]
    code, _, error = planned(directory, "--speculative-config", '{"num_speculative_tokens": 1}')
    assert code == 2 and "model.layers.13." in error
    assert error.endswith("leave --speculative-config out, or convert with --no-mtp\n")


def test_of_files_only_headers_are_read_so_that_the_rest_may_be_a_hole(planned, tmp_path):
    """As docs/planner.md says; a file that ends behind its header is truncated, for the engine as well."""
    shutil.copy(TINY / "config.json", tmp_path)
    sizes = {file.name: file.stat().st_size for file in TINY.glob("*.safetensors")}
    for name in sizes:
        content = (TINY / name).read_bytes()
        (tmp_path / name).write_bytes(content[: 8 + int.from_bytes(content[:8], "little")])
    code, _, error = planned(tmp_path)
    assert code == 2 and "is truncated: its header promises" in error
    for name, size in sizes.items():
        os.truncate(tmp_path / name, size)
    assert planned(tmp_path)[1] == planned(TINY)[1] | {"model": str(tmp_path)}


def test_sums_beside_weights_that_are_not_there_are_no_weights(planned, tmp_path):
    shutil.copy(TINY / "config.json", tmp_path)
    (tmp_path / "model.safetensors.sha256").write_text("")
    code, found, _ = planned(tmp_path)
    assert code == 0 and found["weights_stored"].startswith(
        "there are no files of weights beside config.json"
    )


def test_weights_that_the_engine_cannot_read_are_not_assumed_away(planned, tmp_path):
    shutil.copy(TINY / "config.json", tmp_path)
    (tmp_path / "pytorch_model.bin").write_text("")
    code, _, error = planned(tmp_path)
    assert code == 2 and "holds PyTorch weights (pytorch_model.bin) but no *.safetensors" in error


def convert(source: Path, target: Path, *flags: str) -> None:
    command = [sys.executable, "-m", "glm_dcp_jax.convert", str(source), str(target), *flags]
    subprocess.run(command, check=True, capture_output=True)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> tuple[Path, Path]:
    """(a mixed checkpoint with an MTP layer, what it was converted to)."""
    folder = tmp_path_factory.mktemp("planned")
    config, tensors, _ = make_quantised("mixed", mtp=True)
    source = write_checkpoint(folder / "source", config, tensors)
    convert(source, folder / "converted")
    return source, folder / "converted"


def test_a_converted_checkpoint_is_planned_from_its_manifest_like_the_original(pair, planned):
    drafting = ("-tp", "2", "-dcp", "2", "--speculative-config", '{"num_speculative_tokens": 2}')
    (_, one, _), (code, other, _) = (planned(directory, *drafting) for directory in pair)
    assert (
        code == 0
        and other["weights_stored"] == "FP8 and NVFP4 and BF16, F16 or F32, as its glm_dcp_jax.json says"
    )
    memory = [{part: each["memory_per_gpu"][part] for part in WEIGHT_PARTS} for each in (one, other)]
    assert memory[0] == memory[1]
    assert all(memory[0][part] > 0 for part in ("mtp", "routed_experts", "attention"))
    assert one["parameters"]["total"] == other["parameters"]["total"]


def test_converted_weights_beside_another_models_config_are_refused(pair, planned):
    code, _, error = planned(pair[1], "--hf-overrides", '{"n_routed_experts": 7}')
    assert code == 2 and "do not match the model that its config.json describes" in error


def test_a_converted_file_that_is_cut_is_named(pair, planned, tmp_path):
    shutil.copytree(pair[1], tmp_path / "copy")
    file = max(
        (tmp_path / "copy" / "weights").rglob("*"),
        key=lambda path: path.is_file() and path.stat().st_size,
    )
    os.truncate(file, 10)
    code, _, error = planned(tmp_path / "copy")
    assert code == 2 and f"{file.relative_to(tmp_path / 'copy')} has 10 bytes instead of" in error


def test_what_was_converted_cannot_draft_where_the_mtp_layer_was_left_out(pair, planned, tmp_path):
    convert(pair[0], tmp_path / "converted", "--no-mtp")
    assert planned(tmp_path / "converted")[0] == 0
    code, _, error = planned(tmp_path / "converted", "--speculative-config", '{"num_speculative_tokens": 2}')
    assert code == 2 and "was converted without the MTP layer 13" in error
