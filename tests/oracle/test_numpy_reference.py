"""The numpy oracle against transformers' numbers (tests/oracle/golden), and rules no golden exercises."""

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from numpy_reference import NumpyReference, choose_top, full_layers, load_checkpoint, rotate, sparse_layers

GOLDEN = Path(__file__).parent / "golden"
PROMPTS = [("tiny-a", p) for p in range(6)] + [("tiny-d", p) for p in range(5)]
LOGIT_TOLERANCE = {"tiny-a": 2e-4, "tiny-d": 4e-4}
HIDDEN_TOLERANCE = 3e-4


@cache
def golden(name):
    directory = GOLDEN / name
    readme = json.loads((directory / "README.json").read_text())
    return NumpyReference(*load_checkpoint(directory)), np.load(directory / "golden.npz"), readme


@cache
def forward_with_greedy(name, prompt):
    """One teacher-forced pass over the prompt and all its golden greedy tokens."""
    reference, arrays, _ = golden(name)
    return reference(np.concatenate([arrays[f"p{prompt}_ids"], arrays[f"p{prompt}_greedy_ids"]]))


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_logits_and_greedy_tokens_match_the_golden(name, prompt):
    _, arrays, _ = golden(name)
    forward, length = forward_with_greedy(name, prompt), len(arrays[f"p{prompt}_ids"])
    np.testing.assert_allclose(
        forward.logits[:length], arrays[f"p{prompt}_logits"], rtol=0, atol=LOGIT_TOLERANCE[name]
    )
    decoded = forward.logits[length - 1 : -1]
    np.testing.assert_allclose(
        decoded, arrays[f"p{prompt}_greedy_logits"], rtol=0, atol=LOGIT_TOLERANCE[name]
    )
    np.testing.assert_array_equal(decoded.argmax(-1), arrays[f"p{prompt}_greedy_ids"])


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_hidden_states_match_the_golden(name, prompt):
    _, arrays, _ = golden(name)
    forward, length = forward_with_greedy(name, prompt), len(arrays[f"p{prompt}_ids"])
    last = forward.final_hidden[length - 1 : length]
    np.testing.assert_allclose(last, arrays[f"p{prompt}_final_hidden"], rtol=0, atol=HIDDEN_TOLERANCE)
    if f"p{prompt}_hidden" in arrays:
        stored = arrays[f"p{prompt}_hidden"]
        np.testing.assert_allclose(forward.hidden[:, :length], stored, rtol=0, atol=HIDDEN_TOLERANCE)


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_selections_and_router_choices_match_the_golden(name, prompt):
    _, arrays, readme = golden(name)
    forward, length = forward_with_greedy(name, prompt), len(arrays[f"p{prompt}_ids"])
    assert list(forward.selections) == [i for i, kind in enumerate(readme["indexer_types"]) if kind == "full"]
    for layer, selection in forward.selections.items():
        np.testing.assert_array_equal(selection[:length], arrays[f"p{prompt}_topk_L{layer}"])
        np.testing.assert_array_equal(selection[length:], arrays[f"p{prompt}_greedy_topk_L{layer}"])
    assert list(forward.router_ids) == [
        i for i, kind in enumerate(readme["mlp_layer_types"]) if kind == "sparse"
    ]
    for layer in forward.router_ids:
        if f"p{prompt}_router_ids_L{layer}" in arrays:
            np.testing.assert_array_equal(
                forward.router_ids[layer][:length], arrays[f"p{prompt}_router_ids_L{layer}"]
            )
            weights = arrays[f"p{prompt}_router_w_L{layer}"]
            np.testing.assert_allclose(forward.router_weights[layer][:length], weights, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("name", "prompt"), PROMPTS)
def test_margins_are_those_the_golden_reports(name, prompt):
    _, arrays, readme = golden(name)
    forward, length = forward_with_greedy(name, prompt), len(arrays[f"p{prompt}_ids"])
    gaps = readme["prompts"][prompt]["min_gaps"]
    assert forward.index_margin.min() == pytest.approx(gaps["topk"], abs=5e-5)
    assert forward.expert_margin.min() == pytest.approx(gaps["expert"], abs=1e-5)
    assert forward.logit_margin[length - 1 : -1].min() == pytest.approx(gaps["logit"], abs=2e-4)


def test_float64_agrees_with_float32_and_greedy_recomputes():
    _, arrays, _ = golden("tiny-a")
    precise = NumpyReference(*load_checkpoint(GOLDEN / "tiny-a"), dtype=np.float64)
    assert precise(arrays["p2_ids"]).logits.dtype == np.float64
    np.testing.assert_allclose(precise(arrays["p2_ids"]).logits, arrays["p2_logits"], rtol=0, atol=1e-4)
    assert precise.greedy(arrays["p2_ids"].tolist(), 4) == arrays["p2_greedy_ids"][:4].tolist()


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"index_topk_freq": 4, "index_skip_topk_offset": 3}, [0, 1, 2, *range(6, 78, 4)]),
        ({}, list(range(78))),
        ({"index_topk_freq": None, "index_topk_pattern": None, "indexer_types": None}, list(range(78))),
        ({"index_topk_pattern": "FS" * 39, "index_topk_freq": 4}, list(range(0, 78, 2))),
        ({"index_topk_pattern": ["F", "S", "S"] * 26}, list(range(0, 78, 3))),
        ({"indexer_types": ["full"] + ["shared"] * 77, "index_topk_pattern": "F" * 78}, [0]),
    ],
)
def test_schedule_rules(fields, expected):
    assert full_layers({"num_hidden_layers": 78, **fields}) == expected


def test_sparse_layer_rules():
    assert sparse_layers({"num_hidden_layers": 4, "first_k_dense_replace": 1}) == [1, 2, 3]
    config = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "mlp_layer_types": ["dense", "sparse", "dense"],
    }
    assert sparse_layers(config) == [1]


def test_ties_go_to_the_lowest_position_and_negative_zero_is_zero():
    scores = np.array(
        [[-0.0, 0.0, -0.0, 1.0], [0.0, 0.0, -np.inf, -np.inf], [-1.0, -np.inf, -np.inf, -np.inf]]
    )
    chosen, gap = choose_top(scores, 2)
    np.testing.assert_array_equal(
        chosen, [[True, False, False, True], [True, True, False, False], [True, False, False, False]]
    )
    np.testing.assert_array_equal(gap, [0.0, np.inf, np.inf])


def test_rope_pairs():
    x = np.zeros((2, 1, 4))
    x[:, 0, 0] = 1.0  # position 1 turns the first pair by one radian
    interleaved, half_split = rotate(x, 100.0, True)[1, 0], rotate(x, 100.0, False)[1, 0]
    np.testing.assert_allclose(interleaved, [np.cos(1), np.sin(1), 0, 0], atol=1e-12)
    np.testing.assert_allclose(half_split, [np.cos(1), 0, np.sin(1), 0], atol=1e-12)
