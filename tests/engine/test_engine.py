"""The engine under its callers: aborts, outputs on the way, failed steps, counts, and NaN in the weights."""

import logging
import re
from collections.abc import Iterator

import jax
import pytest
from tiny import GREEDY, PROMPT, check_idle, generate, only, random_prompts, tiny_llm, tokens_of, write_tiny

from glm_dcp_jax import LLM, SamplingParams


@pytest.fixture(scope="module")
def poison(greedy) -> int:
    """PROMPT's third greedy token, whose embedding is NaN in `broken`."""
    assert greedy[2] not in PROMPT + greedy[:2]
    return greedy[2]


@pytest.fixture(scope="module")
def shared_broken(tmp_path_factory, poison) -> LLM:
    return tiny_llm(write_tiny(tmp_path_factory.mktemp("broken"), nan_tokens=(0, poison)))


@pytest.fixture
def broken(shared_broken) -> Iterator[LLM]:
    """The embeddings of `poison` and of token 0, which padded rows hold, are NaN."""
    yield shared_broken
    check_idle(shared_broken)


class TestEngine:
    @pytest.mark.parametrize("steps", [0, 1, 4])
    def test_abort_ends_a_request_wherever_it_is_and_frees_its_pages(self, llm, greedy, steps):
        engine = llm.engine
        engine.add_request("a", random_prompts(80)[0], GREEDY)
        engine.add_request("b", PROMPT, GREEDY)
        for _ in range(steps):
            engine.step()
        output = engine.abort("a").output()
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert engine.abort("a") is None and engine.abort("unknown") is None
        outputs = []
        while engine.has_unfinished:
            outputs += [progress.output() for progress in engine.step()]
        assert {output.request_id for output in outputs} == {"b"}
        assert outputs[-1].outputs[0].token_ids == greedy

    def test_abort_keeps_the_tokens_so_far_and_what_has_finished(self, llm, greedy):
        engine = llm.engine
        engine.add_request("a", PROMPT, SamplingParams(temperature=0, n=2, max_tokens=20, ignore_eos=True))
        while len(engine._requests["a"].sequences[1].output_ids) < 4:
            engine.step()
        outputs = engine.abort("a").output().outputs
        assert [output.finish_reason for output in outputs] == ["abort", "abort"]
        assert all(output.token_ids[:4] == greedy[:4] for output in outputs)

    def test_outputs_are_cumulative_and_the_last_is_finished(self, llm, greedy):
        llm.engine.add_request("a", PROMPT, GREEDY)
        progress = []
        while llm.engine.has_unfinished:
            progress += llm.engine.step()
        outputs = [each.output() for each in progress]  # what came later is not in them
        assert [output.outputs[0].token_ids for output in outputs] == [greedy[: n + 1] for n in range(8)]
        assert [output.finished for output in outputs] == [False] * 7 + [True]

    def test_an_id_in_use_is_refused_and_free_again_afterwards(self, llm):
        llm.engine.add_request("a", PROMPT, GREEDY)
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            llm.engine.add_request("a", PROMPT, GREEDY)
        llm.engine.abort("a")
        llm.engine.add_request("a", PROMPT, GREEDY)
        llm.engine.abort("a")

    def test_a_failed_step_leaves_an_engine_that_can_be_used_again(self, directory, greedy):
        """The step that fails has taken the pools by donation: they are gone."""
        llm = tiny_llm(directory)

        def fail(*_: object) -> None:
            for pool in llm.engine.runner.pools[0]:
                pool.delete()
            raise RuntimeError("out of memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine.runner.steps, "get", lambda *_: fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                generate(llm, [PROMPT, PROMPT])
        check_idle(llm)
        assert only(llm, PROMPT).token_ids == greedy

    def test_the_cache_is_announced_when_an_engine_starts(self, directory, caplog):
        with caplog.at_level(logging.INFO, logger="glm_dcp_jax"):
            tiny_llm(directory)
        assert "GPU KV cache size: 120 tokens" in caplog.messages
        assert "Maximum concurrency for 100 tokens per request: 1.20x" in caplog.messages
        assert any(
            re.match("KV cache records: float32.*; indexer shards: 1$", line) for line in caplog.messages
        )
        assert not [record for record in caplog.records if record.levelno >= logging.WARNING]

    def test_exchange_settings_that_mean_nothing_without_dcp_are_named(self, directory, caplog):
        tiny_llm(directory, dcp_decode_path="bulk", dcp_comm_backend="a2a")
        (warning,) = [record.getMessage() for record in caplog.records if "no effect" in record.getMessage()]
        assert warning.endswith("--dcp-comm-backend a2a, --dcp-decode-path bulk")

    def test_stats_count_tokens(self, llm):
        assert llm.engine.reset_prefix_cache()
        before = llm.engine.stats()
        generate(llm, [PROMPT, [9, 9]])
        after = llm.engine.stats()
        assert after.prompt_tokens - before.prompt_tokens == len(PROMPT) + 2
        assert after.generation_tokens - before.generation_tokens == 16
        assert (after.running, after.waiting, after.deferred) == (0, 0, 0)
        tokens = after.step_tokens.total - before.step_tokens.total
        assert tokens == len(PROMPT) + 2 + 16, "what steps computed of prompts, and what they drew"
        assert after.device_kind == jax.devices()[0].device_kind


class TestNaN:
    """What touches a NaN fails, what does not is untouched."""

    GOOD = random_prompts(6, 20, 40, seed=8)

    @pytest.fixture
    def good(self, llm, poison) -> list[list[int]]:
        outputs = tokens_of(generate(llm, self.GOOD))
        assert not {0, poison} & {token for tokens in (*self.GOOD, *outputs) for token in tokens}
        return outputs

    def test_padding_of_steps_reaches_nobody(self, broken, good):
        assert tokens_of(generate(broken, self.GOOD)) == good

    @pytest.mark.parametrize("at", [0, 3, 5])
    def test_a_poisoned_prompt_is_an_error_and_its_neighbours_are_not_touched(self, broken, good, poison, at):
        bad = random_prompts(6, seed=9)[0]
        bad[at] = poison
        requests = generate(broken, [self.GOOD[0], bad, *self.GOOD[1:]])
        assert requests[1].finished and requests[1].outputs[0].finish_reason == "error"
        assert requests[1].outputs[0].token_ids == []
        del requests[1]
        assert tokens_of(requests) == good
        assert {request.outputs[0].finish_reason for request in requests} == {"length"}

    def test_a_token_that_poisons_the_output_ends_it_there(self, broken, greedy):
        output = only(broken, PROMPT)
        assert (output.token_ids, output.finish_reason) == (greedy[:3], "error")

    @pytest.mark.parametrize("length", [65, 80, 99])
    def test_poison_in_an_earlier_chunk_is_an_error_and_not_a_wrong_answer(self, broken, poison, length):
        """The chunk with the NaN gives no token, and the chunks after it look healthy."""
        (bad,) = random_prompts(length, seed=10)
        bad[20] = poison
        assert only(broken, bad).finish_reason == "error"

    def test_pages_of_a_poisoned_request_serve_the_next_one(self, broken, good, poison):
        for _ in range(4):
            generate(broken, [[poison] * 60, [poison] * 50])
            assert tokens_of(generate(broken, self.GOOD)) == good

    def test_one_poisoned_request_of_several_sampled_ones(self, broken, llm, poison):
        params = SamplingParams(temperature=0.5, seed=3, max_tokens=2, ignore_eos=True, logprobs=1)
        requests = generate(broken, [self.GOOD[0], [poison]], params)
        assert tokens_of(requests[:1]) == tokens_of(generate(llm, self.GOOD[:1], params))
        assert requests[1].outputs[0].finish_reason == "error" and requests[1].outputs[0].logprobs == []
