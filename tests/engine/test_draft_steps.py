"""The programs that draft: what memory they take, where they stop, and that rejected drafts leave no trace."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from abstract_steps import AbstractEngine, bytes_on_a_device

from glm_dcp_jax.cache.capacity import page_bytes
from glm_dcp_jax.config import ModelConfig, ParallelConfig, SpeculativeConfig
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.engine.draft_steps import DraftShape, FirstShape, NextShape
from glm_dcp_jax.engine.steps import BlockShape

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from drafting import Drafting, Given, Part, Seen, lines_of
from random_models import make_tensors, write_checkpoint
from tiny import CONFIG, random_prompts

POOL_TOKENS = 500_000  # per rank: 80 MB of CKV, far above any workspace of this small model
BLOCKS = (BlockShape("decode", 4, 4, 4), BlockShape("prefill", 1, 64, 4))
PROMPT = random_prompts(21)[0]
KNOWN, ACCEPTED, *WRONG = 50, 51, 52, 53
DRAWN, LATER = 60, [61, 62, 63, 64]
"""KNOWN follows the prompt; of the drafts behind it one is accepted, then DRAWN is what the main model draws."""
LENGTH = len(PROMPT)


@pytest.mark.parametrize(
    ("wanted", "share"), [(FirstShape(BLOCKS, 5), True), (NextShape(4, 4), True), (NextShape(4, 4), False)]
)
def test_no_program_copies_a_pool(devices, wanted: DraftShape, share: bool) -> None:
    """As the compiler says, of programs for shapes alone; further drafts that share a selection write nothing."""
    model = replace(ModelConfig.from_hf(CONFIG), index_share_for_mtp_iteration=share)
    parallel = ParallelConfig(4, 4, dcp_decode_path="records")
    engine = AbstractEngine(model, parallel, devices(4), "float32", 4 * POOL_TOKENS)
    config = replace(engine.blueprint.config, speculative=SpeculativeConfig(3))
    blueprint = Blueprint(config, model, engine.blueprint.mesh)
    pools = blueprint.mtp_pools(blueprint.layout.pages_for(engine.pool_tokens) + 1)
    memory = blueprint.drafts.compile(wanted, blueprint.parameters(), pools).memory_analysis()
    held, reads_only = bytes_on_a_device(pools), share and isinstance(wanted, NextShape)
    assert memory.alias_size_in_bytes == (0 if reads_only else held)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < held / 10
    assert memory.temp_size_in_bytes < held / 10


@pytest.mark.parametrize(("tp", "dcp", "shards"), [(1, 1, 1), (4, 2, 1), (4, 4, 2)])
def test_the_caches_take_what_capacity_is_planned_by(devices, tp: int, dcp: int, shards: int) -> None:
    """Records and index keys are both split over the ranks, however the main model's index keys are."""
    model = ModelConfig.from_hf(CONFIG)
    parallel = ParallelConfig(tp, dcp, dcp_indexer_shards=shards)
    engine = AbstractEngine(model, parallel, devices(tp), "float32", 0).blueprint
    both = [page_bytes(model, engine.layout, engine.record, mtp_layers=layers) for layers in (0, 1)]
    assert bytes_on_a_device(engine.mtp_pools(7)) == 7 * (both[1] - both[0])


@pytest.fixture(scope="module")
def engine(devices, tmp_path_factory) -> Drafting:
    devices(4)
    directory = tmp_path_factory.mktemp("drafts")
    write_checkpoint(directory, CONFIG, make_tensors(CONFIG, mtp=True))
    settings = {
        "tensor_parallel_size": 4,
        "decode_context_parallel_size": 4,
        "dcp_decode_path": "records",
        "block_size": 4,
    }
    return Drafting(directory, 1, 40, settings)


def prefill(engine: Drafting) -> Seen:
    engine.reset()
    return engine.step(Given("prefill", 32, {0: Part(0, PROMPT, [*PROMPT[1:], KNOWN])}))


def verify(engine: Drafting, start: int, tokens: list[int], following: list[int]) -> Seen:
    return engine.step(Given("decode", 4, {0: Part(start, tokens, following)}))


@pytest.mark.parametrize("share", [True, False])
def test_rejected_drafts_leave_no_trace(engine: Drafting, share: bool) -> None:
    """The round after them sees what it would have seen without any, and so does the cache."""
    answers, caches = [], []
    for drafts in (WRONG, []):
        draft = lines_of(prefill(engine).out.draft, [LENGTH - 1])
        for _ in drafts:
            draft = engine.further(draft, [0], [100], share).draft
        written = [bool(part[LENGTH:].any()) for part in engine.mtp_cache(0, LENGTH + 2)]
        assert written == [bool(drafts) and not share] * 2
        verify(engine, LENGTH, [KNOWN, ACCEPTED, *drafts], [ACCEPTED, DRAWN])
        seen = verify(engine, LENGTH + 2, [DRAWN, *LATER[:3]], LATER)
        further = engine.further(lines_of(seen.out.draft, [seen.last[0]]), [0], [100], share)
        answers.append([seen.logits[0], seen.mtp_logits[0], further.logits])
        caches.append(engine.mtp_cache(0, LENGTH + 6))
    for one, other in zip(*answers, strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    for one, other in zip(*caches, strict=True):
        assert one.any(axis=1).all(), "a position was never written"
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)


@pytest.mark.parametrize("share", [True, False])
def test_a_line_stops_at_its_limit_and_stays_there(engine: Drafting, share: bool) -> None:
    draft = lines_of(prefill(engine).out.draft, [LENGTH - 1])
    assert draft.positions.tolist() == [LENGTH - 1]
    for limit, position in ((LENGTH, LENGTH), (LENGTH, -1), (LENGTH + 9, -1)):
        draft = engine.further(draft, [0], [limit], share).draft
        assert np.asarray(draft.positions).tolist() == [position]
        assert (np.asarray(draft.tokens) >= 0).tolist() == [position >= 0]
    assert not any(part[LENGTH + 1 :].any() for part in engine.mtp_cache(0, LENGTH + 4))
