"""What drafting needs beside weights and caches on GPUs, at GLM-5.2's layer sizes, from compiling for them."""

from dataclasses import replace

import pytest
from abstract_steps import AbstractEngine, bytes_on_a_device

from glm_dcp_jax.config import ModelConfig, ParallelConfig, SpeculativeConfig
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.draft_steps import DraftShape, FirstShape, NextShape
from glm_dcp_jax.engine.steps import BlockShape
from glm_dcp_jax.plan import glm52

MODEL = ModelConfig.from_hf(glm52.CONFIG | {"n_routed_experts": 32, "num_nextn_predict_layers": 1})
POOL_TOKENS = 8 * 2**20
PAGES = 32
SHAPES = {
    "verification": FirstShape((BlockShape("decode", 8, 4, PAGES),), 8),
    "prefill": FirstShape((BlockShape("prefill", 1, 2048, PAGES),), 1),
    "next": NextShape(8, PAGES),
}


@pytest.mark.parametrize(
    ("name", "share"),
    [
        ("verification", True),
        pytest.param("prefill", True, marks=pytest.mark.slow),
        ("next", True),
        pytest.param("next", False, marks=pytest.mark.slow),
    ],
)
def test_no_program_copies_a_pool_or_experts(absent_gpus, name: str, share: bool) -> None:
    wanted: DraftShape = SHAPES[name]
    model = replace(MODEL, index_share_for_mtp_iteration=share)
    parallel = ParallelConfig(4, 4, dcp_decode_path="bulk")
    engine = AbstractEngine(model, parallel, absent_gpus("h200", 4), "bfloat16", POOL_TOKENS)
    config = replace(engine.blueprint.config, speculative=SpeculativeConfig(3))
    blueprint = Blueprint(config, model, engine.blueprint.mesh)
    pools = blueprint.mtp_pools(blueprint.layout.pages_for(POOL_TOKENS) + 1)
    memory = blueprint.drafts.compile(wanted, blueprint.parameters(), pools).memory_analysis()
    held, reads_only = bytes_on_a_device(pools), share and isinstance(wanted, NextShape)
    assert memory.alias_size_in_bytes == (0 if reads_only else held)
    assert memory.temp_size_in_bytes < held
    if name != "prefill":
        assert memory.temp_size_in_bytes < engine.layer_expert_bytes / 2
