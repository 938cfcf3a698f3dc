"""The MTP layer against numbers that transformers' own layer gave: logits of all rows, and drafts in both ways."""

from functools import cache

import numpy as np
import pytest
from drafting import Drafting, Given, Part, Seen, lines_of
from pairwise import pairwise
from test_goldens import GOLDEN, LOGIT_TOLERANCE

from glm_dcp_jax.parallel import prefill

PROMPTS = (1, 2, 4)
CHUNK = 32
ROWS = 4
NO_LIMIT = 10**6
FACTORS = {
    "model": ("tiny-a", "tiny-d"),
    "mesh": ((1, 1), (4, 4), (8, 2)),
    "decode_path": ("queries", "records", "bulk"),
    "form": ("whole", "verification", "mixed"),
    "context_form": ("mask", "positions"),
    "prefill_path": ("context", "queries"),
    "backend": ("ag_rs", "a2a"),
    "project_first": ("never", "always"),
    "interleave": (1, 4),
    "block_size": (4, 16),
}
QUICK = [
    dict(zip(FACTORS, values, strict=True))
    for values in (
        ("tiny-a", (4, 4), "queries", "mixed", "mask", "queries", "a2a", "always", 4, 4),
        ("tiny-a", (8, 2), "bulk", "whole", "positions", "context", "ag_rs", "never", 4, 16),
    )
]


def name_of(case: dict) -> str:
    return "-".join(str(value).replace(" ", "") for value in case.values())


@cache
def golden(model: str) -> dict[str, np.ndarray]:
    with np.load(GOLDEN / model / "golden_mtp.npz") as stored:
        return dict(stored)


def prompts_of(model: str) -> list[list[int]]:
    """Each prompt with the token that the main model continues it with."""
    stored = golden(model)
    return [[*stored[f"p{prompt}_ids"].tolist(), int(stored[f"p{prompt}_next_id"])] for prompt in PROMPTS]


def part_of(ids: list[int], start: int, stop: int) -> Part:
    return Part(start, ids[start:stop], ids[start + 1 : stop + 1])


def chunks(engine: Drafting, prompts: list[list[int]], stops: list[int], *others: Given) -> list[Seen]:
    """Prompts up to where each stops, in chunks of all together, which are the last block of each step."""
    steps = []
    for start in range(0, max(stops), CHUNK):
        parts = {
            request: part_of(ids, start, min(start + CHUNK, stop))
            for request, (ids, stop) in enumerate(zip(prompts, stops, strict=True))
            if start < stop
        }
        steps.append(engine.step(*others, Given("prefill", CHUNK, parts)))
    return steps


def run(engine: Drafting, prompts: list[list[int]], form: str) -> list[Seen]:
    """All prompts through the main model and the MTP layer.

    whole: each in one prefill chunk. verification: in chunks, and the last rows as if they were drafts. mixed: the last
    step has last rows of two prompts and a chunk of the third; those before have the same shape.
    """
    lengths = [len(ids) - 1 for ids in prompts]
    if form == "whole":
        every = {request: part_of(ids, 0, len(ids) - 1) for request, ids in enumerate(prompts)}
        return [engine.step(Given("prefill", max(lengths), every))]
    tails = (ROWS, 1, 3) if form == "verification" else (ROWS, 2, 20)
    stops = [length - tail for length, tail in zip(lengths, tails, strict=True)]
    padding = [Given("decode", ROWS, {})] if form == "mixed" else []
    steps = chunks(engine, prompts, stops, *padding)
    last = {
        request: part_of(ids, lengths[request] - tails[request], lengths[request])
        for request, ids in enumerate(prompts)
    }
    if form == "verification":
        return [*steps, engine.step(Given("decode", ROWS, last))]
    decode = {request: last[request] for request in (0, 1)}
    return [*steps, engine.step(Given("decode", ROWS, decode), Given("prefill", CHUNK, {2: last[2]}))]


def check_drafts(engine: Drafting, seen: Seen, model: str, share: bool) -> None:
    """Three drafts of each prompt beside an idle line, which stays idle."""
    stored, how = golden(model), "shared" if share else "recompute"
    requests = [2, -1, 0, 1]
    draft = lines_of(seen.out.draft, [seen.last.get(request, -1) for request in requests])
    tokens = [draft.tokens]
    for number in (1, 2):
        out = engine.further(draft, requests, [NO_LIMIT] * 4, share)
        draft = out.draft
        tokens.append(np.asarray(draft.tokens))
        for request, logits in zip(requests, np.asarray(out.logits), strict=True):
            if request >= 0:
                expected = stored[f"p{PROMPTS[request]}_draft_logits_{how}"][number]
                np.testing.assert_allclose(logits, expected, rtol=0, atol=LOGIT_TOLERANCE[model])
    assert np.asarray(draft.tokens)[1] == np.asarray(draft.positions)[1] == -1
    for line, request in enumerate(requests):
        if request >= 0:
            expected = stored[f"p{PROMPTS[request]}_draft_ids_{how}"].tolist()
            assert [int(each[line]) for each in tokens] == expected


def check(case: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "DENSE_CONTEXT", 10**6 if case["context_form"] == "mask" else 0)
    model, (tp, dcp) = case["model"], case["mesh"]
    prompts = prompts_of(model)
    settings = {
        "tensor_parallel_size": tp,
        "decode_context_parallel_size": dcp,
        "dcp_decode_path": case["decode_path"],
        "dcp_prefill_path": case["prefill_path"],
        "dcp_comm_backend": case["backend"],
        "dcp_project_first": case["project_first"],
        "cp_kv_cache_interleave_size": case["interleave"],
        "block_size": case["block_size"],
    }
    engine = Drafting(GOLDEN / model, len(prompts), max(map(len, prompts)) + 2, settings)
    steps = run(engine, prompts, case["form"])
    for request, (prompt, ids) in enumerate(zip(PROMPTS, prompts, strict=True)):
        found = np.concatenate([step.mtp_logits[request] for step in steps if request in step.mtp_logits])
        expected = golden(model)[f"p{prompt}_logits"]
        np.testing.assert_allclose(found, expected, rtol=0, atol=LOGIT_TOLERANCE[model])
        assert steps[-1].logits[request][-1].argmax() == ids[-1]
    for share in (True, False):
        check_drafts(engine, steps[-1], model, share)


def test_the_drafts_differ_by_how_they_select():
    """Only past index_topk: otherwise the two ways could not be told apart."""
    for model, same in (("tiny-a", 1), ("tiny-d", 0)):
        ids = [
            golden(model)[f"p{prompt}_draft_ids_{how}"]
            for prompt in PROMPTS
            for how in ("shared", "recompute")
        ]
        assert sum((one == other).all() for one, other in zip(ids[::2], ids[1::2], strict=True)) == same


@pytest.mark.parametrize("case", [QUICK[0], pytest.param(QUICK[1], marks=pytest.mark.slow)], ids=name_of)
def test_mtp_golden(case, devices, monkeypatch):
    devices(case["mesh"][0])
    check(case, monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("case", pairwise(FACTORS), ids=name_of)
def test_mtp_golden_of_every_pair(case, devices, monkeypatch):
    devices(case["mesh"][0])
    check(case, monkeypatch)
