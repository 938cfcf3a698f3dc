"""Prompts that one engine computes and another goes on from: the answers are one engine's, whatever the two are like.

The default run has a few pairs in processes of their own, and more with both engines in this process; `-m slow` has all
pairs in processes of their own.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from handover import (
    DRAFTS,
    IN_CHUNKS,
    PAIRS,
    EngineHere,
    Pair,
    alone,
    ask,
    ask_to_leave,
    check_at_once,
    check_logprobs,
    check_same,
    hand_over,
    pair_here,
    pair_of_processes,
    sized,
    walk,
    with_room,
)
from tiny import random_prompts, write_drafting, write_tiny

from glm_dcp_jax import LLM
from glm_dcp_jax.transfer.transports import available

IN_PROCESSES = ["P TP2/DCP1 -> D TP4/DCP4"]
IN_THIS_ONE = ["everything differs"]
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[bool, Path]:
    """The checkpoints, without and with an MTP layer."""
    return {
        False: write_tiny(tmp_path_factory.mktemp("tiny")),
        True: write_drafting(tmp_path_factory.mktemp("drafting")),
    }


@pytest.fixture(scope="module")
def one_for(models) -> Callable[[Pair], EngineHere]:
    """What a pair is compared with: an engine on one device, without drafts."""
    made: dict[str, EngineHere] = {}

    def one(pair: Pair) -> EngineHere:
        key = f"{pair.drafting} {pair.one}"
        if key not in made:
            made[key] = EngineHere(LLM(str(models[pair.drafting]), **with_room(pair.one)))
        return made[key]

    return one


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_THIS_ONE)
def test_a_walk_in_this_process(name, models, one_for):
    pair, one = PAIRS[name], one_for(PAIRS[name])
    with pair_here(models[pair.drafting], pair.producer, pair.consumer) as (producer, consumer):
        for what, step in walk(pair.block).items():
            before = producer.sent_tokens
            first, found = hand_over(producer, consumer, step.prompt, **step.sampling)
            expected = alone(one, step.prompt, **step.sampling)
            assert first["token_ids"] == expected["token_ids"][:1], what
            check_same(found, expected, what, pair.tolerance)
            assert producer.sent_tokens - before == step.tokens_to_read(pair.block), what
            producer.wait_idle()
            consumer.wait_idle()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in IN_PROCESSES else SLOW) for name in PAIRS]
)
def test_a_walk_in_two_processes(name, models, one_for):
    pair = PAIRS[name]
    check_in_processes(pair, "tcp", models, one_for(pair))


@pytest.mark.slow
@pytest.mark.parametrize("connector", ["jax", "nixl"])
def test_a_walk_with_other_transports(connector, models, one_for):
    if connector not in available():
        pytest.skip(f"connector {connector} cannot be had here")
    pair = Pair(sized(4, 4), sized(6, 3))
    check_in_processes(pair, connector, models, one_for(pair))


def check_in_processes(pair: Pair, connector: str, models: dict[bool, Path], one: EngineHere) -> None:
    with pair_of_processes(models[pair.drafting], pair.producer, pair.consumer, connector) as engines:
        for what, step in walk(pair.block).items():
            first, found = hand_over(*engines, step.prompt, **step.sampling)
            expected = alone(one, step.prompt, **step.sampling)
            assert first["token_ids"] == expected["token_ids"][:1], what
            check_same(found, expected, what, pair.tolerance)
        check_at_once(one, *engines, random_prompts(70, 33, 9, 121, seed=1), pair.tolerance)
        for engine in engines:
            state = engine.wait_idle(60.0)
            assert state["used"] == 0 and not any(state["usage"].values()), state
            assert state["compiles_after_warm_up"] == 0


CROWDED = Pair(
    sized(2, 2, num_gpu_blocks_override=27, **IN_CHUNKS, **DRAFTS),
    sized(2, 1, num_gpu_blocks_override=27, block_size=8, **DRAFTS),
    drafting=True,
)
"""Pages for 208 tokens on either side, chunks of 16 tokens on P, and drafts."""


@pytest.fixture(scope="module")
def crowded_engines(models) -> Iterator[tuple[EngineHere, EngineHere]]:
    with pair_here(models[True], CROWDED.producer, CROWDED.consumer) as engines:
        yield engines


@pytest.fixture
def crowded(crowded_engines) -> Iterator[tuple[EngineHere, EngineHere]]:
    """A pair with few pages. Nothing may be left in either."""
    yield crowded_engines
    for engine in crowded_engines:
        engine.wait_idle()


@pytest.fixture
def one(one_for) -> EngineHere:
    """What `crowded` is compared with."""
    return one_for(CROWDED)


@pytest.mark.slow
def test_drafts_after_a_hand_over_are_as_often_right_as_one_engines(crowded, one, models):
    """Wrong rows of the MTP layer would change no token, but what is drafted."""
    producer, consumer = crowded
    drafting = EngineHere(LLM(str(models[True]), **with_room(DRAFTS)))
    accepted = []
    for prompt in random_prompts(45, 46, seed=2):
        expected = alone(one, prompt, max_tokens=30)
        before = [engine.engine.stats().drafts.accepted for engine in (consumer, drafting)]
        check_same(hand_over(producer, consumer, prompt, max_tokens=30)[1], expected, "drafted")
        check_same(alone(drafting, prompt, max_tokens=30), expected, "drafted by one engine")
        now = [engine.engine.stats().drafts.accepted for engine in (consumer, drafting)]
        accepted.append([count - past for count, past in zip(now, before, strict=True)])
    assert all(ours == theirs for ours, theirs in accepted), accepted
    assert sum(ours for ours, _ in accepted) > 0, "no draft was right: the test shows nothing"


def test_all_of_a_requests_outputs_go_on_from_one_hand_over(crowded, one):
    producer, consumer = crowded
    (prompt,) = random_prompts(40, seed=3)
    before = producer.sent_tokens
    sampling = {"n": 2, "temperature": 0.8, "seed": 5}
    _, found = hand_over(producer, consumer, prompt, **sampling)
    expected = alone(one, prompt, **sampling)
    assert expected["all_token_ids"][0] != expected["all_token_ids"][1]
    check_same(found, expected, "n = 2")
    assert producer.sent_tokens - before == 39


def test_a_prompt_whose_logprobs_are_asked_for_is_computed_by_the_consumer(crowded, one):
    producer, consumer = crowded
    (prompt,) = random_prompts(40, seed=4)
    before = producer.sent_tokens
    _, found = hand_over(producer, consumer, prompt, prompt_logprobs=5)
    expected = alone(one, prompt, prompt_logprobs=5)
    check_same(found, expected, "prompt_logprobs")
    check_logprobs(found["prompt_logprobs"], expected["prompt_logprobs"], "of the prompt")
    assert producer.sent_tokens == before, "nobody needed the producer's cache"


@SLOW
def test_what_a_producer_draws_beyond_the_first_token_is_not_handed_over(crowded, one):
    producer, consumer = crowded
    (prompt,) = random_prompts(30, seed=5)
    left = producer.result(ask_to_leave(producer, prompt, max_tokens=7))
    expected = alone(one, prompt)
    assert left["token_ids"] == expected["token_ids"][:7]
    check_same(consumer.result(ask(consumer, prompt, left["kv_transfer_params"])), expected, "seven tokens")


def test_a_conversation_goes_on_turn_by_turn(crowded, one):
    """A turn begins with what the consumer was handed, what it computed of that itself, and what is new."""
    producer, consumer = crowded
    said: list[int] = []
    for turn, question in enumerate(random_prompts(30, 17, 25, seed=6)):
        said = said + question
        before = producer.sent_tokens
        _, found = hand_over(producer, consumer, said)
        check_same(found, alone(one, said), f"turn {turn}")
        assert producer.sent_tokens - before < (len(question) + 8 if turn else len(said))
        said = said + found["token_ids"]


@pytest.mark.slow
def test_a_producers_prompt_that_loses_its_pages_is_handed_over_all_the_same(crowded, one):
    producer, consumer = crowded
    before = producer.engine.stats().preemptions
    *own, prompt = random_prompts(20, 21, 120, seed=7)
    others = [ask(producer, each, max_tokens=60) for each in own]
    while not all(has_begun(producer, name) for name in others):
        producer.step()
    _, found = hand_over(producer, consumer, prompt)
    assert producer.engine.stats().preemptions > before, "nothing lost its pages: the test shows nothing"
    check_same(found, alone(one, prompt), "preempted on P")
    for each, name in zip(own, others, strict=True):
        check_same(producer.result(name), alone(one, each, max_tokens=60), "beside it")


def has_begun(engine: EngineHere, name: str) -> bool:
    """Whether a request that runs has its first token."""
    return bool(engine.engine._requests[name].sequences[0].output_ids)


@SLOW
def test_what_was_handed_over_may_lose_its_pages_while_others_run(crowded, one):
    producer, consumer = crowded
    before = consumer.engine.stats().preemptions
    (own,) = random_prompts(25, seed=8)
    name = ask(consumer, own, max_tokens=40)
    check_at_once(one, producer, consumer, random_prompts(40, 41, 43, seed=9), max_tokens=40)
    check_same(consumer.result(name), alone(one, own, max_tokens=40), "beside them")
    assert consumer.engine.stats().preemptions > before, "nothing lost its pages: the test shows nothing"
