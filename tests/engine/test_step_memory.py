"""What a step needs beside weights and pools, as the compiler says, and that weights exist once on each device."""

import json
from collections import Counter
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

# Kinds of layer of the golden models, fewer of each: groups that all differ, and equal ones, which are scanned.
UNROLLED = {
    "num_hidden_layers": 5,
    "indexer_types": ["full", "full", "shared", "shared", "full"],
    "mlp_layer_types": ["dense", "dense", "sparse", "sparse", "sparse"],
}
SCANNED = {
    "num_hidden_layers": 8,
    "indexer_types": ["full", "full"] + ["full", "shared"] * 3,
    "mlp_layer_types": ["dense"] * 2 + ["sparse"] * 6,
}
CASES = {
    "unrolled tp1 context": (UNROLLED, ParallelConfig(1, 1, "ag_rs", "context")),
    "unrolled tp4 dcp4 ag_rs context": (UNROLLED, ParallelConfig(4, 4, "ag_rs", "context")),
    "unrolled tp4 dcp2 a2a queries": (UNROLLED, ParallelConfig(4, 2, "a2a", "queries")),
    "scanned tp1 queries": (SCANNED, ParallelConfig(1, 1, "a2a", "queries")),
    "scanned tp4 dcp4 a2a queries": (SCANNED, ParallelConfig(4, 4, "a2a", "queries")),
    "scanned tp4 dcp2 ag_rs context": (SCANNED, ParallelConfig(4, 2, "ag_rs", "context")),
}
QUICK = {"unrolled tp1 context", "unrolled tp4 dcp4 ag_rs context", "scanned tp4 dcp4 a2a queries"}
STEPS = {"decode": ("decode", 4, 1, 256), "prefill": ("prefill", 1, 64, 256)}


def config_of(golden: str, **changes: object) -> ModelConfig:
    return ModelConfig.from_hf(json.loads((GOLDEN / golden / "config.json").read_text()) | changes)


def engine_of(model: ModelConfig, parallel: ParallelConfig, devices) -> AbstractEngine:
    """float32, as is the default on a CPU (XLA:CPU computes bfloat16 by converting whole operands)."""
    tokens = POOL_TOKENS * parallel.decode_context_parallel_size
    return AbstractEngine(model, parallel, devices(parallel.tensor_parallel_size), "float32", tokens)


@pytest.fixture(
    scope="module",
    params=[pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES],
)
def engine(request: pytest.FixtureRequest, devices) -> AbstractEngine:
    schedule, parallel = CASES[request.param]
    return engine_of(config_of("tiny-a", **schedule), parallel, devices)


@pytest.fixture(scope="module", params=STEPS)
def program(request: pytest.FixtureRequest, engine: AbstractEngine) -> Program:
    return engine.compile(*STEPS[request.param])


def test_no_step_copies_a_pool(program: Program) -> None:
    program.check_that_no_pool_is_copied()


def test_a_step_is_given_every_weight_once(program: Program) -> None:
    program.check_that_arguments_exist_once()


@pytest.mark.parametrize("schedule", [UNROLLED, SCANNED], ids=["unrolled", "scanned"])
def test_decode_copies_no_experts(devices, schedule: dict) -> None:
    """One token needs a few experts; copying all of a layer's takes longer than the rest of its step."""
    model = config_of("tiny-a", **schedule, n_routed_experts=64, moe_intermediate_size=128)
    assert (max(stage.num_groups for stage in model.stages) > 1) == (schedule is SCANNED)
    engine = engine_of(model, ParallelConfig(1, 1), devices)
    temporaries, experts = (
        engine.compile("decode", 1, 1, 64).memory.temp_size_in_bytes,
        engine.layer_expert_bytes,
    )
    assert temporaries < experts / 2, (
        f"temporaries of {temporaries:,} bytes; a layer's experts have {experts:,}"
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
        name = ".".join(name.removesuffix(".values").split(".")[-2:])
        whole = leaf.size * leaf.dtype.itemsize
        parts = tp if name in SPLIT_OVER_ALL_DEVICES else 1
        assert bytes_on_a_device(leaf) * parts == whole, name
        split |= {name} & SPLIT_OVER_ALL_DEVICES
    assert split == SPLIT_OVER_ALL_DEVICES


def test_loading_leaves_one_copy_of_the_weights_on_each_device(devices) -> None:
    """Weights, pools, and a few numbers for each sequence are all that a loaded engine keeps on its devices."""
    devices(4)
    before = jax.live_arrays()  # kept, so that no new array gets the id of one of these
    config = engine_config(
        str(GOLDEN / "tiny-d"),
        tensor_parallel_size=4,
        decode_context_parallel_size=2,
        dtype="float32",
        num_gpu_blocks_override=8,
    )
    runner = Runner(config, config_of("tiny-d"), Checkpoint.open(GOLDEN / "tiny-d"))
    new = {id(array) for array in jax.live_arrays()} - {id(array) for array in before}
    held: Counter[jax.Device] = Counter()
    for array in [array for array in jax.live_arrays() if id(array) in new]:
        for shard in array.addressable_shards:
            held[shard.device] += shard.data.nbytes
    assert held == dict.fromkeys(
        runner.mesh.devices.flat, bytes_on_a_device((runner.parameters, runner.pools, runner._slots))
    )
