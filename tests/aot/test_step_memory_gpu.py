"""What a step needs beside weights and pools on GPUs, at GLM-5.2's layer sizes, from compiling for them."""

import pytest
from abstract_steps import AbstractEngine, Program

from glm_dcp_jax.config import ModelConfig, ParallelConfig
from glm_dcp_jax.plan import glm52

# GLM-5.2 with fewer layers and experts: [Fd], three equal groups [F S] that are scanned, and a last [F].
MODEL = glm52.CONFIG | {
    "num_hidden_layers": 8,
    "indexer_types": ["full"] + ["full", "shared"] * 3 + ["full"],
    "mlp_layer_types": ["dense"] + ["sparse"] * 7,
    "n_routed_experts": 32,
}
POOL_TOKENS = 8 * 2**20
"""One layer's CKV is then 1.2 GB or more on each device: more than the workspace of a prefill chunk."""

DECODE = ("decode", 8, 1, 8192)
PREFILL = ("prefill", 1, 2048, 8192)
CASES = {
    "8 x H200 dcp8 ag_rs decode": ("h200", ParallelConfig(8, 8, "ag_rs", "context"), DECODE),
    "8 x H200 dcp4 queries prefill": ("h200", ParallelConfig(8, 4, "a2a", "queries"), PREFILL),
    "4 x RTX PRO 6000 dcp4 a2a decode": ("rtx_pro_6000", ParallelConfig(4, 4, "a2a", "context"), DECODE),
    "4 x RTX PRO 6000 dcp4 context prefill": (
        "rtx_pro_6000",
        ParallelConfig(4, 4, "ag_rs", "context"),
        PREFILL,
    ),
}


QUICK = {"8 x H200 dcp8 ag_rs decode"}
PROGRAMS = [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in CASES]
DECODING = [program for program in PROGRAMS if CASES[program.values[0]][2] is DECODE]


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request: pytest.FixtureRequest, absent_gpus) -> Program:
    target, parallel, step = CASES[request.param]
    devices = absent_gpus(target, parallel.tensor_parallel_size)
    model = ModelConfig.from_hf(MODEL)
    assert [stage.num_groups for stage in model.stages] == [1, 3, 1]
    return AbstractEngine(model, parallel, devices, "bfloat16", POOL_TOKENS).compile(*step)


def test_no_step_copies_a_pool(program: Program) -> None:
    program.check_that_no_pool_is_copied()


def test_a_step_is_given_every_weight_once(program: Program) -> None:
    program.check_that_arguments_exist_once()


@pytest.mark.parametrize("program", DECODING, indirect=True)
def test_decode_copies_no_experts(program: Program) -> None:
    """A decode step needs the weights of a few experts: all of a layer's must not pass through its workspace."""
    temporaries, experts = program.memory.temp_size_in_bytes, program.engine.layer_expert_bytes
    assert temporaries < experts / 2, (
        f"temporaries of {temporaries:,} bytes; a layer's experts have {experts:,}"
    )
