"""compute_logits against the numpy oracle, and what it refuses."""

import numpy as np
import pytest
from numpy_reference import NumpyReference, load_checkpoint
from tiny import CONFIG, GREEDY, PROMPT, SETTINGS, random_prompts, tiny_llm

from glm_dcp_jax import SamplingParams
from glm_dcp_jax.parallel import prefill

MAX_MODEL_LEN, VOCABULARY = SETTINGS["max_model_len"], CONFIG["vocab_size"]


@pytest.mark.parametrize("length", [1, 2, 16, 64, 65, MAX_MODEL_LEN])
def test_every_positions_logits_equal_the_oracles(llm, directory, length):
    (ids,) = random_prompts(length, seed=length)
    logits = llm.compute_logits(ids)
    assert logits.shape == (length, VOCABULARY) and logits.dtype == np.float32
    expected = NumpyReference(*load_checkpoint(directory))(ids).logits
    np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)


NARROW = {
    "bfloat16": ({"dtype": "bfloat16"}, 0.5),
    "float16": ({"dtype": "float16"}, 0.06),
    "bfloat16 records": ({"kv_cache_dtype": "bfloat16"}, 0.2),
    "fp8 records": ({"kv_cache_dtype": "fp8_ds_mla"}, 2.0),
    "nvfp4 records": ({"kv_cache_dtype": "nvfp4_ds_mla"}, 6.0),
    "nvfp4 records, fp8 rope": ({"kv_cache_dtype": "nvfp4_ds_mla", "nvfp4_rope_dtype": "fp8"}, 6.0),
}
POSITIONS, MASK = 0, 10**6
QUICK = {("bfloat16", MASK), ("fp8 records", POSITIONS), ("nvfp4 records", POSITIONS)}


@pytest.mark.parametrize(
    ("name", "dense_context"),
    [
        pytest.param(name, form, marks=[] if (name, form) in QUICK else pytest.mark.slow)
        for name in NARROW
        for form in (POSITIONS, MASK)
    ],
)
def test_narrow_types_stay_close_where_no_choice_can_flip(directory, name, dense_context, monkeypatch):
    """With every position and every expert chosen, rounding moves logits by about the type's precision."""
    settings, tolerance = NARROW[name]
    monkeypatch.setattr(prefill, "DENSE_CONTEXT", dense_context)
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
    progress = []
    while llm.engine.has_unfinished:
        progress += llm.engine.step()
    assert progress[-1].output().outputs[0].token_ids == greedy


@pytest.mark.parametrize(
    ("dtype", "tp", "dcp", "path"),
    [
        pytest.param("bfloat16", 1, 1, "context", marks=pytest.mark.slow),
        ("bfloat16", 4, 2, "queries"),
        pytest.param("float16", 2, 2, "context", marks=pytest.mark.slow),
    ],
)
def test_narrow_types_run_every_kind_of_step(devices, directory, dtype, tp, dcp, path):
    """Some products of narrow types do not exist on every platform: chunks of each size, and batches of each size."""
    devices(tp)
    llm = tiny_llm(
        directory,
        dtype=dtype,
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        dcp_prefill_path=path,
        precompile_bs_paddings=(1, 4),
    )
    params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
    prompts = random_prompts(3, 20, 70)
    together = [out.outputs[0].token_ids for out in llm.generate(prompts, params, use_tqdm=False)]
    alone = [llm.generate([prompt], params, use_tqdm=False)[0].outputs[0].token_ids for prompt in prompts]
    assert [len(tokens) for tokens in together] == [3, 3, 3] == [len(tokens) for tokens in alone]
