"""compute_logits against the numpy oracle, and what it refuses."""

import numpy as np
import pytest
from numpy_reference import NumpyReference, load_checkpoint
from tiny import CONFIG, GREEDY, PROMPT, SETTINGS, random_prompts, tiny_llm

MAX_MODEL_LEN, VOCABULARY = SETTINGS["max_model_len"], CONFIG["vocab_size"]


@pytest.mark.parametrize("length", [1, 2, 16, 64, 65, MAX_MODEL_LEN])
def test_every_positions_logits_equal_the_oracles(llm, directory, length):
    (ids,) = random_prompts(length, seed=length)
    logits = llm.compute_logits(ids)
    assert logits.shape == (length, VOCABULARY) and logits.dtype == np.float32
    expected = NumpyReference(*load_checkpoint(directory))(ids).logits
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)


@pytest.mark.parametrize(
    ("settings", "tolerance"),
    [
        ({"dtype": "bfloat16"}, 0.5),
        ({"dtype": "float16"}, 0.06),
        ({"dtype": "float32", "kv_cache_dtype": "bfloat16"}, 0.2),
    ],
    ids=["bfloat16", "float16", "bfloat16 records"],
)
def test_narrow_types_stay_close_where_no_choice_can_flip(directory, settings, tolerance):
    """With every position and every expert chosen, rounding moves logits by about the type's precision."""
    everything = {"index_topk": 128, "num_experts_per_tok": CONFIG["n_routed_experts"]}
    llm = tiny_llm(directory, hf_overrides=everything, **settings)
    (ids,) = random_prompts(70, seed=6)
    config, tensors = load_checkpoint(directory)
    difference = np.abs(
        llm.compute_logits(ids) - NumpyReference(config | everything, tensors)(ids).logits
    ).max()
    assert 1e-5 < difference < tolerance


def test_capture_shows_hidden_states_selections_and_router_choices(llm, directory):
    (ids,) = random_prompts(70, seed=3)
    seen, expected = (
        llm.compute_logits(ids, capture=True),
        NumpyReference(*load_checkpoint(directory))(ids),
    )
    assert seen.hidden.shape == (3, 70, CONFIG["hidden_size"])
    np.testing.assert_allclose(seen.hidden, expected.hidden, rtol=0, atol=3e-4)
    assert list(seen.selections) == [0] and list(seen.router_ids) == [1]
    np.testing.assert_array_equal(seen.selections[0], expected.selections[0])
    np.testing.assert_array_equal(seen.router_ids[1], expected.router_ids[1])
    np.testing.assert_allclose(seen.router_weights[1], expected.router_weights[1], rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([], "the prompt is empty"),
        ([7] * (MAX_MODEL_LEN + 1), "101 tokens exceed max_model_len 100"),
        ([7, VOCABULARY], f"token id {VOCABULARY} is not in the vocabulary"),
        ([7] * (MAX_MODEL_LEN - 1) + [VOCABULARY], f"token id {VOCABULARY} is not in the vocabulary"),
        ([-1], "token id -1 is not in the vocabulary"),
    ],
    ids=["none", "too many", "unknown", "unknown at the very end", "negative"],
)
def test_tokens_that_cannot_run(llm, ids, message):
    with pytest.raises(ValueError, match=message):
        llm.compute_logits(ids)


def test_a_busy_engine_is_refused_and_goes_on(llm, greedy):
    llm.engine.add_request("busy", PROMPT, GREEDY)
    with pytest.raises(RuntimeError, match="needs an idle engine"):
        llm.compute_logits([7])
    outputs = []
    while llm.engine.has_unfinished:
        outputs += llm.engine.step()
    assert outputs[-1].outputs[0].token_ids == greedy
