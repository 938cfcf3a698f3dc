"""After warm-up nothing compiles: not for any mix of requests, sampling parameters, lengths or outputs."""

import jax
import jax.numpy as jnp
import pytest
from tiny import CONFIG, GREEDY, SETTINGS, changed, generate, random_prompts, tiny_llm

from glm_dcp_jax import LLM
from glm_dcp_jax.engine.compiles import CompileCounter
from glm_dcp_jax.engine.structured_outputs import StructuredOutputs


def compile_something(constant: float) -> None:
    jax.jit(lambda x: x + constant)(jnp.ones(3)).block_until_ready()


class TestCounter:
    def test_it_counts_programs_from_its_creation_on(self):
        compile_something(0.25)
        counter = CompileCounter()
        assert counter.total == 0
        compile_something(0.5)
        assert counter.total >= 1

    def test_what_comes_after_warm_up_is_counted_apart(self):
        counter = CompileCounter()
        compile_something(0.75)
        assert counter.after_warm_up == 0
        counter.mark_warm()
        assert counter.after_warm_up == 0
        compile_something(1.25)
        assert counter.after_warm_up >= 1
        counter.mark_warm()
        assert counter.after_warm_up == 0

    def test_a_program_that_is_there_already_is_not_counted(self):
        add = jax.jit(lambda x: x + 1.5)
        add(jnp.ones(3)).block_until_ready()
        counter = CompileCounter()
        add(jnp.ones(3)).block_until_ready()
        assert counter.total == 0


@pytest.fixture(
    scope="module",
    params=[
        (1, 1, 0),
        pytest.param((4, 2, 0), marks=pytest.mark.slow),
        pytest.param((1, 1, 2), marks=pytest.mark.slow),
    ],
    ids=["one device", "a mesh of 4 by 2", "one device that drafts"],
)
def warm(request, drafting, devices) -> LLM:
    tp, dcp, drafts = request.param
    devices(tp)
    sizes = {"tensor_parallel_size": tp, "decode_context_parallel_size": dcp}
    if drafts:
        sizes["speculative_config"] = {"method": "mtp", "num_speculative_tokens": drafts}
    if tp > 1:
        sizes["precompile_token_paddings"] = (64,)
    llm = tiny_llm(drafting, **sizes)
    llm.engine.runner.warm_up()
    return llm


def test_a_mixed_load_compiles_nothing(warm):
    prompts = random_prompts(1, 2, 3, 5, 15, 16, 17, 33, 63, 64, 65, 66, 90, 99)
    some = [
        GREEDY,
        changed(GREEDY, temperature=1.0, n=3),
        changed(GREEDY, temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, seed=1),
        changed(GREEDY, logprobs=3, max_tokens=1),
        changed(GREEDY, temperature=1.0, logprobs=0, stop=["the"], stop_token_ids=[9]),
        changed(GREEDY, temperature=1.0, presence_penalty=0.5, min_tokens=3, ignore_eos=False),
        changed(GREEDY, max_tokens=None),
        changed(GREEDY, prompt_logprobs=1),
        changed(GREEDY, ignore_eos=False, structured_outputs=StructuredOutputs(regex="[ab]{4}")),
    ]
    generate(warm, prompts, [some[row % len(some)] for row in range(len(prompts))])
    for row, prompt in enumerate(prompts):
        generate(warm, [prompt], some[(row + 1) % len(some)])
    engine = warm.engine
    engine.add_request("aborted", prompts[-2], GREEDY)
    engine.step()
    engine.abort("aborted")
    assert engine.stats().compiles_after_warm_up == 0


def test_warming_up_again_has_nothing_to_compile(warm):
    before = warm.engine.runner.compiles.total
    warm.engine.runner.warm_up()
    assert warm.engine.runner.compiles.total == before


def test_an_engine_that_was_not_warmed_up_reports_no_surprises(directory):
    llm = tiny_llm(directory)
    generate(llm, random_prompts(5))
    assert llm.engine.runner.compiles.total > 0
    assert llm.engine.stats().compiles_after_warm_up == 0


def test_a_surprise_is_reported(directory):
    """A shape that serving never asks for: logits of all rows."""
    llm = tiny_llm(directory)
    llm.engine.runner.warm_up()
    assert llm.engine.stats().compiles_after_warm_up == 0
    assert llm.compute_logits([7] * 9).shape == (9, CONFIG["vocab_size"])
    assert llm.engine.stats().compiles_after_warm_up >= 1


def test_warm_up_gives_up_when_it_is_told_to(directory):
    llm = tiny_llm(directory, max_model_len=SETTINGS["max_model_len"] - 1)
    llm.engine.runner.warm_up(stopped=lambda: True)
    generate(llm, random_prompts(5))
    assert llm.engine.stats().compiles_after_warm_up == 0
