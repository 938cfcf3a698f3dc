"""How likely the prompt's own tokens were: as all its logits say, however it is cut into chunks and shared."""

import numpy as np
import pytest
from tiny import GREEDY, MIXED, changed, check_idle, generate, random_prompts, tiny_llm

from glm_dcp_jax import LLM
from glm_dcp_jax.engine.prompt_scores import ROWS

REPORTING = changed(GREEDY, prompt_logprobs=2)


def expected(llm: LLM, prompt: list[int]) -> np.ndarray:
    """[tokens - 1, vocabulary] log probabilities behind each token but the last."""
    logits = llm.compute_logits(prompt)[:-1].astype(np.float64)
    return logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))


def check(llm: LLM, output, prompt: list[int]) -> None:
    first, *found = output.prompt_logprobs
    assert first is None and len(found) == len(prompt) - 1
    for token, row, entries in zip(prompt[1:], expected(llm, prompt), found, strict=True):
        best = np.argsort(-row)[:2].tolist()
        assert list(entries) == list(dict.fromkeys([token, *best]))
        for each, entry in entries.items():
            assert entry.logprob == pytest.approx(row[each], abs=1e-4)
            assert entry.rank == 1 + int((row > row[each]).sum())


def test_a_mixed_load_reports_each_prompt(llm):
    for prompt, output in zip(MIXED, generate(llm, MIXED, REPORTING), strict=True):
        check(llm, output, prompt)


def test_longer_than_a_block_of_scores_and_beside_requests_that_decode(llm):
    prompts = random_prompts(3, ROWS + 20, 4, ROWS + 21, 5, seed=8)
    params = [changed(GREEDY, max_tokens=30), REPORTING] * 2 + [changed(REPORTING, n=2)]
    outputs = generate(llm, prompts, params)
    assert [output.prompt_logprobs is None for output in outputs] == [True, False, True, False, False]
    for prompt, output in zip(prompts, outputs, strict=True):
        if output.prompt_logprobs is not None:
            check(llm, output, prompt)


def test_what_the_cache_holds_is_computed_once_more_since_it_holds_no_logits(llm):
    (prompt,) = random_prompts(50, seed=12)
    plain = generate(llm, [prompt])[0]
    (reported,) = generate(llm, [prompt], REPORTING)
    assert reported.num_cached_tokens == 0
    check(llm, reported, prompt)
    assert reported.outputs[0].token_ids == plain.outputs[0].token_ids


def test_who_loses_its_pages_reports_its_prompt_once(directory):
    prompts = random_prompts(20, 30, 25, 10, 17, seed=2)
    short = tiny_llm(directory, num_gpu_blocks_override=25)
    outputs = generate(short, prompts, changed(REPORTING, max_tokens=40))
    assert short.engine.stats().preemptions > 0
    for prompt, output in zip(prompts, outputs, strict=True):
        check(short, output, prompt)
    check_idle(short)


def test_a_prompt_of_one_token_has_nothing_to_report(llm):
    assert generate(llm, [[7]], REPORTING)[0].prompt_logprobs == [None]


def test_on_a_mesh(directory, devices):
    devices(4)
    llm = tiny_llm(directory, tensor_parallel_size=4, decode_context_parallel_size=2)
    (output,) = generate(llm, MIXED[1:2], REPORTING)
    check(llm, output, MIXED[1])
