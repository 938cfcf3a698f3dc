"""scripts/bench_transfer.py: what it measures of small caches and a small model, what it notices and refuses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "scripts"), str(ROOT / "tests" / "engine")]

import bench_transfer  # noqa: E402
from lib import transfer_handover, transfer_throughput  # noqa: E402
from lib.transfer_child import Child  # noqa: E402
from lib.transfer_ends import PoolConsumer, PoolProducer  # noqa: E402
from lib.transfer_failures import MeasurementFailed, TransferFailed  # noqa: E402
from lib.transfer_flags import EngineLayout, parse  # noqa: E402
from lib.transfer_pools import BareCaches, CacheSizes  # noqa: E402
from tiny import write_tiny  # noqa: E402

from glm_dcp_jax.config import ConfigError  # noqa: E402

SIZES = CacheSizes(layers=3, full_layers=1, kv_cache_dtype="fp8_ds_mla", piece_bytes=65_536, most_tokens=70)
ROW_BYTES = 3 * 656 + 132
SMALL = "--measure throughput --layers 3 --full-layers 1 --tokens 70 --piece-bytes 65536 --repeat 3".split()
FP8 = ["--kv-cache-dtype", "fp8_ds_mla"]
PAIR = ["--producer", "tp4 dcp4 block16", "--consumer", "tp3 dcp3 block8 interleave2"]


@pytest.fixture(autouse=True)
def environment_of_a_process(monkeypatch):
    """The script sets some for itself: the tests behind these get theirs back."""
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "PJRT_NPROC"):
        monkeypatch.setenv(name, os.environ.get(name, ""))


# ---- throughput


def test_throughput_of_two_processes_and_of_one(tmp_path, capsys):
    flags = [
        *SMALL,
        *FP8,
        *PAIR,
        "--transport",
        "tcp",
        "inproc",
        "--save-result",
        "--result-dir",
        str(tmp_path),
    ]
    assert bench_transfer.main(flags) == 0
    said = capsys.readouterr().out
    assert "nothing here is a GPU's time" in said
    saved = json.loads((tmp_path / "transfer.json").read_text())
    assert [row["transport"] for row in saved["results"]] == ["tcp", "inproc"]
    for row in saved["results"]:
        assert (row["measure"], row["tokens"], row["bytes"]) == ("throughput", 70, 70 * ROW_BYTES)
        parts = [row[name] for name in ("handshakes", "reading", "behind")]
        assert sum(parts) == pytest.approx(row["seconds"], abs=1e-3) and min(parts) > 0
        assert 0 < row["unpack"] < row["seconds"] and min(row["pack"], row["move"]) > 0
        assert row["seconds"] in row["every_seconds"] and len(row["every_seconds"]) == 3
        assert row["gb_per_second"] == pytest.approx(row["bytes"] / row["seconds"] / 1e9)
        assert row["share"] == pytest.approx(row["gb_per_second"] / row["memcpy_gb_per_second"])
    written = (tmp_path / "transfer.md").read_text()
    assert written.count("\n| fp8_ds_mla | ") == 2 and "nothing here is a GPU's time" in written
    assert "tp3 dcp3 block8 interleave2" in written


def test_what_arrived_wrong_is_noticed_wherever_it_lies():
    producer = BareCaches(EngineLayout.of("tp4 dcp2 block16"), SIZES)
    consumer = BareCaches(EngineLayout.of("tp4 dcp4 block8 shards2"), SIZES)
    producer.fill()
    producer.check(70)
    with pytest.raises(MeasurementFailed, match="rank 0 holds wrong records for the tokens .0, 4, 8,"):
        consumer.check(70)
    source, sink = PoolProducer(producer, "inproc"), PoolConsumer(consumer, "inproc")
    try:
        assert sink.receive(source.offer(69)).bytes == 69 * ROW_BYTES
        consumer.check(69)
        with pytest.raises(MeasurementFailed, match=r"rank 1 holds wrong records for the tokens \[69\]"):
            consumer.check(70)
    finally:
        sink.close()
        source.close()


def test_a_transport_that_fails_is_said_and_the_others_go_on(monkeypatch, capsys):
    measured = []

    def repeat(*arguments) -> dict:
        measured.append(arguments)
        if len(measured) == 1:
            raise TransferFailed("it broke")
        return real(*arguments)

    real = transfer_throughput._repeat
    monkeypatch.setattr(transfer_throughput, "_repeat", repeat)
    flags = [*SMALL, *PAIR, "--transport", "inproc", "--kv-cache-dtype", "nvfp4_ds_mla", "fp8_ds_mla"]
    assert bench_transfer.main(flags) == 1
    said = capsys.readouterr()
    assert "throughput over inproc failed: it broke" in said.err
    assert "\n| fp8_ds_mla | inproc | 70 | " in said.out and "| nvfp4_ds_mla |" not in said.out


def test_a_transport_that_is_not_there_is_said(monkeypatch, capsys):
    monkeypatch.setattr("glm_dcp_jax.transfer.transports.available", lambda: ["tcp", "inproc"])
    assert bench_transfer.main([*SMALL, "--transport", "nixl"]) == 2
    said = capsys.readouterr()
    assert "nixl is not installed here, and left out." in said.out
    assert "none of these --transport can be used here" in said.err


def test_more_than_the_machine_holds_is_refused_before_it_is_made(capsys):
    flags = ["--measure", "throughput", "--layers", "1024", "--tokens", str(2**20), "--transport", "inproc"]
    assert bench_transfer.main(flags) == 2
    assert f"; lower --tokens {2**20}\n" in capsys.readouterr().err


# ---- hand-over


@pytest.mark.slow
def test_a_handover_in_its_parts(tmp_path, capsys):
    model = write_tiny(tmp_path / "model")
    flags = f"--measure handover --model {model} --prompt-tokens 3 16 --transport tcp --repeat 1".split()
    flags += ["--producer", "tp1 block4", "--consumer", "tp1 block8"]
    assert bench_transfer.main([*flags, "--save-result", "--result-dir", str(tmp_path)]) == 0
    head, line = [
        line
        for line in capsys.readouterr().out.splitlines()
        if "| transport |" in line or "| tcp | 16 |" in line
    ]
    assert line.count("|") == head.count("|") and line.endswith("| 1 of 1 |")
    rows = json.loads((tmp_path / "transfer.json").read_text())["results"]
    assert [row["prompt_tokens"] for row in rows] == [3, 16]
    for row in rows:
        parts = [row[name] for name in ("relay", "wait", "open", "read", "confirm", "rest")]
        assert sum(parts) == pytest.approx(row["handover"]) and min(parts) > 0
        assert min(row["prefill"], row["own_prefill"], row["step"]) > 0 and row["same"] == 1
    assert {"transfer.json", "transfer.md", "transfer.png"} <= {file.name for file in tmp_path.iterdir()}


def test_handovers_that_change_what_is_said_are_no_result():
    one = {"handover": 0.1, "prefill": 0.1, "step": 0.1, "own_prefill": 0.1}
    rows = [
        one | {"same": same, "handover": seconds}
        for same, seconds in ((True, 0.3), (False, 0.2), (True, 0.4))
    ]
    assert transfer_handover._middle(rows)["same"] == 2
    assert transfer_handover._middle(rows)["handover"] == 0.3
    with pytest.raises(MeasurementFailed, match="only 1 of 3 prompts went on"):
        transfer_handover._middle([rows[0], rows[1], rows[1]])


def test_prompts_that_the_model_cannot_have_are_refused(tmp_path, capsys):
    model = write_tiny(tmp_path / "model")
    assert bench_transfer.main(f"--measure handover --model {model} --prompt-tokens 504".split()) == 2
    assert "more than the model's 512; lower --prompt-tokens" in capsys.readouterr().err


# ---- the producer's process


def test_a_producer_that_ends_says_its_last_words():
    child = Child("nonsense", environ=os.environ)
    try:
        with pytest.raises(MeasurementFailed, match="(?s)process ended.*KeyError: 'nonsense'"):
            child.ready()
    finally:
        child.close()


def test_an_interrupt_ends_both_processes_in_one_line():
    process = subprocess.Popen(
        [sys.executable, "scripts/bench_transfer.py", *SMALL, "--transport", "tcp", "--repeat", "10000"],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    while "| records |" not in process.stdout.readline():
        assert process.poll() is None
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while not children.read_text().split():
        time.sleep(0.02)
    (child,) = children.read_text().split()
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=20)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "bench_transfer: interrupted" and "Traceback" not in said
    deadline = time.monotonic() + 30
    while Path(f"/proc/{child}/cmdline").exists() and time.monotonic() < deadline:
        if "Z (zombie)" in Path(f"/proc/{child}/status").read_text():
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}/cmdline").exists()


# ---- flags


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("tp4 dcp3", "decode_context_parallel_size 3 does not divide"),
        ("tp4 dcp4 block6 interleave4", "interleave 4 does not divide block_size 6"),
        ("tp4 dcp4 shards3", "dcp_indexer_shards 3 does not divide"),
        ("tp65", "tp must be from 1 to 64, but is 65"),
        ("tp4 pages8", "'pages8' is no size of a layout; these are tp, dcp, block"),
        ("4", "'4' is no size of a layout"),
    ],
)
def test_a_layout_that_cannot_be_is_refused(text, message, capsys):
    with pytest.raises(ConfigError, match=message):
        EngineLayout.of(text)
    with pytest.raises(SystemExit):
        parse(["--producer", text])
    assert "argument --producer: " in capsys.readouterr().err


def test_a_layout_says_all_of_itself():
    said = str(EngineLayout.of("dcp2 tp4 interleave8"))
    assert said == "tp4 dcp2 block64 interleave8 shards1" and EngineLayout.of(said) == EngineLayout.of(
        "tp4 dcp2 interleave8"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--tokens 0", "must be a whole number from 1 to 1048576, but is '0'"),
        ("--prompt-tokens 1", "must be a whole number from 2 to"),
        ("--repeat many", "must be a whole number from 1 to 10000, but is 'many'"),
        ("--piece-bytes 100", "piece_bytes must be an integer from 4096"),
        ("--layers 4 --full-layers 5", "--full-layers 5 are among the --layers 4"),
        ("--transport smoke", "invalid choice: 'smoke'"),
        ("--measure handover --transport inproc", "hands nothing over between two processes"),
        ("--result-dir here", "--result-dir does nothing without --save-result"),
    ],
)
def test_flags_that_cannot_work_are_refused(flags, message, capsys):
    with pytest.raises(SystemExit) as exited:
        parse(flags.split())
    assert exited.value.code == 2 and message in capsys.readouterr().err


def test_results_that_cannot_be_written_are_said_before_anything_is_measured(tmp_path, capsys):
    (tmp_path / "transfer.json").mkdir()
    assert bench_transfer.main([*SMALL, "--save-result", "--result-dir", str(tmp_path)]) == 2
    said = capsys.readouterr()
    assert said.out == "" and "transfer.json" in said.err
