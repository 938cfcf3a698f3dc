"""What a step needs beside weights and pools, as the compiler reports it, and that weights exist once on each device."""

import json
from pathlib import Path

import jax
import pytest
from abstract_steps import AbstractEngine, Program, bytes_on_a_device
from jax.tree_util import tree_flatten_with_path

from glm_dcp_jax.config import ModelConfig, ParallelConfig, engine_config
from glm_dcp_jax.engine.runner import Runner
from glm_dcp_jax.model.safetensors_reader import Checkpoint

GOLDEN = Path(__file__).parent.parent / "oracle" / "golden"
POOL_TOKENS = 128_000  # per rank: 41 MB of CKV a layer, far above any workspace of these small models

# tiny-a's four groups differ, so none is scanned; tiny-d scans groups with and without experts.
CASES = {
    "tiny-a tp1 context": ("tiny-a", ParallelConfig(1, 1, "ag_rs", "context")),
    "tiny-a tp4 dcp4 ag_rs context": ("tiny-a", ParallelConfig(4, 4, "ag_rs", "context")),
    "tiny-a tp4 dcp2 a2a queries": ("tiny-a", ParallelConfig(4, 2, "a2a", "queries")),
    "tiny-d tp1 queries": ("tiny-d", ParallelConfig(1, 1, "a2a", "queries")),
    "tiny-d tp4 dcp4 a2a queries": ("tiny-d", ParallelConfig(4, 4, "a2a", "queries")),
    "tiny-d tp4 dcp2 ag_rs context": ("tiny-d", ParallelConfig(4, 2, "ag_rs", "context")),
}
STEPS = {"decode": ("decode", 4, 1, 256), "prefill": ("prefill", 1, 64, 256)}


def config_of(golden: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((GOLDEN / golden / "config.json").read_text()) | changes)


def engine_of(model: ModelConfig, parallel: ParallelConfig, devices) -> AbstractEngine:
    """float32, as is the default on a CPU (XLA:CPU computes bfloat16 by converting whole operands)."""
    tokens = POOL_TOKENS * parallel.decode_context_parallel_size
    return AbstractEngine(model, parallel, devices(parallel.tensor_parallel_size), "float32", tokens)


@pytest.fixture(scope="module", params=CASES)
def engine(request: pytest.FixtureRequest, devices) -> AbstractEngine:
    golden, parallel = CASES[request.param]
    return engine_of(config_of(golden), parallel, devices)


@pytest.fixture(scope="module", params=STEPS)
def program(request: pytest.FixtureRequest, engine: AbstractEngine) -> Program:
    return engine.compile(*STEPS[request.param])


def test_no_step_copies_a_pool(program: Program) -> None:
    program.check_that_no_pool_is_copied()


def test_a_step_is_given_every_weight_once(program: Program) -> None:
    program.check_that_arguments_exist_once()


@pytest.mark.parametrize("groups", [1, 3], ids=["unrolled", "scanned"])
def test_decode_copies_no_experts(devices, groups: int) -> None:
    """One token needs a few experts; copying all of a layer costs more time than the whole step has."""
    model = config_of(
        "tiny-a",
        num_hidden_layers=2 * groups,
        indexer_types=["full", "shared"] * groups,
        mlp_layer_types=["sparse", "sparse"] * groups,
        n_routed_experts=64,
        moe_intermediate_size=128,
    )
    assert [run.num_groups for run in model.runs] == [groups]
    engine = engine_of(model, ParallelConfig(1, 1), devices)
    program = engine.compile("decode", 1, 1, 64)
    assert program.memory.temp_size_in_bytes < engine.layer_expert_bytes / 2, (
        f"temporaries of {program.memory.temp_size_in_bytes:,} bytes; a layer's experts have {engine.layer_expert_bytes:,}"
    )


# The last two parts of a parameter's path. What is in neither set is small, and whole on every device.
SPLIT_OVER_ALL_DEVICES = {
    "attention.q_b", "attention.key_expansion", "attention.value_expansion", "attention.output",
    "feed_forward.gate_up", "feed_forward.down", "shared.gate_up", "shared.down",
    "embedding", "head",
}  # fmt: skip


@pytest.mark.parametrize("golden", ["tiny-a", "tiny-d"])
@pytest.mark.parametrize("tp", [1, 3, 4, 8])
def test_heads_widths_and_vocabulary_are_split_over_all_devices(devices, golden: str, tp: int) -> None:
    """A device holds 1/tp of each, padded where tp does not divide it; the rest of the weights is replicated."""
    engine = engine_of(config_of(golden), ParallelConfig(tp, 1), devices)
    split = set()
    for path, leaf in tree_flatten_with_path(engine.parameters)[0]:
        name = ".".join(str(part.key) for part in path if hasattr(part, "key"))
        name = ".".join(name.split(".")[-2:])
        whole = leaf.size * leaf.dtype.itemsize
        parts = tp if name in SPLIT_OVER_ALL_DEVICES else 1
        assert bytes_on_a_device(leaf) * parts == whole, name
        split |= {name} & SPLIT_OVER_ALL_DEVICES
    assert split == SPLIT_OVER_ALL_DEVICES


def test_loading_leaves_one_copy_of_the_weights_on_each_device(devices) -> None:
    """Weights and pools are all that a loaded engine keeps on its devices."""
    found = devices(4)
    before = {id(array) for array in jax.live_arrays()}
    config = engine_config(
        str(GOLDEN / "tiny-d"),
        tensor_parallel_size=4,
        decode_context_parallel_size=2,
        dtype="float32",
        num_gpu_blocks_override=8,
    )
    runner = Runner(config, config_of("tiny-d"), Checkpoint.open(GOLDEN / "tiny-d"))
    expected = bytes_on_a_device((runner.parameters, runner.pools))
    for device in found:
        held = sum(
            shard.data.nbytes
            for array in jax.live_arrays()
            if id(array) not in before
            for shard in array.addressable_shards
            if shard.device == device
        )
        assert held == expected, device
