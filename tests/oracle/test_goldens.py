"""The engine against numbers that transformers made: logits, hidden states, selections, experts, greedy tokens."""

import itertools
import math
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from pairwise import all_pairs, pairs_of, pairwise

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.parallel import prefill

GOLDEN = Path(__file__).parent / "golden"
LOGIT_TOLERANCE = {"tiny-a": 2e-4, "tiny-d": 4e-4}
HIDDEN_TOLERANCE = 3e-4
GREEDY_TOKENS = 32
WHOLE = 400
MOST_CHUNKS = 20

FACTORS = {
    "model": ("tiny-a", "tiny-d"),
    "mesh": ((1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4), (8, 2), (8, 4), (8, 8)),
    "interleave": (1, 4, "block"),
    "block_size": (4, 16, 64),
    "chunk": (5, 16, 64, WHOLE),
    "prefill_path": ("context", "queries"),
    "backend": ("ag_rs", "a2a"),
    "context_form": ("mask", "positions"),
    "index_shards": (1, 2, "dcp"),
    "decode_path": ("queries", "records", "bulk", "bulk in rounds"),
    "project_first": ("never", "always"),
    "segments": (1, 2),
    "inside": (0, 1, 2),
}
QUICK_FACTORS = FACTORS | {
    "mesh": ((1, 1), (4, 4)),
    "chunk": (5, WHOLE),
    "block_size": (4,),
    "interleave": (1, "block"),
    "index_shards": (1, "dcp"),
    "segments": (2,),
    "inside": (2,),
}
"""What the default run takes its cases from; other values occur in the slow run, and in tests beside this one."""
INSIDE_EVERY = len(FACTORS["inside"])
"""A case of the default run looks inside every third prompt, from one of these on; it generates from all."""
ALONE = 1
"""Cases of the default run on one device, where paths that exchange have nothing to do."""
LAYOUT = ("model", "mesh", "interleave", "block_size", "chunk")


def name_of(case: dict) -> str:
    tp, dcp = case["mesh"]
    rest = [case[key] for key in FACTORS if key not in ("model", "mesh")]
    return "-".join(map(str, (case["model"], f"tp{tp}", f"dcp{dcp}", *rest)))


def all_of(factors: dict) -> list[dict]:
    return [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]


def product() -> list[dict]:
    """Every layout and chunk at two meshes; the other factors take turns over them."""
    layouts = all_of({key: FACTORS[key] for key in LAYOUT} | {"mesh": ((4, 4), (8, 4))})
    turns = {
        "prefill_path": 1,
        "backend": 3,
        "context_form": 5,
        "index_shards": 2,
        "decode_path": 2,
        "project_first": 9,
        "segments": 11,
        "inside": 1,
    }
    return [
        layout | {key: FACTORS[key][number // every % len(FACTORS[key])] for key, every in turns.items()}
        for number, layout in enumerate(layouts)
    ]


@cache
def golden(model: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / model / "golden.npz") as stored:
        return dict(stored)


def prompts_of(model: str) -> list[int]:
    return sorted(int(key[1:-4]) for key in golden(model) if key.endswith("_ids") and key.count("_") == 1)


def load(case: dict) -> LLM:
    tp, dcp = case["mesh"]
    block = case["block_size"]
    prompts = len(prompts_of(case["model"]))
    return LLM(
        model=str(GOLDEN / case["model"]),
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        block_size=block,
        cp_kv_cache_interleave_size=block if case["interleave"] == "block" else case["interleave"],
        max_num_batched_tokens=case["chunk"],
        dcp_prefill_path=case["prefill_path"],
        dcp_comm_backend=case["backend"],
        dcp_decode_path=case["decode_path"].split()[0],
        dcp_exchange_memory=20_000
        if "rounds" in case["decode_path"]
        else 2**29,  # room for some records, or all
        dcp_project_first=case["project_first"],
        step_segments=case["segments"],
        dcp_indexer_shards={1: 1, 2: math.gcd(2, dcp), "dcp": dcp}[case["index_shards"]],
        max_model_len=WHOLE,
        kv_cache_memory_bytes=32 * 2**20,
        dtype="float32",
        max_num_seqs=prompts,
        precompile_bs_paddings=(prompts,),
        precompile_token_paddings=(case["chunk"],),
    )


def check_inside(llm: LLM, model: str, prompt: int) -> None:
    """Prompt and greedy tokens in one prefill: everything the golden holds about their rows."""
    stored = {key[3:]: value for key, value in golden(model).items() if key.startswith(f"p{prompt}_")}
    length = len(stored["ids"])
    seen = llm.compute_logits([*stored["ids"].tolist(), *stored["greedy_ids"].tolist()], capture=True)
    tolerance = LOGIT_TOLERANCE[model]
    np.testing.assert_allclose(seen.logits[:length], stored["logits"], rtol=0, atol=tolerance)
    np.testing.assert_allclose(seen.logits[length - 1 : -1], stored["greedy_logits"], rtol=0, atol=tolerance)
    if "hidden" in stored:
        np.testing.assert_allclose(seen.hidden[:, :length], stored["hidden"], rtol=0, atol=HIDDEN_TOLERANCE)
    for layer, chosen in seen.selections.items():
        np.testing.assert_array_equal(chosen[:length], stored[f"topk_L{layer}"], f"selection, layer {layer}")
        np.testing.assert_array_equal(
            chosen[length:], stored[f"greedy_topk_L{layer}"], f"greedy, layer {layer}"
        )
    for layer, experts in seen.router_ids.items():
        if f"router_ids_L{layer}" in stored:
            np.testing.assert_array_equal(experts[:length], stored[f"router_ids_L{layer}"])
            weights = seen.router_weights[layer][:length]
            np.testing.assert_allclose(weights, stored[f"router_w_L{layer}"], rtol=0, atol=1e-4)


def check_greedy(llm: LLM, model: str) -> None:
    """All prompts in one batch, through decode steps: each continues as it did alone in transformers."""
    stored, prompts = golden(model), prompts_of(model)
    params = SamplingParams(temperature=0, max_tokens=GREEDY_TOKENS, ignore_eos=True, logprobs=0)
    outputs = llm.generate([stored[f"p{prompt}_ids"].tolist() for prompt in prompts], params, use_tqdm=False)
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens = output.outputs[0].token_ids
        assert tokens == stored[f"p{prompt}_greedy_ids"].tolist(), f"prompt {prompt}"
        logits = stored[f"p{prompt}_greedy_logits"]
        top = logits.max(axis=1)
        expected = -np.log(np.exp(logits - top[:, None]).sum(axis=1))
        found = [
            entry[token].logprob for token, entry in zip(tokens, output.outputs[0].logprobs, strict=True)
        ]
        np.testing.assert_allclose(found, expected, rtol=0, atol=2 * LOGIT_TOLERANCE[model])


def prefill_as_captured(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts of `generate` go through the program that `compute_logits` uses: it need not compile another one."""
    runner = llm.engine.runner
    real = runner._run

    def run(shape, blocks, logit_rows):
        if shape.blocks[0].kind == "decode" or shape.capture:
            return real(shape, blocks, logit_rows)
        every = shape._replace(logits=shape.total_rows, capture=True)
        out = real(every, blocks, np.arange(shape.total_rows, dtype=np.int32))
        return out._replace(logits=out.logits[logit_rows])

    monkeypatch.setattr(runner, "_run", run)


def prompts_first(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing decodes before all prompts are computed: steps of both are programs more, and have tests of their own."""
    scheduler = llm.engine.scheduler
    real = scheduler._decode

    def decode(work, budget):
        if scheduler.waiting or any(sequence.prefilling for sequence in scheduler.running):
            return False
        return real(work, budget)

    monkeypatch.setattr(scheduler, "_decode", decode)


def check(case: dict, monkeypatch: pytest.MonkeyPatch, everything: bool = False) -> None:
    # Which form prefill takes depends on the context's length; here every length takes the case's form.
    monkeypatch.setattr(prefill, "DENSE_CONTEXT", 10**6 if case["context_form"] == "mask" else 0)
    llm = load(case)
    prompts_first(llm, monkeypatch)
    if not everything and (case["chunk"] != WHOLE or case["interleave"] == "block"):
        prefill_as_captured(llm, monkeypatch)  # the others use the program that serving uses
    check_greedy(llm, case["model"])
    first, every = (0, 1) if everything else (case["inside"], INSIDE_EVERY)
    for prompt in prompts_of(case["model"])[first::every]:
        steps = len(golden(case["model"])[f"p{prompt}_ids"]) // case["chunk"]
        # The longest prompts in the smallest chunks take as long as all else, and decode has compared their logits.
        if everything or steps <= MOST_CHUNKS:
            check_inside(llm, case["model"], prompt)
    assert llm.engine.stats().cache_usage == 0, "pages are still held"


PAIRS = pairwise(QUICK_FACTORS)
QUICK = [case for case in PAIRS if case["mesh"] != (1, 1)]
QUICK = [case for case in QUICK if (case["model"], case["decode_path"]) != ("tiny-a", "records")] + [
    case for case in PAIRS if case["mesh"] == (1, 1)
][:ALONE]


def test_the_pairwise_cases_cover_every_pair_and_the_default_ones_every_value():
    assert set().union(*(pairs_of(case) for case in PAIRS)) == all_pairs(QUICK_FACTORS)
    for name, values in QUICK_FACTORS.items():
        assert {case[name] for case in QUICK} == set(values), name


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=[] if case in QUICK else pytest.mark.slow) for case in PAIRS],
    ids=name_of,
)
def test_golden(case, devices, monkeypatch):
    devices(case["mesh"][0])
    check(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name_of)
def test_golden_on_all_meshes(case, devices, monkeypatch):
    devices(case["mesh"][0])
    check(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", product(), ids=name_of)
def test_golden_full_product(case, devices, monkeypatch):
    devices(case["mesh"][0])
    check(case, monkeypatch, everything=True)
