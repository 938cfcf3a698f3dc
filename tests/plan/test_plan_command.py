"""`python -m glm_dcp_jax.plan --no-compile`: capacity, what does not fit and what would, errors, and its output."""

import json
import resource
import subprocess
import sys

import pytest

from glm_dcp_jax.plan import picture, report
from glm_dcp_jax.plan.__main__ import main
from glm_dcp_jax.plan.gpus import _TEXTS
from glm_dcp_jax.plan.table import WIDTH
from glm_dcp_jax.plan.weights import WEIGHT_PARTS

BUDGET = 3_426_112_942
MTP3 = ("--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}')
NO_MTP = " (the MTP layer, which nothing drafts with, left out)"
NVFP4_RECORDS = ("--kv-cache-dtype", "nvfp4_ds_mla")
CPU_SECONDS = 10
"""For an answer by arithmetic; 2.8 s of one core were measured."""


@pytest.fixture
def run(capsys):
    """What the command prints for its flags, after it said that they are right."""

    def printed(*flags: str) -> str:
        assert main(["--no-compile", *flags]) == 0
        return capsys.readouterr().out

    return printed


@pytest.fixture
def plan(run):
    return lambda *flags: json.loads(run("--json", *flags))


@pytest.mark.parametrize(
    ("flags", "bytes_per_page", "pages", "tokens"),
    [
        (["-dcp", "4", *MTP3, *NVFP4_RECORDS], 2_902_272, 1180, 302_080),
        (["-dcp", "4", *NVFP4_RECORDS], 2_866_176, 1195, 305_920),
        (["-dcp", "1", *MTP3, *NVFP4_RECORDS], 2_370_048, 1445, 92_480),
        (["-dcp", "1", *NVFP4_RECORDS], 2_333_952, 1467, 93_888),
        (["-dcp", "4", *MTP3, *NVFP4_RECORDS, "--nvfp4-rope-dtype", "fp8"], 2_578_688, 1328, 339_968),
        (["-dcp", "4", *MTP3, "--kv-cache-dtype", "fp8_ds_mla"], 4_034_816, 849, 217_344),
    ],
)
def test_tokens_of_a_given_budget(plan, flags, bytes_per_page, pages, tokens):
    shape = ["--model", "glm-5.2-nvfp4", "--gpus", "4xRTX-PRO-6000", "-tp", "4", "--block-size", "64"]
    cache = plan(*shape, "--kv-cache-memory-bytes", str(BUDGET), *flags)["kv_cache"]
    assert (cache["bytes_per_page"], cache["pages"], cache["tokens"]) == (bytes_per_page, pages, tokens)
    assert cache["tokens"] - cache["usable_tokens"] == cache["tokens_per_page"]  # the null page's


FP8_ON_8_H200 = ("--model", "glm-5.2", "--quantization", "fp8", "--gpus", "8xH200", "-tp", "8", "-dcp", "8")


def test_the_object_has_all_that_is_promised(plan):
    found = plan(*FP8_ON_8_H200, *MTP3, *NVFP4_RECORDS)
    assert {
        "bytes_per_page",
        "pages",
        "tokens",
        "usable_tokens",
        "bytes_per_token",
        "max_concurrency",
    } <= set(found["kv_cache"])
    memory = found["memory_per_gpu"]
    assert set(memory) == {
        *WEIGHT_PARTS,
        *("ckv", "index_keys", "mtp_cache", "workspace", "workspace_estimate", "free"),
    }
    assert memory["workspace"] is None
    assert sum(nbytes or 0 for nbytes in memory.values()) == found["memory_per_gpu_bytes"]
    assert set(found["decode"]) == {"queries", "records", "bulk"}
    for figures in found["decode"].values():
        assert {
            "blocking_collectives",
            "hidden_collectives",
            "bytes_received_per_gpu",
            "modelled_step_ms",
        } <= set(figures)
        assert figures["basis"] == "arithmetic"
    assert found["parameters"]["total"] == 753_329_940_480
    assert (found["fits"], found["why_not"], found["what_would_fit"]) == (True, None, [])
    assert "modelled" in found["note"]


def test_bulk_waits_for_less_than_the_other_paths(plan):
    decode = plan(*FP8_ON_8_H200, *NVFP4_RECORDS)["decode"]
    assert decode["bulk"]["blocking_collectives"] < decode["records"]["blocking_collectives"]
    assert decode["bulk"]["hidden_collectives"] == 57
    assert decode["bulk"]["modelled_step_ms"] < decode["queries"]["modelled_step_ms"]


def test_one_path_is_planned_where_one_was_asked_for_or_nothing_is_exchanged(plan):
    assert set(plan(*FP8_ON_8_H200, "--dcp-decode-path", "records")["decode"]) == {"records"}
    assert set(plan(*FP8_ON_8_H200[:-2])["decode"]) == {"queries"}


def test_441_gb_do_not_fit_into_4_gpus_of_96_gib_and_what_would(plan):
    found = plan(
        "--model", "glm-5.2-nvfp4", "--gpus", "4xRTX-PRO-6000", "-tp", "4", "-dcp", "4", *NVFP4_RECORDS
    )
    assert found["fits"] is False
    assert found["why_not"] == f"weights of 441 GB do not fit in 4 x 102.6 GB{NO_MTP}"
    changes = [each["change"] for each in found["what_would_fit"]]
    assert any(change.startswith("6xRTX-PRO-6000") for change in changes)
    assert any("of the 256 experts of each layer kept" in change for change in changes)
    assert any("bits a weight, instead of 4.5" in change for change in changes)
    assert any(change == "4xH200" for change in changes)


def test_nothing_is_compiled_where_the_weights_do_not_fit(capsys):
    assert main(["--json", "--model", "glm-5.2", "--gpus", "1xRTX-PRO-6000"]) == 0
    printed = capsys.readouterr()
    assert "the weights do not fit, so nothing is compiled" in printed.err
    assert json.loads(printed.out)["decode"]["queries"]["basis"] == "arithmetic"


def test_what_would_fit_does(plan):
    found = plan(
        *("--model", "glm-5.2-nvfp4", "--gpus", "6xRTX-PRO-6000", "-tp", "6", "-dcp", "6", *NVFP4_RECORDS)
    )
    assert found["fits"]


def test_a_quantised_form_is_offered_in_place_of_a_plain_one(plan):
    found = plan("--model", "glm-5.2", "--gpus", "8xH200", "-dcp", "8")
    assert found["why_not"] == f"weights of 1487 GB do not fit in 8 x 150.8 GB{NO_MTP}"
    fp8 = next(each for each in found["what_would_fit"] if "glm-5.2-fp8" in each["change"])
    assert fp8["weights_per_gpu"] == sum(
        plan("--model", "glm-5.2-fp8", "--gpus", "8xH200", "-dcp", "8")["memory_per_gpu"][part]
        for part in WEIGHT_PARTS
    )


def test_a_context_that_does_not_fit_is_shortened(plan):
    flags = (*FP8_ON_8_H200[:-2], "--kv-cache-dtype", "bfloat16")
    found = plan(*flags, "--max-model-len", "1048576")
    assert "fewer than one request of max_model_len 1,048,576" in found["why_not"]
    changes = {each["change"]: each["tokens"] for each in found["what_would_fit"]}
    shorter = next(change for change in changes if change.startswith("--max-model-len "))
    assert changes["-dcp 8"] > 2 * 1_048_576
    assert plan(*flags, "--max-model-len", shorter.split()[1])["fits"]


def test_a_cache_that_does_not_fit_is_made_smaller(plan):
    flags = (*FP8_ON_8_H200, *NVFP4_RECORDS)
    found = plan(*flags, "--kv-cache-memory-bytes", "90G")
    change = found["what_would_fit"][0]["change"]
    assert change.startswith("--kv-cache-memory-bytes ")
    assert plan(*flags, "--kv-cache-memory-bytes", change.split()[1].rstrip(","))["fits"]


def test_a_cache_that_is_too_small_is_made_larger(plan):
    flags = (*FP8_ON_8_H200, *NVFP4_RECORDS, "--max-model-len", "100000")
    found = plan(*flags, "--kv-cache-memory-bytes", "3M")
    assert found["why_not"] == "the cache gets 3,145,728 bytes, fewer than two pages of 3,575,808"
    change = found["what_would_fit"][0]["change"]
    assert plan(*flags, "--kv-cache-memory-bytes", change.split()[1].rstrip(","))["fits"]
    blocks = plan(*flags, "--num-gpu-blocks-override", "3")["what_would_fit"][0]["change"]
    assert blocks == f"--num-gpu-blocks-override {-(-100_000 // 512)}, or more"


STEPS_THAT_DO_NOT_FIT = {
    "a longer context": (
        ("--context", "1000000"),
        "1 x 1,000,000 tokens takes 15,625 pages of 64, and the cache has 6,767",
        "--context 433088",
    ),
    "more requests": (
        ("--context", "131072", "--concurrency", "16"),
        "16 x 131,072 tokens takes 32,768 pages",
        "--concurrency 3",
    ),
    "more drafts": (
        ("--context", "131072", "--concurrency", "4", *MTP3),
        "4 x 131,072 tokens takes 8,192 pages",
        "-dcp 8",
    ),
}


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if number else [])
        for number, case in enumerate(STEPS_THAT_DO_NOT_FIT)
    ],
)
def test_a_step_that_the_cache_does_not_hold_has_no_times(plan, case):
    asked, said, change = STEPS_THAT_DO_NOT_FIT[case]
    flags = (*FP8_ON_8_H200[:-2], "--kv-cache-dtype", "bfloat16")
    found = plan(*flags, *asked)
    assert found["fits"] is False and said in found["why_not"]
    for figures in found["decode"].values():
        assert figures["modelled_step_ms"] is None and figures["modelled_tokens_per_s"] is None
        assert figures["bytes_received_per_gpu"] > 0
    assert change in [each["change"] for each in found["what_would_fit"]]
    assert plan(*flags, *asked, *change.split())["fits"]


def test_the_table_says_so(run):
    assert "-  the cache does not hold it" in run(
        *FP8_ON_8_H200, "--concurrency", "60", "--context", "1000000"
    )


def test_nothing_is_compiled_where_the_cache_does_not_hold_the_step(capsys):
    flags = (*FP8_ON_8_H200, "--kv-cache-memory-bytes", "1G", "--context", "1000000", "--json")
    assert main(flags) == 0
    printed = capsys.readouterr()
    assert "the cache does not hold the step, so nothing is compiled" in printed.err
    assert json.loads(printed.out)["decode"]["bulk"]["modelled_step_ms"] is None


@pytest.mark.parametrize(("requests", "context"), [(1, 131_072), (4, 65_536), (16, 16_384), (100, 4_096)])
def test_the_context_that_plans_are_made_for_is_halved_until_it_fits(plan, requests, context):
    flags = (*FP8_ON_8_H200[:-2], "--kv-cache-dtype", "bfloat16", "--concurrency", str(requests))
    found = plan(*flags)
    assert found["kv_cache"]["usable_tokens"] // requests >= context
    assert (found["decode_step"]["context"], found["fits"]) == (context, True)
    assert found["decode_step"]["shortened_from"] == (None if context == 131_072 else 131_072)
    assert found["decode"]["queries"]["modelled_step_ms"] > 0


def test_expert_parallel_gives_whole_experts_to_each_gpu(plan):
    split, whole = (plan(*FP8_ON_8_H200, *more)["memory_per_gpu"] for more in ((), ("-ep",)))
    assert whole["routed_experts"] <= split["routed_experts"]
    assert whole["routed_experts"] == pytest.approx(split["routed_experts"], rel=0.01)


def test_the_table_is_narrow_and_says_what_is_modelled(run):
    for flags in (FP8_ON_8_H200, ("--model", "glm-5.2", "--gpus", "4xRTX-PRO-6000", "-dcp", "4")):
        text = run(*flags)
        assert max(map(len, text.splitlines())) <= WIDTH
        assert "modelled" in text and "none was measured" in text
    assert "It does not fit: weights of 1487 GB do not fit in 4 x 102.6 GB (the MTP layer, which" in text
    assert "link of 50 GB/s and 10 us, assumed" in text and text.count("-  it does not fit") == 3


def test_a_gpu_of_ones_own_is_described_by_a_file(plan, tmp_path):
    text = (_TEXTS / "h200.txtpb").read_text()
    file = tmp_path / "h20_3e.txtpb"
    file.write_text(text.replace("150754820096", "300000000000"))
    rest = ("-tp", "4", "-dcp", "4", *NVFP4_RECORDS)
    found = plan("--model", "glm-5.2-fp8", "--gpus", str(file), *rest)
    assert (found["gpus"], found["memory_per_gpu_bytes"], found["fits"]) == (
        "4xH20-3E",
        300_000_000_000,
        True,
    )
    assert plan("--model", "glm-5.2-fp8", "--gpus", f"4x{file}", *rest)["gpus"] == "4xH20-3E"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--model glm-5.2 --gpus 8xH300", "no GPU 'H300' is known; use COUNTxGPU"),
        ("--model glm-5.2 --gpus 8xnone.txtpb", "the GPU's description 'none.txtpb' cannot be read"),
        ("--model glm-5.2", "the following arguments are required: --gpus"),
        ("--model nowhere --gpus 8xH200", "built in are glm-5.2, glm-5.2-bf16, glm-5.2-fp8, glm-5.2-nvfp4"),
        ("--model glm-5.2-fp8 -q modelopt --gpus 8xH200", "--quantization modelopt contradicts the model"),
        (
            "--model glm-5.2 --gpus 4xH200 -tp 8",
            "--tensor-parallel-size 8 needs as many GPUs, but --gpus names 4xH200",
        ),
        ("--model glm-5.2 --gpus 8xH200 -dcp 3", "--decode-context-parallel-size 3 does not divide"),
        (
            "--model glm-5.2 --gpus 8xH200 --context 2000000",
            "--context 2000000 exceeds the model's max_position",
        ),
        (
            "--model glm-5.2 --gpus 8xH200 --max-model-len 2000000",
            "--max-model-len 2000000 exceeds the model's",
        ),
        (
            "--model glm-5.2 --gpus 8xH200 --max-model-len 100 --context 101",
            "--context 101 exceeds --max-model-len 100; lower it",
        ),
        ("--model glm-5.2 --gpus 8xH200 --concurrency 0", "--concurrency must be an integer of at least 1"),
        ("--model glm-5.2 --gpus 8xH200 --kernel-us -1", "--kernel-us must be from 0 to 1e+06"),
        ("--model glm-5.2 --gpus 8xH200 --floor", "--floor needs a compiled step; leave --no-compile out"),
        ("--model glm-5.2 --gpus 8xH200 --cpu-offload-gb 4", "--cpu-offload-gb is not supported"),
        ("--model glm-5.2 --gpus 8xH200 --block-sise 4", "did you mean --block-size?"),
        ("--model glm-5.2 --gpus 8xH200 --link slow", "there is no link 'slow'"),
        ("--model glm-5.2 --gpus 8xH200 --png plan.jpg", "--png plan.jpg does not end in .png"),
        ("--model glm-5.2 --gpus 8xH200 --png none/plan.png", "there is no directory"),
    ],
)
def test_what_cannot_be_is_explained(flags, message, capsys):
    assert main(["--no-compile", *flags.split()]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert message in printed.err and len(printed.err.strip().splitlines()) == 1


def test_a_description_that_lacks_something_says_what(tmp_path, capsys):
    file = tmp_path / "gpu.txtpb"
    file.write_text("gpu_device_info {\n  core_count: 132\n}\n")
    assert main(["--no-compile", "--model", "glm-5.2", "--gpus", f"8x{file}"]) == 2
    assert "it lacks device_memory_size, memory_bandwidth" in capsys.readouterr().err


def test_a_picture_is_drawn(run, tmp_path):
    pytest.importorskip("matplotlib")
    file = tmp_path / "memory.png"
    run(*FP8_ON_8_H200, "--png", str(file))
    assert file.read_bytes().startswith(b"\x89PNG")


def test_a_picture_that_cannot_be_written_is_refused_before_anything_is_computed(
    monkeypatch, capsys, tmp_path
):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(report, "answer", lambda options: pytest.fail("it was computed"))
    (tmp_path / "taken.png").mkdir()
    for name, why in (
        ("taken.png", "Is a directory"),
        (f"{'a' * 300}.png", "File name too long"),
        ("a\0.png", "embedded null byte"),
    ):
        assert main(["--no-compile", *FP8_ON_8_H200, "--png", str(tmp_path / name)]) == 2
        assert f"cannot be written: {why}; name another file" in capsys.readouterr().err


def test_nothing_is_left_of_a_picture_that_was_not_drawn(capsys, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "old.png").write_text("old")
    for name in ("new.png", "old.png"):
        flags = ("--png", str(tmp_path / name), "--max-model-len", "2000000")
        assert main(["--no-compile", *FP8_ON_8_H200, *flags]) == 2
    assert [(file.name, file.read_text()) for file in tmp_path.iterdir()] == [("old.png", "old")]


def test_a_picture_without_matplotlib_is_refused_before_anything_is_computed(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(picture, "find_spec", lambda name: None)
    assert main(["--no-compile", *FP8_ON_8_H200, "--png", str(tmp_path / "a.png")]) == 2
    assert (
        "--png needs matplotlib, which is not installed: pip install -e '.[plot]'" in capsys.readouterr().err
    )


def test_arithmetic_takes_seconds():
    """Counted as the process's own time: a machine that does other things as well would say nothing by the clock."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "glm_dcp_jax.plan", "--no-compile", "--json"]
    flags = ["--model", "glm-5.2-nvfp4", "--gpus", "4xRTX-PRO-6000", "-dcp", "4"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert json.loads(done.stdout)["fits"] is False
    spent = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    assert spent < CPU_SECONDS
