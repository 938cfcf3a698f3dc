"""The command that says what a decode step waits for: its flags, its figures, and the model that it compiles."""

import json

import pytest
from scheduled import HEAD, compute, done, gather, start

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.parallel.link import NVLINK, PCIE5
from glm_dcp_jax.plan import glm52
from glm_dcp_jax.plan.compile import Compiled, Memory
from glm_dcp_jax.plan.decode_command import main, parse
from glm_dcp_jax.plan.decode_schedule import DecodeStep

FIRST_LAYERS = glm52.glm52().full[:14]
MEMORY = Memory(argument_bytes=100_000, output_bytes=5_000, temp_bytes=2_000, alias_bytes=4_000)


def test_flags_have_defaults():
    command = parse(["--target", "8xH200"])
    assert [step.path for step in command.steps] == ["queries", "records", "bulk"]
    step = command.steps[0]
    assert (step.tp, step.dcp, step.requests, step.rows, step.context) == (8, 8, 1, 1, 131_072)
    assert (step.kv_cache_dtype, step.interleave, step.layers) == ("nvfp4_ds_mla", 1, "short")
    assert (command.link, command.least_seconds) == (NVLINK, 0)


def test_flags_reach_the_engine():
    flags = (
        "--target 4xRTX-PRO-6000 --tp 4 --dcp 2 --path bulk,queries bulk --concurrency 3 --mtp 2 --context 8192 "
        "--kv-cache-dtype fp8 --interleave 16 --transport ce --link 25e9,7e-6 --layers full --segments 3 "
        "--kernel-us 1.5 --dcp-comm-backend a2a --dcp-indexer-shards 2"
    )
    command = parse(flags.split())
    assert [step.path for step in command.steps] == ["queries", "bulk"]
    step = command.steps[1]
    parallel, cache = step.config.parallel, step.config.cache
    assert (parallel.tensor_parallel_size, parallel.decode_context_parallel_size) == (4, 2)
    assert (parallel.dcp_decode_path, parallel.dcp_transport, parallel.step_segments) == ("bulk", "ce", 3)
    assert (parallel.dcp_comm_backend, parallel.dcp_indexer_shards) == ("a2a", 2)
    assert (cache.kv_cache_dtype, cache.cp_kv_cache_interleave_size) == ("fp8", 16)
    assert (step.requests, step.rows, step.context, step.model.num_hidden_layers) == (3, 3, 8192, 78)
    assert (command.link.bandwidth, command.link.latency) == (25e9, 7e-6)
    assert command.least_seconds == pytest.approx(1.5e-6)


def test_the_link_is_that_of_the_gpus():
    assert parse(["--target", "4xRTX-PRO-6000"]).link is PCIE5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ("--target 8xH300", "no GPU 'H300' is known; use COUNTxGPU"),
        ("--target 8xH200 --dcp 3", "--dcp 3 does not divide --tp 8; use one of 1, 2, 4, 8"),
        ("--target 8xH200 --dcp 1", "--dcp 1 leaves nothing to exchange; use 2 or more"),
        ("--target 4xH200 --tp 8", "--tp 8 needs 8 GPUs, but the target is 4xH200"),
        (
            "--target 8xH200 --path fast",
            "no --path 'fast'; use queries, records, bulk, several of them, or all",
        ),
        (
            "--target 8xH200 --path ,",
            "--path names none; use queries, records, bulk, several of them, or all",
        ),
        ("--target 8xH200 --path=", "--path names none"),
        ("--target 8xH200 --concurrency 100000000", "--concurrency must be at most 65535, but is 100000000"),
        ("--target 8xH200 --concurrency 8192 --mtp 7", "--concurrency must be at most 8191, but is 8192"),
        ("--target 8xH200 --concurrency 8191", "GiB on each GPU, which has 140.4 GiB; lower one of them"),
        ("--target 8xH200 --concurrency 0", "--concurrency must be an integer of at least 1, but is 0"),
        ("--target 8xH200 --mtp 8", "--mtp must be at most 7, but is 8"),
        ("--target 8xH200 --context 2 --mtp 3", "--context must be an integer of at least 4, but is 2"),
        ("--target 8xH200 --context 2000000", "--context must be at most 1048576"),
        ("--target 8xH200 --kv-cache-dtype int8", "--kv-cache-dtype 'int8' is unknown; use one of"),
        (
            "--target 8xH200 --interleave 5",
            "--interleave 5 does not divide block_size 64; use one of 1, 2, 4",
        ),
        ("--target 8xH200 --transport nccl", "--transport 'nccl' is unknown; use one of auto, ce, direct"),
        (
            "--target 8xH200 --dcp-comm-backend ring",
            "--dcp-comm-backend 'ring' is unknown; use one of ag_rs, a2a",
        ),
        (
            "--target 8xH200 --dcp-indexer-shards 3",
            "--dcp-indexer-shards 3 does not divide --dcp 8; use one of 1, 2",
        ),
        ("--target 8xH200 --link 1e-300,1e-6", "bandwidth is from 1000 to 1e+15 bytes/s"),
        ("--target 8xH200 --link slow", "there is no link 'slow'; use pcie5, nvlink"),
        ("--target 8xH200 --layers some", "--layers 'some' is unknown; use one of short, full"),
        ("--target 8xH200 --segments 2", "--segments 2 needs all layers; add --layers full"),
        ("--target 8xH200 --layers full --segments 0", "--segments must be an integer of at least 1"),
        ("--target 8xH200 --kernel-us -1", "--kernel-us must be from 0 to 1e+06, but is -1"),
        ("--target 8xH200 --kernel-us 1e308", "--kernel-us must be from 0 to 1e+06, but is 1e+308"),
    ],
)
def test_a_flag_that_cannot_be_is_explained(flags, message, capsys):
    assert main(flags.split()) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ") and message in printed.err
    assert len(printed.err.splitlines()) == 1


@pytest.mark.parametrize("flags", [[], ["--target", "8xH200", "--mtp", "x"], ["--targets", "8xH200"]])
def test_what_is_no_flag_is_refused_too(flags, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(flags)
    assert stopped.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_step_without_the_command_is_checked_as_well():
    target = parse(["--target", "8xH200"]).steps[0].target
    with pytest.raises(ConfigError, match="--path 'auto' is unknown"):
        DecodeStep(target, "auto", dcp=8, tp=8)


def short_step() -> list[str]:
    """14 layers of 30 us of compute; every Full layer's exchange blocks, Shared layers' travel beside the compute."""
    lines = gather("e", "embed")
    for layer, full in enumerate(FIRST_LAYERS):
        lines += gather(f"g{layer}", "full_exchange") if full else []
        lines += [compute(f"a{layer}", 10), *gather(f"t{layer}", "tp_all_reduce")]
        lines += [start(f"s{layer}", "shared_exchange"), compute(f"f{layer}", 20), done(f"s{layer}")]
        lines += gather(f"u{layer}", "tp_all_reduce")
    return [*lines, *gather("h", "head")]


@pytest.fixture
def figures(cuda_compiler, monkeypatch, capsys):
    """What the command prints for a link of 2 us and 1 GB/s, if the compiler makes `short_step` of every path."""
    lines = "\n".join(f"  {line}" for line in ["%x = u8[1000]{0} parameter(0)", *short_step()])
    hlo = f"{HEAD}ENTRY %main (x: u8[1000]) -> u8[8] {{\n{lines}\n}}"
    monkeypatch.setattr(DecodeStep, "compile", lambda step: (Compiled("a GPU", 8, hlo, MEMORY, {}),))

    def run(*flags: str) -> dict:
        assert main(["--target", "8xH200", "--path", "bulk", "--link", "1e9,2e-6", *flags]) == 0
        return json.loads(capsys.readouterr().out)

    return run


def test_figures_are_those_of_all_78_layers(figures):
    bulk = figures()["paths"]["bulk"]
    # A gather takes 5 us. Embedding, head, 156 all-reduces and 21 exchanges of Full layers are waited for.
    assert bulk["collectives"] == {
        "count": 2 + 156 + 21 + 78,
        "blocking": 2 + 156 + 21,
        "hidden": 78,
        "partly_exposed": 0,
        "wire_bytes": 3000 * (2 + 156 + 21 + 78),
        "transfer_us": 5 * (2 + 156 + 21 + 78),
        "exposed_us": 5 * (2 + 156 + 21),
    }
    assert bulk["compute_us"] == 78 * 30
    assert bulk["step_us"] == 78 * 30 + 5 * 179
    assert {purpose: sums["count"] for purpose, sums in bulk["by_purpose"].items()} == {
        "embed": 1,
        "tp_all_reduce": 156,
        "head": 1,
        "full_exchange": 21,
        "shared_exchange": 78,
    }
    assert bulk["without_model"] == []


def test_a_layer_is_not_counted_twice_where_all_were_compiled(figures):
    assert figures("--layers", "full")["paths"]["bulk"]["compute_us"] == 14 * 30


def test_memory_is_said_with_what_the_scheduler_has_left(figures):
    (memory,) = figures()["paths"]["bulk"]["memory"]
    assert memory["peak_bytes"] == 103_000
    assert memory["scheduler_bytes"] == round(0.8 * 150_754_820_096) - 101_000


def test_what_the_figures_rest_on_is_said(figures):
    printed = figures("--mtp", "3", "--kernel-us", "2")
    assert "modelled" in printed["note"]
    assert (printed["target"], printed["rows_per_request"], printed["kernel_us"]) == ("8xH200", 4, 2)
    assert printed["link"] == {"latency": 2e-6, "bandwidth": 1e9, "source": "given"}
    assert printed["transport"]["transport"] == "direct"
    assert (printed["dcp_comm_backend"], printed["dcp_indexer_shards"]) == ("ag_rs", 1)
    assert "xla_gpu_enable_latency_hiding_scheduler" in printed["compiler_options"]
