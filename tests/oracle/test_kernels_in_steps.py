"""Whole steps that run on the Triton kernels, as the interpreter executes them, against transformers' numbers."""

from dataclasses import replace

import numpy as np
import pytest
from test_goldens import GOLDEN, HIDDEN_TOLERANCE, LOGIT_TOLERANCE, golden, prefill_as_captured

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.engine import blueprint
from glm_dcp_jax.engine.formats import Formats

PROMPT, TOKENS = 3, 8


@pytest.fixture
def interpreted(monkeypatch):
    """Engines that are made now run the kernels, interpreted."""

    class Interpreted:
        @staticmethod
        def of(*arguments) -> Formats:
            return replace(Formats.of(*arguments), kernels="interpret")

    monkeypatch.setattr(blueprint, "Formats", Interpreted)


@pytest.mark.parametrize(
    ("tp", "dcp", "prefill_path"),
    [
        pytest.param(4, 2, "context", marks=pytest.mark.slow),
        (2, 2, "queries"),
        pytest.param(1, 1, "context", marks=pytest.mark.slow),
        pytest.param(4, 4, "queries", marks=pytest.mark.slow),
    ],
)
def test_prefill_and_decode_give_the_goldens_tokens(devices, interpreted, monkeypatch, tp, dcp, prefill_path):
    devices(tp)
    stored = {key[3:]: value for key, value in golden("tiny-a").items() if key.startswith(f"p{PROMPT}_")}
    prompt = stored["ids"].tolist()
    llm = LLM(
        model=str(GOLDEN / "tiny-a"),
        tensor_parallel_size=tp,
        decode_context_parallel_size=dcp,
        dcp_prefill_path=prefill_path,
        block_size=4,
        dtype="float32",
        max_model_len=len(prompt) + TOKENS,
        max_num_batched_tokens=16,
        max_num_seqs=1,
        num_gpu_blocks_override=100,
    )
    assert llm.engine.runner.steps.settings.kernels == "interpret"
    prefill_as_captured(llm, monkeypatch)
    seen = llm.compute_logits(prompt, capture=True)
    np.testing.assert_allclose(seen.logits, stored["logits"], rtol=0, atol=LOGIT_TOLERANCE["tiny-a"])
    np.testing.assert_allclose(seen.hidden, stored["hidden"], rtol=0, atol=HIDDEN_TOLERANCE)
    for layer, chosen in seen.selections.items():
        np.testing.assert_array_equal(chosen, stored[f"topk_L{layer}"], f"selection, layer {layer}")
    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    out = llm.generate([prompt], params, use_tqdm=False)[0]
    assert out.outputs[0].token_ids == stored["greedy_ids"][:TOKENS].tolist()
