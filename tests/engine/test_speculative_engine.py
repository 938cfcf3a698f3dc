"""Drafts by the MTP layer: they save steps and change nothing, whatever a request asks for and what becomes of it."""

import json

import jsonschema
import pytest
from random_schemas import random_schema
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

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs
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


@pytest.mark.slow  # test_soak loses pages with drafts too
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


TEMPERATURES = (0.0, 0.8, 1.5)


def check_schemas(llm: LLM, plain: LLM, seeds: range, temperatures: tuple[float, ...]) -> int:
    """With drafts and without the same tokens, and JSON of its schema unless it was cut off; returns how many ended."""
    cases = [(seed, temperature) for seed in seeds for temperature in temperatures]
    made = [random_schema(seed) for seed, _ in cases]
    asked = [
        SamplingParams(
            temperature=temperature,
            top_p=0.95,
            seed=seed,
            max_tokens=70,
            structured_outputs=StructuredOutputs(json=schema, disable_any_whitespace=seed % 2 == 0),
        )
        for (seed, temperature), schema in zip(cases, made, strict=True)
    ]
    prompts = [[10 + seed % 200] for seed, _ in cases]
    found, expected = generate(llm, prompts, asked), generate(plain, prompts, asked)
    assert tokens_of(found) == tokens_of(expected)
    ended = 0
    for schema, request in zip(made, found, strict=True):
        (output,) = request.outputs
        if output.finish_reason != "length":
            assert output.finish_reason == "stop"
            jsonschema.validate(json.loads(output.text), schema)
            ended += 1
    return ended


def test_structured_outputs_are_what_their_schemas_say_with_drafts_and_without(llm, plain):
    before = llm.engine.stats().drafts.accepted
    ended = [check_schemas(llm, plain, range(n, 9, 3), (TEMPERATURES[n],)) for n in range(3)]
    assert sum(ended) >= 3
    assert llm.engine.stats().drafts.accepted > before, "no draft was right: the test shows nothing"


@pytest.mark.slow
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_200_random_schemas(llm, plain, temperature):
    ended = sum(check_schemas(llm, plain, range(n, n + 20), (temperature,)) for n in range(0, 200, 20))
    print(f"{ended} of 200 outputs ended by themselves")
    assert ended >= 50


def test_what_is_bound_only_behind_a_token_is_free_before_it(llm, plain):
    """As reasoning is; the token may come in the middle of a run of drafts, and the output does not end before it."""
    (free,) = tokens_of(generate(plain, MIXED[:1], changed(RANDOM, max_tokens=40)))
    until = next(token for token in free[3:] if token not in free[:3])
    wanted = StructuredOutputs(choice=["cat", "rat"], after_token=until)
    params = changed(RANDOM, max_tokens=60, ignore_eos=False, structured_outputs=wanted)
    found, expected = only(llm, MIXED[0], params), only(plain, MIXED[0], params)
    assert found.token_ids == expected.token_ids and found.finish_reason == "stop"
    at = found.token_ids.index(until)
    assert found.token_ids[: at + 1] == free[: at + 1]
    behind = llm.engine.tokenizer.decode(found.token_ids[at + 1 : -1])
    assert behind in ("cat", "rat")


def test_bound_and_free_requests_share_steps(llm, plain):
    bound = changed(RANDOM, ignore_eos=False, structured_outputs=StructuredOutputs(regex="[ab]{20}"))
    mixed = [bound, LONG, RULES, changed(bound, n=2)]
    assert tokens_of(generate(llm, MIXED[:4], mixed)) == [
        tokens
        for prompt, params in zip(MIXED, mixed, strict=False)
        for tokens in tokens_of(generate(plain, [prompt], params))
    ]


def test_a_grammar_that_breaks_fails_its_request_alone(llm, plain):
    many = " | ".join(f'"{number}"' for number in range(2500))  # more than can be followed
    breaking = StructuredOutputs(grammar=f"start: A A A A A many\nA: /[xy]/\nmany: {many}")
    params = [changed(RANDOM, ignore_eos=False, structured_outputs=breaking), LONG]
    for engine in (llm, plain):
        broken, other = generate(engine, MIXED[:2], params)
        assert broken.outputs[0].finish_reason == "error" and "items" in broken.error
        assert other.outputs[0].finish_reason == "length" and other.error is None
