"""20,000 outputs of an engine that drafts: distributed as the logits say, with temperature and top_p."""

from collections import Counter

import numpy as np
import pytest
from drawing import assert_drawn_from, kept
from tiny import GREEDY, PROMPT, changed, generate, tiny_llm

from glm_dcp_jax import LLM

FILTERS = {"temperature": 0.7, "top_p": 0.9}
REQUESTS, OUTPUTS = 200, 100


@pytest.fixture(scope="module")
def engine(drafting) -> LLM:
    return tiny_llm(
        drafting,
        max_num_seqs=64,
        precompile_bs_paddings=(64,),
        max_num_batched_tokens=256,
        num_gpu_blocks_override=600,
        speculative_config={"method": "mtp", "num_speculative_tokens": 2},
    )


def expected(engine: LLM, tokens: list[int]) -> np.ndarray:
    """The distribution behind these tokens, filtered."""
    logits = engine.compute_logits(tokens)[-1].astype(np.float64)
    return kept(**FILTERS, probabilities=np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum())


@pytest.mark.slow
def test_outputs_are_distributed_as_without_drafts(engine):
    params = [changed(GREEDY, **FILTERS, n=OUTPUTS, seed=seed, max_tokens=3) for seed in range(REQUESTS)]
    outputs = [
        output.token_ids
        for request in generate(engine, [PROMPT] * REQUESTS, params)
        for output in request.outputs
    ]
    assert len(outputs) == 20_000
    assert_drawn_from(np.array([tokens[0] for tokens in outputs]), expected(engine, PROMPT))
    for first, count in Counter(tokens[0] for tokens in outputs).most_common(5):
        assert count > 300
        second = np.array([tokens[1] for tokens in outputs if tokens[0] == first])
        assert_drawn_from(second, expected(engine, [*PROMPT, first]))
    drafts = engine.engine.stats().drafts
    assert 0 < drafts.accepted < drafts.proposed, "the test shows nothing"
