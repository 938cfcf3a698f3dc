"""What people get wrong or do at bad moments: odd prompts, Ctrl+C, two threads, caches larger than the machine."""

import threading

import numpy as np
import pytest
from tiny import check_idle, generate, only, tiny_llm

from glm_dcp_jax import SamplingParams
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.engine import memory

PROMPT = [3, 1, 4, 1, 5]
GREEDY = SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([[1.7, 2.2]], "must be integers, but the list holds 1.7"),
        ([["1", "2"]], "must be integers, but the list holds '1'"),
        ([True, False], "must be integers, but the list holds True"),
        ({"prompt_token_ids": "12"}, "token ids must be a list of integers, but got '12'"),
        ({"prompt_token_ids": [1], "multi_modal_data": 1}, "and holds \\['multi_modal_data'\\]"),
        (b"abc", "prompts must be text, token ids"),
        (5, "prompts must be text, token ids"),
        (None, "prompts must be text, token ids"),
        ([1, "a"], "token ids must be a list of integers, but got 1"),
    ],
)
def test_a_prompt_that_is_none_is_refused(llm, prompts, message):
    with pytest.raises(ValueError, match=message):
        llm.generate(prompts, GREEDY, use_tqdm=False)


def test_numpy_prompts_are_prompts(llm):
    expected = only(llm, PROMPT).token_ids
    assert only(llm, np.array(PROMPT)).token_ids == expected
    assert only(llm, {"prompt_token_ids": np.array(PROMPT, np.uint16)}).token_ids == expected


@pytest.mark.parametrize("params", [{"temperature": 0}, [GREEDY, None]])
def test_sampling_params_of_another_type_are_refused(llm, params):
    with pytest.raises(ValueError, match="sampling_params must be SamplingParams"):
        llm.generate([PROMPT, PROMPT], params, use_tqdm=False)


@pytest.mark.parametrize("messages", [[], [[]], {"role": "user", "content": "x"}, "hello"])
def test_a_conversation_must_be_one(llm, messages):
    with pytest.raises(ValueError, match="messages must be a list of messages"):
        llm.chat(messages, GREEDY, use_tqdm=False)


@pytest.mark.parametrize("tokens", [[1.5], [True], "abc", [[1, 2]]])
def test_logits_of_no_tokens(llm, tokens):
    with pytest.raises(ValueError, match="token ids must be"):
        llm.compute_logits(tokens)


def test_an_interrupt_in_a_step_leaves_an_engine_that_can_be_used_again(directory):
    llm = tiny_llm(directory)
    expected = only(llm, PROMPT).token_ids

    def interrupted(*_: object) -> None:
        for pool in llm.engine.runner.pools[0]:
            pool.delete()  # as when the step has begun
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner.steps, "get", lambda *_: interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate(llm, [PROMPT, PROMPT])
    check_idle(llm)
    assert only(llm, PROMPT).token_ids == expected


def test_an_interrupt_in_compute_logits_leaves_nothing_to_be_found(directory):
    """What was remembered of earlier requests went with the pools."""
    llm = tiny_llm(directory)
    expected = only(llm, PROMPT).token_ids

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner.steps, "get", lambda *_: interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.compute_logits(PROMPT)
    check_idle(llm)
    assert only(llm, PROMPT).token_ids == expected


def test_threads_take_turns(llm):
    expected = [only(llm, [token]).token_ids for token in (1, 2, 3)]
    found: dict[int, list[int]] = {}

    def run(token: int) -> None:
        found[token] = only(llm, [token]).token_ids

    threads = [threading.Thread(target=run, args=(token,)) for token in (1, 2, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [found[token] for token in (1, 2, 3)] == expected


@pytest.mark.parametrize(
    ("flag", "size"), [("kv_cache_memory_bytes", 10**13), ("num_gpu_blocks_override", 10**11)]
)
def test_a_cache_larger_than_the_machine_is_refused(directory, flag, size):
    with pytest.raises(
        ConfigError, match=r"takes [\d,.]+ GiB on 1 virtual devices.*this machine has [\d,.]+ GiB"
    ):
        tiny_llm(directory, **{"num_gpu_blocks_override": None, flag: size})


def test_without_meminfo_no_cache_is_too_large(monkeypatch):
    monkeypatch.setattr("builtins.open", lambda *_, **__: (_ for _ in ()).throw(OSError))
    assert memory._available_host_bytes() == 2**63


def test_warm_up_stops_when_told_to(directory):
    llm = tiny_llm(directory)
    stopped = threading.Event()

    def get(*_: object) -> None:
        stopped.set()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner.steps, "get", get)
        llm.engine.runner.warm_up(stopped.is_set)
    assert llm.engine.stats().compiles_after_warm_up == 0


def test_a_step_that_does_not_compile_ends_the_warm_up(directory):
    llm = tiny_llm(directory)

    def get(*_: object) -> None:
        raise RuntimeError("no such instruction")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine.runner.steps, "get", get)
        with pytest.raises(RuntimeError, match="no such instruction"):
            llm.engine.runner.warm_up()
