"""An engine that drafts, against transformers' numbers: its drafts, and a greedy text that drafts do not change."""

import itertools

import numpy as np
import pytest
from test_goldens import GOLDEN, golden, prompts_of
from test_mtp_goldens import PROMPTS
from test_mtp_goldens import golden as mtp_golden

from glm_dcp_jax import LLM, SamplingParams

MESHES = ((1, 1), (4, 4), (8, 2))
PATHS = ("queries", "records", "bulk")
DRAFTS = (1, 2, 3, 4, 5)
TOKENS = 32
QUICK = [(3, (4, 4), "bulk", True)]
ALL = [
    (drafts, mesh, path, share)
    for drafts, mesh, path in itertools.product(DRAFTS, MESHES, PATHS)
    for share in ((True, False) if path == PATHS[0] else (True,))
    if mesh != (1, 1) or path == PATHS[0]
]


def load(drafts: int, mesh: tuple[int, int], path: str = "queries", **changes: object) -> LLM:
    tp, dcp = mesh
    prompts = len(prompts_of("tiny-a"))
    settings = {
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
        "dcp_decode_path": path if dcp > 1 else "auto",
        "block_size": 4,
        "dtype": "float32",
        "max_model_len": 400,
        "max_num_batched_tokens": 64,
        "max_num_seqs": prompts,
        "precompile_bs_paddings": (prompts,),
        "precompile_token_paddings": (64,),
        "kv_cache_memory_bytes": 32 * 2**20,
        "speculative_config": {"method": "mtp", "num_speculative_tokens": drafts},
    }
    return LLM(str(GOLDEN / "tiny-a"), **settings | changes)


def check_greedy_text(llm: LLM) -> None:
    stored, prompts = golden("tiny-a"), prompts_of("tiny-a")
    ids = [stored[f"p{prompt}_ids"].tolist() for prompt in prompts]
    outputs = llm.generate(
        ids, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True), use_tqdm=False
    )
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = stored[f"p{prompt}_greedy_ids"][:TOKENS].tolist()
        assert output.outputs[0].token_ids == expected, f"prompt {prompt}"
    found = llm.engine.stats().drafts
    assert found.proposed > 0 and found.rounds > 0
    assert llm.engine.scheduler.allocator.num_used == 0


def check_drafts(llm: LLM, share: bool) -> None:
    """Behind the prompts' chunks, beside one another: what is left in the slots for the next step."""
    stored, how = mtp_golden("tiny-a"), "shared" if share else "recompute"
    engine, params = llm.engine, SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    for prompt in PROMPTS:
        engine.add_request(str(prompt), stored[f"p{prompt}_ids"].tolist(), params)
    found: dict[int, list[int]] = {}
    while len(found) < len(PROMPTS):
        engine.step()
        drafts = np.asarray(engine.runner._slots.drafts)
        for sequence in engine.scheduler.running:
            prompt = int(engine._owner[sequence].request_id)
            if len(sequence.output_ids) == 1 and prompt not in found:
                assert sequence.output_ids == [int(stored[f"p{prompt}_next_id"])]
                found[prompt] = drafts[sequence.slot].tolist()
    for prompt in PROMPTS:
        engine.abort(str(prompt))
        expected = stored[f"p{prompt}_draft_ids_{how}"].tolist()
        assert found[prompt][: len(expected)] == expected[: len(found[prompt])], f"prompt {prompt}"


def check(drafts: int, mesh: tuple[int, int], path: str, share: bool) -> None:
    overrides = {"index_share_for_mtp_iteration": share}
    llm = load(drafts, mesh, path, hf_overrides=overrides, async_scheduling=False)
    check_drafts(llm, share)
    check_greedy_text(llm)


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "mesh", "path", "share"), QUICK)
def test_an_engine_drafts_as_the_golden_and_its_text_is_the_goldens(devices, drafts, mesh, path, share):
    devices(mesh[0])
    check(drafts, mesh, path, share)


@pytest.mark.slow
@pytest.mark.parametrize(("drafts", "mesh", "path", "share"), [case for case in ALL if case not in QUICK])
def test_in_any_combination(devices, drafts, mesh, path, share):
    devices(mesh[0])
    check(drafts, mesh, path, share)
