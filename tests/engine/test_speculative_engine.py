"""Drafts by the MTP layer: they save steps and change nothing, whatever a request asks for and what becomes of it."""

import pytest
from tiny import (
    GREEDY,
    MIXED,
    SETTINGS,
    changed,
    check_idle,
    generate,
    only,
    random_prompts,
    tiny_llm,
    tokens_of,
)

from glm_dcp_jax import LLM
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.model.safetensors_reader import CheckpointError

LONG = changed(GREEDY, max_tokens=24)
RANDOM = changed(LONG, temperature=0.8, top_p=0.9, seed=5)
RULES = changed(
    RANDOM, presence_penalty=1.5, frequency_penalty=0.5, bad_words=["the"], min_tokens=9, ignore_eos=False
)


@pytest.fixture(scope="module")
def plain(drafting) -> LLM:
    """Without drafts, and one request at a time."""
    return tiny_llm(drafting, async_scheduling=False, enable_prefix_caching=False)


def with_drafts(directory, drafts: int, **settings) -> LLM:
    return tiny_llm(
        directory, speculative_config={"method": "mtp", "num_speculative_tokens": drafts}, **settings
    )


@pytest.fixture(scope="module")
def shared(drafting) -> LLM:
    return with_drafts(drafting, 3)


@pytest.fixture
def llm(shared):
    yield shared
    check_idle(shared)
    shared.engine.scheduler.prefixes.check()


@pytest.mark.parametrize("params", [LONG, RANDOM, RULES], ids=["greedy", "random", "rules"])
def test_a_mixed_load_gives_each_request_what_it_gets_alone_without_drafts(llm, plain, params):
    before = llm.engine.stats().drafts
    found = tokens_of(generate(llm, MIXED, params))
    assert found == [only(plain, prompt, params).token_ids for prompt in MIXED]
    now = llm.engine.stats().drafts
    assert now.accepted > before.accepted, "no draft was right: the test shows nothing"
    assert now.proposed - before.proposed > now.accepted - before.accepted, "no draft was wrong"
    assert sum(now.accepted_at) == now.accepted and now.accepted_at == sorted(now.accepted_at, reverse=True)


def steps_taken(llm: LLM, monkeypatch) -> int:
    launched, launch = [], llm.engine.runner.launch
    monkeypatch.setattr(llm.engine.runner, "launch", lambda *given: launched.append(given) or launch(*given))
    generate(llm, MIXED[:1], LONG)
    return len(launched)


def test_drafts_save_steps(llm, plain, monkeypatch):
    steps = [steps_taken(engine, monkeypatch) for engine in (llm, plain)]
    assert steps[0] < steps[1]


def test_outputs_of_one_request_share_its_prompt(llm, plain):
    params = changed(RANDOM, n=3)
    assert tokens_of(generate(llm, MIXED[:4], params)) == tokens_of(generate(plain, MIXED[:4], params))


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 5, 6])
def test_max_tokens_ends_a_run_of_accepted_drafts(llm, plain, tokens):
    params = changed(GREEDY, max_tokens=tokens)
    found = generate(llm, MIXED, params)
    assert tokens_of(found) == [only(plain, prompt, params).token_ids for prompt in MIXED]
    assert {output.outputs[0].finish_reason for output in found} == {"length"}


@pytest.mark.parametrize("at", range(6))
def test_a_stop_token_ends_a_run_of_accepted_drafts(llm, plain, at):
    (whole,) = tokens_of(generate(plain, MIXED[:1], LONG))
    params = changed(LONG, stop_token_ids=[whole[at]])
    found, expected = only(llm, MIXED[0], params), only(plain, MIXED[0], params)
    assert found.token_ids == expected.token_ids == whole[: whole.index(whole[at]) + 1]
    assert (found.finish_reason, found.stop_reason) == ("stop", whole[at])


def test_log_probabilities_are_those_of_the_accepted_tokens(llm, plain):
    params = changed(LONG, logprobs=2)
    for prompt in MIXED[:3]:
        found, expected = only(llm, prompt, params), only(plain, prompt, params)
        assert found.token_ids == expected.token_ids
        assert [list(each) for each in found.logprobs] == [list(each) for each in expected.logprobs]
        assert found.cumulative_logprob == pytest.approx(expected.cumulative_logprob, abs=1e-4)


@pytest.mark.parametrize("length", [SETTINGS["max_model_len"] - 1, SETTINGS["max_model_len"] - 2, 90])
def test_the_longest_sequences_end_where_they_must(llm, plain, length):
    prompt = random_prompts(length, seed=9)[0]
    params = changed(GREEDY, max_tokens=None)
    assert only(llm, prompt, params).token_ids == only(plain, prompt, params).token_ids


def test_who_loses_its_pages_goes_on_as_if_nothing_had_happened(drafting, plain):
    prompts = random_prompts(20, 30, 25, 10, 17, seed=2)
    params = changed(GREEDY, max_tokens=40)
    short = with_drafts(drafting, 2, num_gpu_blocks_override=25)
    assert tokens_of(generate(short, prompts, params)) == [
        only(plain, each, params).token_ids for each in prompts
    ]
    assert short.engine.stats().preemptions > 0
    check_idle(short)
    short.engine.scheduler.prefixes.check()


def test_a_hit_gives_up_the_token_whose_next_one_differs(llm, plain):
    """The MTP layer's row for a token holds the token behind it, so two prompts share one row less than tokens."""
    block = llm.engine.runner.layout.virtual_block
    prefix = random_prompts(10 * block, seed=31)[0]
    first, other = [*prefix, 7, 8, 9], [*prefix, 17, 18, 19]
    (before,) = generate(llm, [first], LONG)
    outputs = generate(llm, [other, first], LONG)
    assert before.num_cached_tokens == 0
    assert [output.num_cached_tokens for output in outputs] == [10 * block - 1, 10 * block + 2]
    assert tokens_of(outputs) == [only(plain, prompt, LONG).token_ids for prompt in (other, first)]


def test_a_step_too_small_for_one_request_is_refused(drafting):
    with pytest.raises(ConfigError, match="max_num_batched_tokens must be an integer of at least 4"):
        with_drafts(drafting, 3, max_num_batched_tokens=3, precompile_token_paddings=None)


def test_a_checkpoint_without_the_layer_is_refused(directory):
    with pytest.raises(CheckpointError, match="no tensors of the MTP layer.*leave --speculative-config out"):
        with_drafts(directory, 1)
