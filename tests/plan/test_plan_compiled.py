"""`python -m glm_dcp_jax.plan` with compiled steps: small models by default, GLM-5.2 behind the marker `slow`."""

import json
from pathlib import Path

import pytest

from glm_dcp_jax.plan.__main__ import main
from glm_dcp_jax.plan.decode_report import GROUPS
from glm_dcp_jax.plan.parts import PARTS
from glm_dcp_jax.plan.table import WIDTH

TINY = Path(__file__).parents[1] / "oracle" / "golden" / "tiny-a"
SMALL_STEP = (
    "--context",
    "256",
    "--max-model-len",
    "512",
    "--block-size",
    "16",
    "--max-num-batched-tokens",
    "64",
)
MTP2 = ("--speculative-config.num_speculative_tokens", "2")

pytestmark = pytest.mark.usefixtures("cuda_compiler")


@pytest.fixture
def plan(capsys):
    """The object that the command prints for its flags."""

    def printed(*flags: str) -> dict:
        assert main(["--json", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return printed


@pytest.fixture
def three_layers(tmp_path: Path) -> Path:
    """tiny-a's first layers as a directory without weights."""
    config = json.loads((TINY / "config.json").read_text())
    config |= {"num_hidden_layers": 3, "indexer_types": ["full", "full", "shared"]}
    config |= {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_nextn_predict_layers": 0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def check(found: dict, path: str) -> dict:
    """What every compiled answer has; the figures of a path."""
    figures = found["decode"][path]
    assert figures["basis"] == "compiled, modelled"
    assert figures["without_model"] == []
    assert set(figures["ms_by_part"]) == set(figures["floor_ms_by_part"]) == set(GROUPS)
    assert sum(figures["ms_by_part"].values()) == pytest.approx(figures["modelled_step_ms"], rel=0.01)
    assert set(figures["bytes_read_by_part"]) <= set(PARTS)
    assert figures["bytes_read_to_floor"] > 1
    assert found["memory_per_gpu"]["workspace"] >= figures["temporaries"] > 0
    assert "workspace_estimate" not in found["memory_per_gpu"]
    return figures


def test_a_compiled_step_says_what_it_waits_for_and_reads(plan, three_layers):
    flags = ("--gpus", "2xH200", "-dcp", "2", *SMALL_STEP, "--dcp-decode-path", "bulk", "--kernel-us", "1")
    found = plan("--model", str(three_layers), *flags)
    assert "there are no files of weights beside config.json: assumed bfloat16" in found["weights_stored"]
    figures = check(found, "bulk")
    embedding_and_head, halves_of_layers, exchanges = 2, 2 * 3, 3
    counted = figures["blocking_collectives"] + figures["hidden_collectives"]
    assert counted == embedding_and_head + halves_of_layers + exchanges
    assert figures["ms_by_part"]["launches"] > 0
    read, floor = figures["bytes_read_by_part"], figures["floor_bytes_by_part"]
    for part in ("attention", "dense", "routed_experts", "head"):
        assert read[part] == pytest.approx(floor[part], rel=0.15)
        assert read[part] >= floor[part]


@pytest.mark.slow
def test_drafts_and_files_of_weights_are_planned_as_well(plan):
    flags = ("--gpus", "2xH200", "-dcp", "2", *SMALL_STEP, "--dcp-decode-path", "queries")
    alone = plan("--model", str(TINY), *flags)
    drafting = plan("--model", str(TINY), *flags, *MTP2)
    assert alone["weights_stored"] == "BF16, F16 or F32, as the headers of its files say"
    step, more = (check(found, "queries") for found in (alone, drafting))
    assert more["kernels"] > step["kernels"]
    assert more["modelled_step_ms"] > step["modelled_step_ms"]
    assert more["modelled_tokens_per_s"]["all_drafts_accepted"] == pytest.approx(
        3 * more["modelled_tokens_per_s"]["no_draft_accepted"], rel=0.01
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--model", "glm-5.2-fp8", "--gpus", "8xH200"),
        ("--model", "glm-5.2-nvfp4", "--gpus", "8xRTX-PRO-6000"),
        ("--model", "glm-5.2-nvfp4", "--gpus", "8xB200", "-ep"),
    ],
    ids=lambda flags: " ".join(flags[1:]),
)
def test_glm52_reads_little_more_than_it_must(plan, flags):
    rest = ("-dcp", "8", "--kv-cache-dtype", "nvfp4_ds_mla", "--dcp-decode-path", "bulk")
    found = plan(
        *flags, *rest, "--speculative-config.num_speculative_tokens", "3", "--max-model-len", "131072"
    )
    assert found["fits"]
    assert check(found, "bulk")["bytes_read_to_floor"] < 1.15


@pytest.mark.slow
def test_the_floor_is_printed_by_part(capsys, three_layers):
    flags = ("--gpus", "2xH200", "-dcp", "2", *SMALL_STEP, "--dcp-decode-path", "records", "--floor")
    assert main(["--model", str(three_layers), *flags]) == 0
    text = capsys.readouterr().out
    assert "Path records, next to the least it could take" in text
    assert max(map(len, text.splitlines())) <= WIDTH
