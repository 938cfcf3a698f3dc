"""Requests that run together, share pages, lose them, and are started ahead: each gets what it gets alone."""

import pytest
from tiny import (
    GREEDY,
    MIXED,
    changed,
    check_idle,
    generate,
    only,
    random_prompts,
    tiny_llm,
    tokens_of,
    write_tiny,
)

from glm_dcp_jax import LLM

RANDOM = changed(GREEDY, temperature=0.8, top_p=0.9, seed=5)


@pytest.fixture(scope="module")
def plain(directory) -> LLM:
    """One request at a time, read at once, and nothing is remembered."""
    return tiny_llm(directory, async_scheduling=False, enable_prefix_caching=False)


@pytest.mark.parametrize("params", [GREEDY, RANDOM, changed(RANDOM, presence_penalty=1.5, bad_words=["the"])])
def test_a_mixed_load_gives_each_request_what_it_gets_alone(llm, plain, params):
    """The penalty makes the engine wait for each token; without it steps are started ahead."""
    together = tokens_of(generate(llm, MIXED, params))
    assert together == [only(plain, prompt, params).token_ids for prompt in MIXED]


def test_outputs_of_one_request_differ_from_one_another_and_not_from_a_rerun(llm, plain):
    params = changed(RANDOM, n=3)
    found = tokens_of(generate(llm, MIXED[:4], params))
    assert found == tokens_of(generate(plain, MIXED[:4], params))
    assert len({tuple(tokens) for tokens in found}) > len(found) // 2


def test_who_loses_its_pages_goes_on_as_if_nothing_had_happened(directory, plain):
    """Four requests that together need more pages than there are."""
    prompts = random_prompts(20, 30, 25, 10, 17, seed=2)
    params = changed(GREEDY, max_tokens=40)
    short = tiny_llm(directory, num_gpu_blocks_override=25)
    assert tokens_of(generate(short, prompts, params)) == [
        only(plain, prompt, params).token_ids for prompt in prompts
    ]
    assert short.engine.stats().preemptions > 0
    check_idle(short)
    short.engine.scheduler.prefixes.check()


@pytest.mark.parametrize(
    "dcp", [1, pytest.param(2, marks=pytest.mark.slow), 4, pytest.param(8, marks=pytest.mark.slow)]
)
def test_a_common_prefix_is_computed_once_and_counted_exactly(directory, devices, dcp):
    devices(dcp)
    llm = tiny_llm(
        directory, tensor_parallel_size=dcp, decode_context_parallel_size=dcp, precompile_token_paddings=None
    )
    prefix = random_prompts(60, seed=3)[0]
    prompts = [[*prefix, *tail] for tail in random_prompts(3, 5, 1, 9, 4, seed=4)]
    outputs = generate(llm, prompts[:1]) + generate(llm, prompts[1:])
    assert [output.num_cached_tokens for output in outputs] == [0, 60, 60, 60, 60]
    again = generate(llm, prompts)
    assert [output.num_cached_tokens for output in again] == [len(prompt) - 1 for prompt in prompts]
    assert tokens_of(again) == tokens_of(outputs)
    assert llm.engine.reset_prefix_cache()
    assert generate(llm, prompts[:1])[0].num_cached_tokens == 0
    check_idle(llm)


@pytest.mark.parametrize(
    "dcp", [1, pytest.param(2, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]
)
def test_a_long_prefix_of_many_requests_at_once_is_computed_once(tmp_path, devices, dcp, monkeypatch):
    """1,000 tokens, 32 requests: what all steps together computed is the prefix and what each has behind it."""
    devices(dcp)
    llm = tiny_llm(
        write_tiny(tmp_path, max_position_embeddings=2048),
        tensor_parallel_size=dcp,
        decode_context_parallel_size=dcp,
        max_model_len=1100,
        max_num_seqs=32,
        precompile_bs_paddings=(32,),
        max_num_batched_tokens=256,
        precompile_token_paddings=(256,),
        num_gpu_blocks_override=1200 // dcp,
    )
    computed, following = [], llm.engine.scheduler.next

    def counted():
        work = following()
        computed.append(sum(chunk.count for chunk in work.chunks))
        return work

    monkeypatch.setattr(llm.engine.scheduler, "next", counted)
    prefix = random_prompts(1000, seed=6)[0]
    tails = random_prompts(*range(2, 34), seed=7)
    outputs = generate(llm, [[*prefix, *tail] for tail in tails], changed(GREEDY, max_tokens=3))
    assert sum(computed) == 1000 + sum(map(len, tails))
    assert [output.num_cached_tokens for output in outputs] == [0] + [1000] * 31


def test_a_block_that_never_filled_is_found_again(llm, plain):
    """By the same prompt, by one that parts within it, and by one that goes on behind the output."""
    first = random_prompts(3, seed=40)[0]
    output = only(llm, first, max_tokens=1)
    assert llm.engine.runner.layout.virtual_block == 4
    prompts = [first, [*first[:2], 9, 9], [*first, *output.token_ids, 8]]
    found = generate(llm, prompts)
    assert [each.num_cached_tokens for each in found] == [2, 2, 3]
    assert tokens_of(found) == [only(plain, prompt).token_ids for prompt in prompts]


def test_a_copy_that_there_is_no_page_for_is_done_without(directory, plain):
    """The cache has room for exactly one longest request, which would need its source's page as well."""
    short = tiny_llm(directory, num_gpu_blocks_override=25)
    (prompt,) = random_prompts(99, seed=41)
    (first,), (again,) = generate(short, [prompt]), generate(short, [prompt])
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, 96)
    assert tokens_of([first, again]) == [only(plain, prompt).token_ids] * 2
