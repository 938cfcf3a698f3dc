"""scripts/gpu_check.py on a machine without a GPU: a rehearsal, what its figures notice, and what it would compile."""

import json
import os
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "scripts"))

import gpu_check  # noqa: E402
from kernel_check import ops, report  # noqa: E402
from kernel_check.case import Sizes, format_name, record_formats, tiny_sizes  # noqa: E402
from kernel_check.cases import all_cases  # noqa: E402
from kernel_check.differences import records_apart, scores_apart, selections_apart  # noqa: E402
from kernel_check.measure import Device, Effort, Result, Seconds  # noqa: E402
from kernel_check.programs import (  # noqa: E402
    Loop,
    calls_that_fit,
    comparison,
    compile_case,
    repeated,
    several,
    shapes,
)
from kernel_check.record_cases import scattered  # noqa: E402

from glm_dcp_jax import plan  # noqa: E402

GIB = 2**30
EFFORT = Effort(Loop(2, 1), Loop(2, 1), 1, 2**16, 64)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, ROOT / "scripts" / "gpu_check.py", *arguments]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)


def case_named(op: str, shape: str = "", sizes: Sizes | None = None):
    cases = all_cases(sizes or tiny_sizes())
    return next(case for case in cases if case.op == op and shape in case.shape)


@pytest.mark.parametrize(
    ("only", "cases"), [pytest.param("fp8 rope", 5, marks=pytest.mark.slow), ("select_positions", 1)]
)
def test_a_rehearsal_agrees_and_says_that_it_measured_nothing(tmp_path, only, cases):
    done = run("--rehearse", "--only", only, "--seed", "1", "--output-directory", str(tmp_path))
    assert done.returncode == 0, done.stderr
    written = json.loads((tmp_path / "gpu-check-cpu.json").read_text())
    assert written["about"]["rehearsal"] is True
    assert written["about"]["seed"] == 1
    assert len(written["results"]) == cases
    for result in written["results"]:
        assert result["passed"]
        assert result["kernel"]["median"] > 0
        assert result["reference"]["median"] > 0
    page = (tmp_path / "gpu-check-cpu.md").read_text()
    assert "not a measurement" in page
    assert "CUDA" not in page and "in L2" not in page + done.stdout
    assert page.count("\n| ") == cases + 2
    assert "not a measurement" in done.stdout


def test_a_rehearsal_covers_every_format():
    named = {format_name(record) for record in tiny_sizes().records}
    assert named == {format_name(record) for record in record_formats()}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--output-directory", "/proc/nowhere"], "--output-directory /proc/nowhere cannot be written"),
        (["--output-directory", __file__], "cannot be written"),
        (["--seed", "99999999999999999999"], "must be a number of 0 to 2**63 - 1"),
        (["--seed", "-1"], "must be a number of 0"),
    ],
)
def test_arguments_that_cannot_work_are_said_before_anything_runs(arguments, says):
    done = run("--rehearse", "--only", "select_positions", *arguments)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert "cases on" not in done.stdout


def test_a_part_of_the_cases_is_written_only_where_told_to():
    """It would take the place of a whole run's results."""
    folder = lambda *given: gpu_check.output_folder(gpu_check.parse([*given]))  # noqa: E731
    assert folder("--only", "x") is folder("--quick") is folder("--rehearse") is None
    assert folder() == ROOT / "docs" / "results"


def test_without_a_gpu_it_says_so_and_exits_with_2():
    done = run()
    assert done.returncode == 2
    assert "no NVIDIA GPU is visible" in done.stderr
    assert "--rehearse" in done.stderr


def test_an_unknown_case_is_refused_by_naming_the_ops():
    done = run("--rehearse", "--only", "attentoin")
    assert done.returncode == 2
    assert "sparse_attention" in done.stderr


def test_a_wrong_kernel_and_one_that_fails_are_reported_and_the_others_still_run():
    good = case_named("pack_records", "bfloat16")

    def wrong_run(place, fixed, slots, backend):
        return good.run(place, fixed, slots, backend) + (backend == "interpret")

    def wrong_differences(resident, fixed, slots, expected, backend):
        place = good.place(resident, 0)
        return {
            "unequal": jnp.sum(
                wrong_run(place, fixed, slots, backend) != good.run(place, fixed, slots, "reference")
            )
        }

    wrong = replace(good, run=wrong_run, differences=wrong_differences)
    compiled = [compile_case(case, "interpret", EFFORT.kernel, EFFORT.reference) for case in (good, wrong)]
    programs = [RuntimeError("does not compile"), compiled[1], compiled[0]]
    results = list(gpu_check.run_cases([good, wrong, good], programs, 0, EFFORT))
    assert [result.passed for result in results] == [False, False, True]
    assert "does not compile" in results[0].error
    assert "unequal" in results[1].failures[0]
    lines = [report.line(result, Device(1e12, 1e14)) for result in results]
    assert [line.split()[0] for line in lines] == ["ERROR", "MISMATCH", "ok"]
    assert "pack_records (bfloat16" in lines[1]


def test_nan_is_above_every_limit():
    result = Result("op", "shape", 1, 1, 1, differences={"output": (float("nan"), 1e9)})
    assert not result.passed


def test_what_bounds_an_op_is_the_slower_of_copy_and_matmul():
    result = Result("op", "shape", 4_000_000, 10**9, 1, kernel=Seconds(4e-6, 4e-6), reference=Seconds(1, 1))
    bound, floor = result.floor(Device(copy=2e12, matmul=1e15))
    assert (bound, floor) == ("copy", 2e-6)
    assert result.floor(Device(copy=2e12, matmul=1e14)) == ("matmul", 1e-5)
    assert "50.0% of copy, in L2" in report.line(result, Device(copy=2e12, matmul=1e15))


@pytest.mark.parametrize("record", record_formats()[1:], ids=lambda record: f"{record.record_bytes} bytes")
def test_every_byte_of_a_record_that_is_off_shows(record):
    values = jax.random.normal(jax.random.key(0), (1, 3, 576))
    records = np.asarray(record.encode(values[..., :512], values[..., 512:]))
    figures = {
        "e2m1": ("code steps", 1),
        "e4m3": ("code steps", 1),
        "float32": ("scale ulps", 1),
        "bfloat16": ("other bytes", 1),
        "zero": ("other bytes", 1),
    }
    for field in record.fields:
        changed = records.copy()
        changed[0, 1, field.offset] ^= 1
        apart = {name: float(value) for name, value in records_apart(changed, records, record).items()}
        name, steps = figures[field.kind]
        assert apart[name] == steps
        others = set(apart) - {name, "share of codes off"}
        assert all(apart[other] == 0 for other in others)
        assert (apart["share of codes off"] > 0) == (name == "code steps")


def test_scores_and_selections_that_differ_show():
    scores = jnp.asarray([[4.0, 3.0, 2.0, 1.0, -jnp.inf]])
    assert scores_apart(scores, scores) == {"score": 0, "hidden": 0}
    assert scores_apart(scores.at[0, 1].add(0.4), scores)["score"] == pytest.approx(0.1)
    assert scores_apart(scores.at[0, 4].set(0.0), scores)["hidden"] == 1
    chosen = jnp.asarray([[0, 1, -1]])
    assert selections_apart(chosen[:, [1, 0, 2]], chosen, scores) == {"swap": 0, "count": 0}
    assert selections_apart(jnp.asarray([[0, 2, -1]]), chosen, scores)["swap"] == pytest.approx(0.25)
    assert selections_apart(jnp.asarray([[0, 0, 1]]), chosen, scores)["count"] == 1
    assert selections_apart(jnp.asarray([[0, -1, -1]]), chosen, scores)["count"] == 1


@pytest.mark.parametrize("size", [4, 256, 2**17])
def test_scattered_numbers_are_a_permutation(size):
    numbers = np.asarray(scattered(jax.random.key(1), size, size))
    assert sorted(numbers) == list(range(size))


def test_every_op_that_has_a_triton_kernel_is_checked():
    kernels = ROOT / "glm_dcp_jax" / "kernels"
    folders = {path.parent.name for path in kernels.glob("*/triton.py")}
    checked = {getattr(ops, case.op).__module__.split(".")[-1] for case in all_cases(tiny_sizes())}
    assert checked - {"selection"} == folders


def test_full_sizes_cover_formats_heads_and_rows():
    cases = all_cases(Sizes(records=record_formats()))
    for record in ("bfloat16", "fp8_ds_mla", "nvfp4_ds_mla", "nvfp4_ds_mla, fp8 rope"):
        for rows in (1, 4, 32):
            for heads in (8, 16, 64):
                assert any(case.shape == f"{record}, {rows} rows, {heads} heads" for case in cases)
    assert all(case.rotated_bytes > 2**28 for case in cases if case.op != "select_positions")


@pytest.fixture
def full_sizes(request):
    if plan.compiler_plugin() is None or request.config.getoption("--platform") == "gpu":
        pytest.skip("compiles for GPUs that are not here: needs the extra [aot], on a CPU machine")
    return Sizes(records=record_formats())


@pytest.mark.parametrize(
    ("op", "shape", "kernels"),
    [
        ("sparse_attention", "nvfp4_ds_mla, 4 rows, 16 heads", ["sparse_attention", "combine"]),
        ("write_records", "fp8_ds_mla, 4 planes x 32", ["write_records"]),
    ],
)
def test_timing_loops_compile_for_a_gpu_and_copy_no_pool(full_sizes, op, shape, kernels):
    case = case_named(op, shape, full_sizes)
    given = shapes(case)
    calls = calls_that_fit(case, given)
    loop = repeated(case, calls, "triton")
    program = plan.compile_for(loop, "1xH200", given.resident, given.fixed, several(given.fresh, 32))
    assert set(kernels) <= set(program.kernels)
    body, entry = (part.count("__gpu$xla.gpu.triton") for part in program.hlo.split("\nENTRY "))
    assert (body, entry) == (calls * len(kernels), 0)  # neither merged nor moved out of the loop
    assert program.memory.temp_bytes < GIB / 16
    assert program.memory.peak_bytes < 4 * GIB
    if case.in_place:
        assert program.memory.alias_bytes > 2 * GIB


def test_a_comparison_fits_beside_its_pools(full_sizes):
    case = case_named("write_records", "nvfp4_ds_mla, 4 planes x 32", full_sizes)
    program = plan.compile_for(comparison(case, "triton"), "1xH200", *shapes(case))
    assert program.memory.peak_bytes < 10 * GIB


def test_the_kernels_page_lists_the_costs_as_they_are():
    script = runpy.run_path(str(ROOT / "scripts" / "make_kernels_doc.py"))
    written = (ROOT / "docs" / "kernels.md").read_text()
    assert written == script["document"](written), (
        "docs/kernels.md is out of date: run .venv/bin/python scripts/make_kernels_doc.py"
    )
    # The page says where FLOPs take longer than bytes. 989 TFLOP/s to 4.8 TB/s, on H200, is the lowest ratio.
    longer = [line for line in script["lines"]() if line.cost.flops >= 989 / 4.8 * line.cost.bytes_moved]
    assert {line.op for line in longer} == {"linear", "gated_linear"}
    assert all("2048 rows" in line.shape for line in longer)
