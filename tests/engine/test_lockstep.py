"""What process 0 sends, and what the others make of it; here over pipes, between engines of one process."""

from multiprocessing import Pipe

import pytest
from tiny import GREEDY, PROMPT, SETTINGS, changed, tokens_of

from glm_dcp_jax.config import ProcessConfig, engine_config
from glm_dcp_jax.engine import lockstep
from glm_dcp_jax.engine.engine import Engine
from glm_dcp_jax.engine.lockstep import Follower, Leader, OutOfStep
from glm_dcp_jax.engine.waiting import QueueFull


@pytest.fixture(scope="module")
def engines(directory):
    """Two engines that refuse a second request in the queue."""
    config = engine_config(str(directory), **SETTINGS, max_num_queued_reqs=1)
    return [Engine.from_config(config) for _ in range(2)]


@pytest.fixture
def pair(monkeypatch):
    """A leader and a follower that are connected."""
    ours, theirs = Pipe()
    monkeypatch.setattr(lockstep, "_accept", lambda config: [ours])
    monkeypatch.setattr(lockstep, "_exchange_address", lambda port, key: (0, key))
    monkeypatch.setattr(lockstep, "Client", lambda address, authkey: theirs)
    config = ProcessConfig(2, 0, "127.0.0.1:1")
    return Leader(config), Follower(config)


def steps(leader: Leader, engine) -> list:
    """Until nothing is unfinished."""
    finished = []
    while engine.has_unfinished:
        leader.before_step(engine)
        finished += [progress.output() for progress in engine.step() if progress.finished]
    return finished


def test_a_follower_takes_the_same_steps_refusals_and_aborts_included(engines, pair):
    leader, follower = pair
    leading, following = engines
    launched, launch = [], following.runner.launch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(following.runner, "launch", lambda *given: launched.append(given) or launch(*given))
        leader.call(leading, "add_request", "first", PROMPT, changed(GREEDY, temperature=1.0, n=2))
        with pytest.raises(QueueFull):
            leader.call(leading, "add_request", "too much", PROMPT, GREEDY)
        with pytest.raises(ValueError):
            leader.call(leading, "add_request", "no token", [-1], GREEDY)
        while leading.stats().waiting:
            leader.before_step(leading)
            leading.step()
        leader.call(leading, "add_request", "second", PROMPT[:5], changed(GREEDY, temperature=1.0))
        leader.before_step(leading)
        leading.step()
        leader.call(leading, "abort", "first")
        (output,) = steps(leader, leading)
        leader.call(leading, "reset_prefix_cache")
        leader.before_step(leading)
        leader.close()
        follower.follow(following)
    assert output.request_id == "second" and len(tokens_of([output])[0]) == GREEDY.max_tokens
    assert lockstep.digest_of(following) == lockstep.digest_of(leading)
    assert launched and not following.has_unfinished
    assert following.scheduler.prefixes.stats == leading.scheduler.prefixes.stats


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        ("a request", "add_request ended with QueueFull here, and with no error in process 0"),
        ("a waiting request", "this process stands at"),
        ("a token", "this process stands at"),
    ],
)
def test_a_follower_that_has_gone_another_way_ends(engines, pair, difference, message):
    leader, follower = pair
    leading, following = engines
    if difference == "a waiting request":
        leading.add_request("another", PROMPT, GREEDY)
        following.add_request("another", PROMPT[::-1], GREEDY)
    else:
        leader.call(leading, "add_request", "one", PROMPT, changed(GREEDY, seed=1))
    for _ in range(3):
        leader.before_step(leading)
        leading.step()
    steps(leader, leading)
    leader.close()
    if difference == "a request":
        following.add_request("another", PROMPT, GREEDY)
    if difference == "a token":
        step = following.step

        def other_step():
            outputs = step()
            for sequence in following.scheduler.running:
                sequence.tokens[-1] ^= 1
            return outputs

        following.step = other_step
    try:
        with pytest.raises(OutOfStep, match=message):
            follower.follow(following)
    finally:
        vars(following).pop("step", None)
        for request_id in list(following._requests):
            following.abort(request_id)
        while following.has_unfinished:
            following.step()
        following._generation_tokens = leading._generation_tokens


def test_selections_that_differ_between_processes_end_the_follower(engines, pair):
    leader, follower = pair
    leading, following = engines
    for engine, hashes in ((leading, 5), (following, 6)):
        engine.runner.exchanges._history.append((1, hashes))
    leader.before_step(leading)
    leader.close()
    with pytest.raises(OutOfStep, match="selected different positions"):
        follower.follow(following)


def test_a_follower_that_is_gone_is_noticed(engines, pair):
    leader, follower = pair
    follower._connection.close()
    with pytest.raises(OutOfStep, match="a process of this engine is gone"):
        for _ in range(3):
            leader.before_step(engines[0])


def test_one_process_sends_nothing(engines):
    leader = Leader(ProcessConfig())
    leader.call(engines[0], "add_request", "alone", PROMPT, GREEDY)
    assert leader._calls == []
    steps(leader, engines[0])
    leader.close()
