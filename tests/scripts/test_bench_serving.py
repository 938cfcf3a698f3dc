"""scripts/bench_serving.py: its figures, its load, its flags, and runs against a server without a model."""

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from stub_server import MAX_MODEL_LEN, StubServer

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import bench_serving  # noqa: E402
from lib import host_overhead, own_server  # noqa: E402
from lib.serving_flags import parse  # noqa: E402
from lib.serving_load import Load, arrivals, random_prompts  # noqa: E402
from lib.serving_metrics import Timing, summarize  # noqa: E402
from lib.serving_report import Results, markdown, run_table  # noqa: E402

STUB = Path(__file__).with_name("stub_server.py")
SMALL = "--vocab-size 50 --random-input-len 8 --random-output-len 4 --num-prompts 6".split()


@pytest.fixture
def stub() -> Iterator[StubServer]:
    with StubServer(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def bench(server: StubServer, *flags: str) -> int:
    return bench_serving.main(["--port", str(server.server_port), *SMALL, *flags])


def one_of(load: Load, **fields) -> Load:
    return Load(**{**vars(load), **fields})


LOAD = Load(4000, 1000, 3, 5, 7, rate=20.0, burstiness=1.0, seed=1)

# ---- figures

TIMINGS = [
    Timing(10, sent=1.0, tokens_at=[1.1, 1.2, 1.4], output_tokens=3),
    Timing(20, sent=2.0, tokens_at=[2.3, 2.5], output_tokens=5),  # several tokens an event
    Timing(30, sent=3.0, tokens_at=[3.2], output_tokens=1),
    Timing(99, sent=3.0, tokens_at=[3.1], error="it broke"),
]


def test_figures_are_those_of_vllm():
    row = summarize(TIMINGS, seconds=2.0, percentiles=[50, 90])
    assert (row["completed"], row["failed"], row["first_error"]) == (3, 1, "it broke")
    assert (row["total_input_tokens"], row["total_output_tokens"]) == (60, 9)
    rates = [row[f"{name}_throughput"] for name in ("request", "output", "total_token")]
    assert rates == [1.5, 4.5, 34.5]
    expected = {
        "ttft": [100, 300, 200],
        "tpot": [150, 50],  # a single token has none
        "itl": [100, 200, 200],
        "e2el": [400, 500, 200],
    }
    for name, values in expected.items():
        assert row[f"mean_{name}_ms"] == pytest.approx(np.mean(values))
        assert row[f"std_{name}_ms"] == pytest.approx(np.std(values))
        assert row[f"median_{name}_ms"] == row[f"p50_{name}_ms"] == pytest.approx(np.median(values))
    assert row["p90_ttft_ms"] == pytest.approx(280)  # linear between 200 and 300


def test_figures_of_nothing_are_none_and_shown_so():
    row = {"max_concurrency": 1, "request_rate": None}
    row |= summarize([Timing(1, error="x")], seconds=1.0, percentiles=[99])
    assert row["p99_tpot_ms"] is row["mean_ttft_ms"] is None
    assert "n/a" in run_table(row, ["ttft"], [99]) and "n/a / n/a" in markdown([row], [99])


def test_the_table_is_that_of_vllm():
    row = {"max_concurrency": 4, "request_rate": None} | summarize(TIMINGS, 2.0, [99.9])
    lines = run_table(row, ["ttft", "e2el"], [99.9]).splitlines()
    assert lines[0] == "============ Serving Benchmark Result ============"
    assert lines[1].split(":") == ["Successful requests", lines[1].split(":")[1]]
    assert lines[1].endswith(" 3") and lines[1].index("3") == 41
    names = [line.split(":")[0] for line in lines if ":" in line]
    assert names == [
        "Successful requests",
        "Failed requests",
        "Maximum request concurrency",
        "Benchmark duration (s)",
        "Total input tokens",
        "Total generated tokens",
        "Request throughput (req/s)",
        "Output token throughput (tok/s)",
        "Total Token throughput (tok/s)",
        "Mean TTFT (ms)",
        "Median TTFT (ms)",
        "P99.9 TTFT (ms)",
        "Mean E2EL (ms)",
        "Median E2EL (ms)",
        "P99.9 E2EL (ms)",
    ]
    assert "---------------Time to First Token----------------" in lines


def test_the_plot_is_a_png(tmp_path):
    pytest.importorskip("matplotlib")
    nothing = summarize([Timing(1, error="x")], seconds=1.0, percentiles=[99])
    rows = [{"max_concurrency": 1} | summarize(TIMINGS, 2.0, [99]), {"max_concurrency": 8} | nothing]
    results = Results(tmp_path, "serving")
    results.draw(rows, [99])
    assert results.plot.read_bytes().startswith(b"\x89PNG")


# ---- load


@pytest.mark.parametrize("burstiness", [0.5, 1.0, 4.0])
def test_arrivals_have_the_asked_rate_and_burstiness(burstiness):
    gaps = np.diff([0.0, *arrivals(one_of(LOAD, burstiness=burstiness))])
    assert gaps.mean() == pytest.approx(1 / 20, rel=0.1)
    assert gaps.std() / gaps.mean() == pytest.approx(burstiness**-0.5, rel=0.1)  # of a Poisson process: 1


def test_at_an_infinite_rate_all_arrive_at_once():
    assert arrivals(one_of(LOAD, rate=math.inf, prompts=3)) == [0.0, 0.0, 0.0]


def test_prompts_have_their_lengths_a_common_prefix_and_are_reproducible():
    load = one_of(LOAD, prompts=50)
    prompts = random_prompts(load, 1)
    assert {len(prompt) for prompt in prompts} == {3 + 5}
    assert len({tuple(prompt[:3]) for prompt in prompts}) == 1
    assert len({tuple(prompt) for prompt in prompts}) == 50
    assert all(0 <= token < 1000 for prompt in prompts for token in prompt)
    assert random_prompts(load, 1) == prompts
    assert random_prompts(load, 2)[0][:3] != prompts[0][:3], "another run would hit the prefix cache"


# ---- flags


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        ("--max-concurrency 4 0", "--max-concurrency: must be a whole number from 1 to"),
        ("--num-prompts 1.5", "--num-prompts: must be a whole number from 1"),
        ("--request-rate 0", "--request-rate: must be requests per second above 0, or inf, but is '0'"),
        ("--request-rate nan", "--request-rate: must be"),
        ("--burstiness inf", "--burstiness: must be a number above 0"),
        ("--temperature -1", "--temperature: must be a number of at least 0"),
        ("--percentile-metrics ttft,tbt", "'tbt' is unknown; use some of ttft,tpot,itl,e2el"),
        ("--metric-percentiles 50,101", "--metric-percentiles: must be numbers from 0 to 100"),
        ("--base-url localhost:8000", "--base-url: must begin with http:// or https://"),
        ("--endpoint /v1/chat/completions", "such as /v1/completions"),
        ("--base-url http://x --port 1", "leave --host and --port out"),
        ("--port 1 -- -tp 4", "flags behind -- are for a server of its own"),
        ("--host-overhead --model x", "--host-overhead needs no server"),
        ("--result-dir x", "do nothing without --save-result"),
        ("--save-result --result-filename a/b.json", "its folder is --result-dir"),
        ("--max-num-seqs 4", "unrecognized arguments: --max-num-seqs"),
    ],
)
def test_flags_that_cannot_work_are_refused(capsys, flags, complaint):
    with pytest.raises(SystemExit) as ended:
        parse(flags.split())
    assert ended.value.code == 2
    assert complaint in capsys.readouterr().err


def test_flags_behind_two_dashes_go_to_the_server():
    given = parse(["--max-concurrency", "1", "2", "--", "-tp", "4", "--seed", "3"])
    assert (given.max_concurrency, given.server_flags, given.seed) == ([1, 2], ["-tp", "4", "--seed", "3"], 0)


def test_host_and_port_make_a_url_and_a_v1_at_its_end_is_no_harm():
    assert parse(["--port", "81"]).base_url == "http://127.0.0.1:81"
    assert parse(["--base-url", "http://x:1/v1/"]).base_url == "http://x:1"


# ---- runs against a running server


def test_a_sweep_prints_and_saves_a_row_for_each_concurrency(stub, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    flags = f"--max-concurrency 1 3 --save-result --result-dir {tmp_path} --request-rate 500 --ignore-eos"
    assert bench(stub, *flags.split()) == 0
    said = capsys.readouterr()
    assert said.out.count("Serving Benchmark Result") == 2
    assert said.out.endswith(f"wrote {tmp_path}/serving.json, {tmp_path}/serving.md\n")
    assert "no plot: import of matplotlib" in said.err and "the extra [plot] installs it" in said.err
    saved = json.loads((tmp_path / "serving.json").read_text())
    assert [row["max_concurrency"] for row in saved["results"]] == [1, 3]
    for row in saved["results"]:
        assert (row["completed"], row["total_input_tokens"], row["total_output_tokens"]) == (6, 48, 24)
        assert 0 < row["mean_ttft_ms"] <= row["mean_e2el_ms"]
        assert row["server_counters"] == {"stub:requests_total kind=any": 6}
    assert "--max-concurrency 1 3" in saved["about"]["command"]
    table = (tmp_path / "serving.md").read_text()
    assert table.count("\n| ") == 3 and "\n| 3 | 6 | 0 | " in table
    assert len(stub.asked) == 2 * (1 + 6)
    asked = stub.asked[1]
    assert len(asked["prompt"]) == 8 and asked["model"] == "stub" and asked["ignore_eos"] and asked["stream"]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_as_many_requests_are_there_together_as_allowed(stub, concurrency):
    stub.meet = concurrency
    assert bench(stub, "--max-concurrency", str(concurrency)) == 0
    assert stub.together == concurrency


def test_failures_are_counted_and_the_first_is_shown(stub, capsys):
    stub.refuses = lambda number: number in (2, 4)
    assert bench(stub, "--max-concurrency", "1") == 0
    said = capsys.readouterr()
    assert "Failed requests:                         2" in said.out
    assert "2 requests failed; the first one: 400 request 2 is refused" in said.err


def test_a_run_without_success_ends_with_1_and_its_row_is_kept(stub, tmp_path, capsys):
    stub.refuses = lambda number: number > 0
    assert bench(stub, "--max-concurrency", "2", "--save-result", "--result-dir", str(tmp_path)) == 1
    assert "--max-concurrency 2 succeeded" in capsys.readouterr().err
    assert json.loads((tmp_path / "serving.json").read_text())["results"][0]["failed"] == 6


def test_a_stream_that_breaks_off_is_a_failure(stub, capsys):
    stub.breaks_off = True
    assert bench(stub) == 1
    assert "to warm up, failed: it broke" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--random-input-len", str(MAX_MODEL_LEN)], f"the model's limit is {MAX_MODEL_LEN}"),
        (["--save-result", "--result-dir", str(STUB)], "File exists"),
    ],
)
def test_what_cannot_run_is_said_before_anything_is_measured(stub, capsys, flags, complaint):
    assert bench(stub, *flags) == 2
    assert complaint in capsys.readouterr().err
    assert stub.asked == []


def test_a_vocabulary_that_is_not_known_is_asked_for(stub, capsys):
    lengths = ["--random-input-len", "8", "--random-output-len", "4"]
    assert bench_serving.main(["--port", str(stub.server_port), *lengths]) == 2
    assert "give --vocab-size" in capsys.readouterr().err


def test_a_server_that_is_not_there(capsys):
    with StubServer(("127.0.0.1", 0)) as gone:
        port = gone.server_port
    assert bench_serving.main(["--port", str(port), *SMALL]) == 1
    assert f"http://127.0.0.1:{port} does not answer (ConnectError" in capsys.readouterr().err


def test_results_that_are_there_stay_until_there_are_others(tmp_path):
    results = Results(tmp_path / "new", "serving")
    results.check()
    assert list(results.json.parent.iterdir()) == []
    results.json.write_text("old")
    results.check()
    assert results.json.read_text() == "old"


# ---- a server of its own


@pytest.fixture
def stub_command(monkeypatch) -> None:
    monkeypatch.setattr(own_server, "COMMAND", (sys.executable, str(STUB)))


def test_an_own_server_gets_its_flags_and_is_ended(stub_command, monkeypatch, capsys):
    started = []
    real = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *args, **kw: started.append(real(*args, **kw)) or started[-1]
    )
    assert bench_serving.main(["--max-concurrency", "1", "2", *SMALL, "--", "-tp", "4"]) == 0
    assert "the built-in model: -tp 4 --max-num-seqs 2" in capsys.readouterr().out
    assert [process.returncode for process in started] == [-signal.SIGTERM]


def test_an_own_server_that_cannot_start_is_explained(stub_command, capsys):
    assert bench_serving.main([*SMALL, "--", "--fail", "--max-num-seqs", "1"]) == 1
    said = capsys.readouterr()
    assert "the server ended with 1; the end of its log:\nerror: it cannot start" in said.err
    assert "--max-num-seqs 1\n" in said.out and "--max-num-seqs 64" not in said.out


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_ends_the_server_and_keeps_the_rows(tmp_path, number, code):
    program = (
        f"import sys; sys.path.insert(0, {str(ROOT / 'scripts')!r}); import bench_serving; from lib import own_server; "
        f"own_server.COMMAND = (sys.executable, {str(STUB)!r}); sys.exit(bench_serving.main(sys.argv[1:]))"
    )
    runs = [
        "--max-concurrency",
        *["1"] * 99,
        "--request-rate",
        "50",
        "--save-result",
        "--result-dir",
        str(tmp_path),
    ]
    pid_file = tmp_path / "pid"
    process = subprocess.Popen(
        [sys.executable, "-c", program, *SMALL, *runs, "--", "--pid-file", str(pid_file)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ,
    )
    file = tmp_path / "serving.json"
    end = time.monotonic() + 20
    while not file.exists() and time.monotonic() < end:
        time.sleep(0.01)
    process.send_signal(number)
    _, said = process.communicate(timeout=20)
    assert process.returncode == code
    assert "Traceback" not in said
    if number == signal.SIGINT:
        assert f"bench_serving: interrupted; the runs before it are in {file}" in said
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)
    assert 1 <= len(json.loads(file.read_text())["results"]) < 99


# ---- without a server


def test_host_overhead_times_every_part_of_a_step_on_the_real_engine(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv(
        "JAX_PLATFORMS", "cpu"
    )  # the script sets it: the tests behind this one get theirs back
    flags = f"--host-overhead 3 --random-input-len 40 --random-output-len 30 --save-result --result-dir {tmp_path}"
    assert bench_serving.main(flags.split()) == 0
    rows = json.loads((tmp_path / "host-overhead.json").read_text())["results"]
    assert [(row["requests"], row["text"]) for row in rows] == [(3, False), (3, True)]
    for row in rows:
        assert row["steps"] == 30
        parts = [row[f"{part}_us"] for part in host_overhead.PARTS]
        assert min(parts) > 0
        assert row["step_us"] == pytest.approx(sum(parts), rel=0.5)  # medians
        assert row["step_us_per_100_requests"] == pytest.approx(row["step_us"] * 100 / 3)
        assert row["p99_step_us"] >= row["step_us"]
    assert "| 3 | yes |" in capsys.readouterr().out


def test_no_jax_is_loaded_to_ask_a_server():
    imports = "import sys, bench_serving, lib.serving_client, lib.own_server; print('jax' in sys.modules)"
    command = [sys.executable, "-c", imports]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT / "scripts")
    assert done.stdout == "False\n"
