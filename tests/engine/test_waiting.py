"""Who may join the line of those that wait: how much may wait, and which priorities there are."""

from dataclasses import replace

import pytest
from tiny import GREEDY, PROMPT, changed, generate, only, random_prompts, tiny_llm

from glm_dcp_jax import LLM
from glm_dcp_jax.engine.sampling_params import ParameterError
from glm_dcp_jax.engine.waiting import QueueFull, check_priority


@pytest.fixture
def limit(llm, monkeypatch):
    """Set limits of the queue."""

    def set_limits(**limits: object) -> None:
        scheduler = replace(llm.engine.config.scheduler, **limits)
        config = replace(llm.engine.config, scheduler=scheduler)
        monkeypatch.setattr(llm.engine, "config", config)
        monkeypatch.setattr(llm.engine._maker, "_config", config)

    return set_limits


def finish(llm: LLM) -> None:
    while llm.engine.has_unfinished:
        llm.engine.step()


def test_one_request_more_than_may_wait_is_refused(llm, limit):
    limit(max_num_queued_reqs=2)
    for name in "ab":
        llm.engine.add_request(name, PROMPT, GREEDY)
    with pytest.raises(QueueFull) as raised:
        llm.engine.add_request("c", PROMPT, GREEDY)
    assert str(raised.value) == (
        "the queue is full: 2 requests wait, this request adds 1, and --max-num-queued-reqs allows 2; try again later"
    )
    assert raised.value.limit == "max_num_queued_reqs" and not isinstance(raised.value, ValueError)
    llm.engine.step()  # both run, and nothing waits
    llm.engine.add_request("c", PROMPT, GREEDY)
    finish(llm)


def test_prompt_tokens_that_wait_are_limited_too(llm, limit):
    limit(max_num_queued_tokens=30)
    first, second, third = random_prompts(20, 10, 1)
    llm.engine.add_request("a", first, GREEDY)
    llm.engine.add_request("b", second, GREEDY)
    with pytest.raises(
        QueueFull, match="30 prompt tokens wait, this request adds 1, .* allows 30; try again"
    ):
        llm.engine.add_request("c", third, GREEDY)
    finish(llm)


def test_a_request_of_several_outputs_waits_once(llm, limit):
    limit(max_num_queued_reqs=2, max_num_queued_tokens=2 * len(PROMPT))
    for name in "ab":
        llm.engine.add_request(name, PROMPT, changed(GREEDY, n=3))
    finish(llm)


def test_where_nothing_waits_any_request_may(llm, limit):
    limit(max_num_queued_reqs=1, max_num_queued_tokens=1)
    llm.engine.add_request("long", PROMPT, GREEDY)
    finish(llm)


def test_an_llm_queues_all_it_is_given(directory):
    llm = tiny_llm(directory, max_num_queued_reqs=1, max_num_queued_tokens=1)
    assert len(generate(llm, random_prompts(5, 6, 7), changed(GREEDY, max_tokens=1))) == 3


@pytest.mark.parametrize("policy", ["fcfs", "priority"])
def test_priorities_are_integers_and_fcfs_has_but_one(policy):
    check_priority(0, policy)
    for wrong in (True, 1.5, "1"):
        with pytest.raises(ParameterError, match="priority must be an integer"):
            check_priority(wrong, policy)
    if policy == "priority":
        check_priority(-3, policy)
    else:
        with pytest.raises(
            ParameterError, match="Priority scheduling is not enabled, .* but is -3; leave it out"
        ):
            check_priority(-3, policy)


def test_each_prompt_has_its_priority_or_none(llm, greedy):
    assert generate(llm, [PROMPT])[0].outputs[0].token_ids == greedy
    with pytest.raises(ValueError, match="2 prompts came with 1 priorities; give one for each"):
        llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False, priority=[0])
    with pytest.raises(ParameterError, match="Priority scheduling is not enabled"):
        llm.generate([PROMPT, PROMPT], GREEDY, use_tqdm=False, priority=[0, 1])
    assert only(llm, PROMPT).token_ids == greedy


def test_llms_priorities_reach_the_scheduler(llm, limit, monkeypatch):
    limit(scheduling_policy="priority")
    given = []
    add = llm.engine.scheduler.add
    monkeypatch.setattr(
        llm.engine.scheduler, "add", lambda sequence: (given.append(sequence.priority), add(sequence))
    )
    llm.generate([PROMPT, PROMPT[:3]], GREEDY, use_tqdm=False, priority=[7, -2])
    assert given == [7, -2]
