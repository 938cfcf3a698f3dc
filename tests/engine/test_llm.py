"""LLM from end to end on a very small checkpoint: prompts, limits, stops, log probabilities, batches, errors, pages."""

import math
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from tiny import CONFIG, make_tokenizer, random_prompts, tiny_llm, write_tiny

from glm_dcp_jax import LLM, SamplingParams
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.engine.outputs import CompletionOutput, RequestOutput

sys.path.append(str(Path(__file__).parents[1] / "oracle"))

from numpy_reference import NumpyReference, load_checkpoint

MAX_MODEL_LEN, PAGES, VOCABULARY = 100, 30, CONFIG["vocab_size"]
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
PROMPT = random_prompts(11, seed=4)[0]
MIXED = random_prompts(5, 30, 1, 70, 9, 17, 64, 65, 12)


def generate(
    llm: LLM, prompts: list, params: SamplingParams | list[SamplingParams] = GREEDY
) -> list[RequestOutput]:
    return llm.generate(prompts, params, use_tqdm=False)


def only(llm: LLM, prompt: object, params: SamplingParams = GREEDY, **changes) -> CompletionOutput:
    """The one output of one prompt; changes are to params."""
    params = SamplingParams(**{**vars(params), **changes})
    (request,) = generate(llm, [prompt], params)
    assert request.finished
    (output,) = request.outputs
    return output


def tokens_of(requests: list[RequestOutput]) -> list[list[int]]:
    return [output.token_ids for request in requests for output in request.outputs]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


@pytest.fixture(scope="module")
def directory(tmp_path_factory) -> Path:
    return write_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def shared(directory) -> LLM:
    return tiny_llm(directory)


@pytest.fixture
def llm(shared) -> Iterator[LLM]:
    """The shared engine; whatever a test does to it, no request and no page may be left."""
    yield shared
    assert not shared.engine.has_unfinished
    assert shared.engine.scheduler.allocator.num_used == 0
    shared.engine.scheduler.allocator.check()
    assert shared.engine.stats().cache_usage == 0


@pytest.fixture(scope="module")
def greedy(shared) -> list[int]:
    """How PROMPT goes on, greedily."""
    return only(shared, PROMPT).token_ids


@pytest.fixture(scope="module")
def bare(directory, greedy) -> LLM:
    """Without a tokenizer, and with PROMPT's fourth greedy token as one of two end-of-sequence tokens."""
    overrides = {"eos_token_id": [VOCABULARY - 1, greedy[3]]}
    return tiny_llm(directory, skip_tokenizer_init=True, hf_overrides=overrides)


@pytest.fixture
def tokenizer():
    return make_tokenizer()


class TestPrompts:
    TEXT = "the cat sat on"

    def test_ids_come_in_four_forms_and_mean_the_same(self, llm, greedy):
        forms = (
            PROMPT,
            [PROMPT],
            {"prompt_token_ids": PROMPT},
            [{"prompt_token_ids": tuple(PROMPT)}],
        )
        for form in forms:
            (request,) = generate(llm, form)
            assert (request.prompt, request.prompt_token_ids) == (None, PROMPT)
            assert request.outputs[0].token_ids == greedy

    def test_text_is_encoded_and_decoded_with_the_checkpoints_tokenizer(self, llm, tokenizer):
        ids = tokenizer.encode(self.TEXT).ids
        expected = only(llm, ids).token_ids
        for form in (self.TEXT, [self.TEXT], {"prompt": self.TEXT}, [{"prompt": self.TEXT}]):
            (request,) = generate(llm, form)
            assert (request.prompt, request.prompt_token_ids) == (self.TEXT, ids)
            assert request.outputs[0].token_ids == expected
            assert request.outputs[0].text == tokenizer.decode(expected)

    def test_a_text_given_beside_its_ids_is_reported_back(self, llm):
        (request,) = generate(llm, {"prompt": "anything", "prompt_token_ids": PROMPT})
        assert (request.prompt, request.prompt_token_ids) == ("anything", PROMPT)

    def test_forms_may_be_mixed_and_outputs_keep_their_order(self, llm, tokenizer, greedy):
        requests = generate(llm, [self.TEXT, PROMPT, {"prompt_token_ids": [9]}])
        assert [request.prompt_token_ids for request in requests] == [
            tokenizer.encode(self.TEXT).ids,
            PROMPT,
            [9],
        ]
        assert requests[1].outputs[0].token_ids == greedy
        assert len({request.request_id for request in requests}) == 3

    def test_no_prompts_no_outputs(self, llm):
        assert generate(llm, []) == []

    @pytest.mark.parametrize(
        ("prompt", "message"),
        [
            ([[]], "the prompt is empty"),
            ("", "the prompt is empty"),
            ({"prompt_token_ids": []}, "the prompt is empty"),
            ({"text": "the"}, '"prompt" \\(text\\) or "prompt_token_ids"'),
            ([VOCABULARY], rf"token id {VOCABULARY} is not in the vocabulary \(0 to {VOCABULARY - 1}\)"),
            ([5, -1], "token id -1 is not in the vocabulary"),
            ([7] * MAX_MODEL_LEN, "maximum context length is 100 tokens, but the prompt has 100"),
            ([7] * (MAX_MODEL_LEN + 1), "maximum context length is 100 tokens, but the prompt has 101"),
        ],
        ids=[
            "no ids",
            "no text",
            "no ids in a dict",
            "a dict of something else",
            "above",
            "below",
            "full",
            "longer",
        ],
    )
    def test_a_prompt_that_cannot_run_is_refused_and_nothing_runs(self, llm, prompt, message):
        before = llm.engine.stats()
        for prompts in (prompt, [PROMPT, prompt[0] if prompt == [[]] else prompt]):
            with pytest.raises(ValueError, match=message):
                generate(llm, prompts)
        assert llm.engine.stats() == before

    def test_chat_renders_the_template_and_adds_no_special_tokens(self, llm, tokenizer):
        template = "{% for m in messages %}{{ m.role }}: {{ m.content }}|{% endfor %}{{ extra }}"
        conversation = [{"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat"}]
        ids = tokenizer.encode("user: the cat|assistant: sat|!").ids
        options = {"use_tqdm": False, "chat_template": template, "chat_template_kwargs": {"extra": "!"}}
        (one,) = llm.chat(conversation, GREEDY, **options)
        assert one.prompt_token_ids == ids and tokens_of([one]) == [only(llm, ids).token_ids]
        both = llm.chat([conversation, conversation[:1]], GREEDY, **options)
        assert tokens_of(both[:1]) == tokens_of([one]) and len(both) == 2


class TestLimits:
    @pytest.mark.parametrize("count", [1, 2, 20])
    def test_max_tokens(self, llm, count):
        output = only(llm, PROMPT, max_tokens=count)
        assert (len(output.token_ids), output.finish_reason, output.stop_reason) == (count, "length", None)

    @pytest.mark.parametrize("max_tokens", [None, 1000])
    def test_the_models_length_ends_what_max_tokens_does_not(self, llm, max_tokens):
        output = only(llm, PROMPT, max_tokens=max_tokens)
        assert len(PROMPT) + len(output.token_ids) == MAX_MODEL_LEN and output.finish_reason == "length"

    def test_a_prompt_that_leaves_room_for_one_token_gets_one(self, llm):
        (prompt,) = random_prompts(MAX_MODEL_LEN - 1)
        output = only(llm, prompt, max_tokens=50)
        assert len(output.token_ids) == 1 and output.finish_reason == "length"
        assert output.token_ids[0] == llm.compute_logits(prompt)[-1].argmax()

    def test_a_prompt_of_one_token(self, llm, directory):
        output = only(llm, [9])
        continued = [9, *output.token_ids]
        logits = NumpyReference(*load_checkpoint(directory))(continued).logits
        np.testing.assert_array_equal(logits[:-1].argmax(axis=1), output.token_ids)

    def test_sixteen_tokens_unless_said_otherwise(self, llm):
        (request,) = llm.generate([PROMPT], SamplingParams(ignore_eos=True), use_tqdm=False)
        assert len(request.outputs[0].token_ids) == 16
        assert llm.get_default_sampling_params() == SamplingParams()


class TestStops:
    def test_a_stop_token_ends_the_output_and_is_not_shown(self, llm, greedy, tokenizer):
        wanted = greedy[3]
        end = greedy.index(wanted) + 1
        output = only(llm, PROMPT, stop_token_ids=[VOCABULARY - 1, wanted])
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (greedy[:end], "stop", wanted)
        assert output.text == tokenizer.decode(greedy[: end - 1])
        shown = only(llm, PROMPT, stop_token_ids=[wanted], include_stop_str_in_output=True)
        assert shown.text == tokenizer.decode(greedy[:end])

    def test_an_end_of_sequence_token_stops_without_a_reason(self, bare, greedy):
        end = greedy.index(greedy[3]) + 1
        output = only(bare, PROMPT, ignore_eos=False)
        assert (output.token_ids, output.finish_reason, output.stop_reason) == (greedy[:end], "stop", None)

    def test_ignore_eos_goes_on(self, bare, greedy):
        output = only(bare, PROMPT, ignore_eos=True)
        assert (output.token_ids, output.finish_reason) == (greedy, "length")

    def test_ignore_eos_keeps_stop_tokens(self, bare, greedy):
        output = only(bare, PROMPT, ignore_eos=True, stop_token_ids=[greedy[3]])
        assert (output.finish_reason, output.stop_reason) == ("stop", greedy[3])

    def test_a_stop_token_at_the_length_limit_is_a_stop(self, llm, greedy):
        output = only(llm, PROMPT, max_tokens=greedy.index(greedy[3]) + 1, stop_token_ids=[greedy[3]])
        assert output.finish_reason == "stop"

    def test_a_stop_string_ends_the_text_before_it(self, llm, tokenizer):
        whole = only(llm, PROMPT, max_tokens=40)
        start = next(at for at in range(4, len(whole.text)) if whole.text[at : at + 2].isascii())
        stop = whole.text[start : start + 2]
        cut = whole.text.index(stop)
        output = only(llm, PROMPT, max_tokens=40, stop=["never said", stop])
        assert (output.text, output.finish_reason, output.stop_reason) == (whole.text[:cut], "stop", stop)
        assert output.token_ids == whole.token_ids[: len(output.token_ids)] != whole.token_ids
        shown = only(llm, PROMPT, max_tokens=40, stop=stop, include_stop_str_in_output=True)
        assert shown.text == whole.text[: cut + 2]

    def test_no_text_unless_wanted(self, llm, bare, greedy):
        for output in (only(llm, PROMPT, detokenize=False), only(bare, PROMPT, ignore_eos=True)):
            assert (output.token_ids, output.text) == (greedy, "")


class TestSampling:
    RANDOM = SamplingParams(temperature=1.0, max_tokens=12, ignore_eos=True, seed=1)

    def test_n_outputs_of_one_prompt_differ_and_repeat(self, llm):
        params = SamplingParams(**{**vars(self.RANDOM), "n": 3})
        first, second = (generate(llm, [PROMPT], params)[0] for _ in range(2))
        assert [output.index for output in first.outputs] == [0, 1, 2] and first.finished
        assert len({tuple(output.token_ids) for output in first.outputs}) == 3
        assert tokens_of([first]) == tokens_of([second])

    def test_more_outputs_than_run_at_once(self, llm):
        params = SamplingParams(**{**vars(GREEDY), "n": 9})
        (request,) = generate(llm, [PROMPT], params)
        assert len(request.outputs) == 9 and len({tuple(output.token_ids) for output in request.outputs}) == 1

    def test_seeds_make_the_difference(self, llm):
        outputs = [tuple(only(llm, PROMPT, self.RANDOM, seed=seed).token_ids) for seed in (1, 2, 1)]
        assert outputs[0] == outputs[2] != outputs[1]

    def test_requests_without_a_seed_differ(self, llm):
        params = SamplingParams(**{**vars(self.RANDOM), "seed": None})
        assert len({tuple(tokens) for tokens in tokens_of(generate(llm, [PROMPT] * 4, params))}) == 4

    @pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}], ids=str)
    def test_filters_reach_the_sampler(self, llm, greedy, filters):
        assert only(llm, PROMPT, self.RANDOM, max_tokens=8, **filters).token_ids == greedy


class TestLogprobs:
    def test_none_unless_asked_for(self, llm):
        output = only(llm, PROMPT)
        assert (output.logprobs, output.cumulative_logprob) == (None, None)

    @pytest.mark.parametrize("temperature", [0.0, 3.0])
    def test_each_token_has_its_own_and_the_likeliest(self, llm, tokenizer, temperature):
        output = only(llm, PROMPT, temperature=temperature, seed=3, logprobs=4)
        rows = log_softmax(llm.compute_logits(PROMPT + output.token_ids))[len(PROMPT) - 1 : -1]
        assert len(output.logprobs) == len(output.token_ids) == 8
        for token, row, entries in zip(output.token_ids, rows, output.logprobs, strict=True):
            order = np.argsort(-row, kind="stable")
            assert entries.keys() == {token, *order[:4].tolist()}
            for id, entry in entries.items():
                assert math.isclose(entry.logprob, row[id], abs_tol=2e-4)
                assert entry.rank == 1 + order.tolist().index(id)
                assert entry.decoded_token == llm.get_tokenizer().token_to_str(id)
        assert math.isclose(output.cumulative_logprob, sum(rows[range(8), output.token_ids]), abs_tol=1e-3)
        if temperature > 0:
            assert any(
                entries[token].rank > 4
                for token, entries in zip(output.token_ids, output.logprobs, strict=True)
            )

    def test_zero_reports_the_sampled_token_alone(self, llm):
        output = only(llm, PROMPT, logprobs=0)
        assert [list(entries) for entries in output.logprobs] == [[token] for token in output.token_ids]

    def test_without_a_tokenizer_tokens_have_no_text(self, bare):
        output = only(bare, PROMPT, logprobs=1)
        assert {entry.decoded_token for entries in output.logprobs for entry in entries.values()} == {None}

    def test_in_a_batch_only_who_asks_gets_them(self, llm):
        asking = SamplingParams(**{**vars(GREEDY), "logprobs": 2})
        outputs = [request.outputs[0] for request in generate(llm, [PROMPT] * 2, [GREEDY, asking])]
        assert outputs[0].logprobs is None and len(outputs[1].logprobs) == 8


class TestBatches:
    @pytest.mark.parametrize("temperature", [0.0, 1.0])
    def test_a_batch_equals_each_alone(self, llm, temperature):
        """Nine requests where four run at once, over chunks, pages and other requests' leavings."""
        params = [
            SamplingParams(temperature=temperature, seed=7 + row, max_tokens=12, ignore_eos=True, top_p=0.95)
            for row in range(len(MIXED))
        ]
        together = tokens_of(generate(llm, MIXED, params))
        alone = [
            tokens_of(generate(llm, [prompt], own))[0] for prompt, own in zip(MIXED, params, strict=True)
        ]
        assert together == alone

    def test_a_batch_that_the_pool_cannot_hold_waits_for_pages(self, llm):
        """Four requests of 25 pages each, where there are 30: one at a time, and nothing is lost."""
        prompts = random_prompts(60, 61, 62, 63, seed=1)
        seen = []
        step = llm.engine.step

        def watched() -> list[RequestOutput]:
            outputs = step()
            stats = llm.engine.stats()
            seen.append((stats.running, stats.waiting))
            return outputs

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine, "step", watched)
            together = generate(llm, prompts, SamplingParams(temperature=0, max_tokens=37, ignore_eos=True))
        assert max(running for running, _ in seen) == 1 and max(waiting for _, waiting in seen) == 3
        for prompt, tokens in zip(prompts, tokens_of(together), strict=True):
            assert tokens == only(llm, prompt, max_tokens=37).token_ids

    def test_every_request_has_its_own_parameters(self, llm, greedy):
        each = [SamplingParams(temperature=0, max_tokens=count, ignore_eos=True) for count in (1, 5, 3)]
        assert tokens_of(generate(llm, [PROMPT] * 3, each)) == [greedy[:1], greedy[:5], greedy[:3]]

    def test_parameters_for_some_prompts_only_are_an_error(self, llm):
        with pytest.raises(
            ValueError, match="3 prompts came with 2 sampling_params; give one, or one for each"
        ):
            generate(llm, [PROMPT] * 3, [GREEDY] * 2)

    def test_stop_strings_without_a_tokenizer_are_refused_and_nothing_is_left_behind(self, bare, greedy):
        with pytest.raises(ValueError, match="stop strings need a tokenizer"):
            generate(bare, [PROMPT, PROMPT], [GREEDY, SamplingParams(stop="x")])
        assert not bare.engine.has_unfinished
        assert only(bare, PROMPT).token_ids == greedy

    def test_the_override_counts_usable_pages(self, llm):
        assert llm.engine.stats().num_pages == PAGES
        assert llm.engine.scheduler.allocator.num_free == PAGES


class TestOtherEngines:
    def test_the_size_of_chunks_changes_nothing(self, llm, directory):
        small = tiny_llm(directory, max_num_batched_tokens=5, precompile_token_paddings=(5,))
        assert tokens_of(generate(small, MIXED)) == tokens_of(generate(llm, MIXED))
        np.testing.assert_allclose(
            small.compute_logits(MIXED[3]), llm.compute_logits(MIXED[3]), rtol=0, atol=1e-4
        )

    def test_a_mesh_changes_nothing(self, llm, directory, devices):
        devices(4)
        mesh = tiny_llm(
            directory, tensor_parallel_size=4, decode_context_parallel_size=2, cp_kv_cache_interleave_size=2
        )
        params = SamplingParams(temperature=1.0, seed=5, max_tokens=8, ignore_eos=True)
        for each in (GREEDY, params):
            assert tokens_of(generate(mesh, MIXED, each)) == tokens_of(generate(llm, MIXED, each))
        np.testing.assert_allclose(
            mesh.compute_logits(MIXED[3]), llm.compute_logits(MIXED[3]), rtol=0, atol=1e-4
        )
        assert mesh.engine.stats().cache_usage == 0

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"enable_lora": True}, "--enable-lora is not supported"),
            ({"max_model_len": 121}, "max_model_len 121 does not fit the cache, which holds 120 tokens"),
            ({"max_model_len": 513}, "max_model_len 513 exceeds the model's max_position_embeddings 512"),
            (
                {"hf_overrides": {"vocab_size": 299}},
                "the tokenizer has 300 tokens, but the model's vocab_size is 299",
            ),
            ({"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, "use one of 1, 2, 4"),
        ],
        ids=lambda value: None if isinstance(value, str) else str(value),
    )
    def test_settings_that_cannot_work(self, directory, settings, message):
        with pytest.raises(ConfigError, match=message):
            tiny_llm(directory, **settings)

    def test_text_needs_a_tokenizer(self, bare):
        with pytest.raises(ConfigError, match="pass token ids, or set tokenizer"):
            generate(bare, ["the cat"])
        assert not bare.engine.has_unfinished


class TestComputeLogits:
    @pytest.mark.parametrize("length", [1, 2, 16, 64, 65, MAX_MODEL_LEN])
    def test_every_positions_logits_equal_the_oracles(self, llm, directory, length):
        (ids,) = random_prompts(length, seed=length)
        logits = llm.compute_logits(ids)
        assert logits.shape == (length, VOCABULARY) and logits.dtype == np.float32
        expected = NumpyReference(*load_checkpoint(directory))(ids).logits
        np.testing.assert_allclose(logits, expected, rtol=0, atol=2e-4)

    def test_capture_shows_hidden_states_selections_and_router_choices(self, llm, directory):
        (ids,) = random_prompts(70, seed=3)
        seen, expected = (
            llm.compute_logits(ids, capture=True),
            NumpyReference(*load_checkpoint(directory))(ids),
        )
        assert seen.hidden.shape == (3, 70, CONFIG["hidden_size"])
        np.testing.assert_allclose(seen.hidden, expected.hidden, rtol=0, atol=3e-4)
        assert list(seen.selections) == [0] and list(seen.router_ids) == [1]
        np.testing.assert_array_equal(seen.selections[0], expected.selections[0])
        np.testing.assert_array_equal(seen.router_ids[1], expected.router_ids[1])
        np.testing.assert_allclose(seen.router_weights[1], expected.router_weights[1], rtol=0, atol=1e-4)

    @pytest.mark.parametrize(
        ("ids", "message"),
        [
            ([], "the prompt is empty"),
            ([7] * (MAX_MODEL_LEN + 1), "101 tokens exceed max_model_len 100"),
            ([7, VOCABULARY], f"token id {VOCABULARY} is not in the vocabulary"),
            ([7] * (MAX_MODEL_LEN - 1) + [VOCABULARY], f"token id {VOCABULARY} is not in the vocabulary"),
            ([-1], "token id -1 is not in the vocabulary"),
        ],
        ids=["none", "too many", "unknown", "unknown at the very end", "negative"],
    )
    def test_tokens_that_cannot_run(self, llm, ids, message):
        with pytest.raises(ValueError, match=message):
            llm.compute_logits(ids)

    def test_a_busy_engine_is_refused_and_goes_on(self, llm, greedy):
        llm.engine.add_request("busy", PROMPT, GREEDY)
        with pytest.raises(RuntimeError, match="needs an idle engine"):
            llm.compute_logits([7])
        outputs = []
        while llm.engine.has_unfinished:
            outputs += llm.engine.step()
        assert outputs[-1].outputs[0].token_ids == greedy


class TestEngine:
    @pytest.mark.parametrize("steps", [0, 1, 4])
    def test_abort_ends_a_request_wherever_it_is_and_frees_its_pages(self, llm, greedy, steps):
        engine = llm.engine
        engine.add_request("a", random_prompts(80)[0], GREEDY)
        engine.add_request("b", PROMPT, GREEDY)
        for _ in range(steps):
            engine.step()
        output = engine.abort("a")
        assert output.finished and output.outputs[0].finish_reason == "abort"
        assert engine.abort("a") is None and engine.abort("unknown") is None
        outputs = []
        while engine.has_unfinished:
            outputs += engine.step()
        assert {output.request_id for output in outputs} == {"b"}
        assert outputs[-1].outputs[0].token_ids == greedy

    def test_abort_keeps_the_tokens_so_far_and_what_has_finished(self, llm, greedy):
        engine = llm.engine
        engine.add_request("a", PROMPT, SamplingParams(temperature=0, n=2, max_tokens=50, ignore_eos=True))
        while len(engine._requests["a"].sequences[1].output_ids) < 4:
            engine.step()
        outputs = engine.abort("a").outputs
        assert [output.finish_reason for output in outputs] == ["abort", "abort"]
        assert all(output.token_ids[:4] == greedy[:4] for output in outputs)

    def test_outputs_are_cumulative_and_the_last_is_finished(self, llm, greedy):
        llm.engine.add_request("a", PROMPT, GREEDY)
        outputs = []
        while llm.engine.has_unfinished:
            outputs += llm.engine.step()
        assert [output.outputs[0].token_ids for output in outputs] == [greedy[: n + 1] for n in range(8)]
        assert [output.finished for output in outputs] == [False] * 7 + [True]

    def test_an_id_in_use_is_refused_and_free_again_afterwards(self, llm):
        llm.engine.add_request("a", PROMPT, GREEDY)
        with pytest.raises(ValueError, match="request id 'a' is in use"):
            llm.engine.add_request("a", PROMPT, GREEDY)
        llm.engine.abort("a")
        llm.engine.add_request("a", PROMPT, GREEDY)
        llm.engine.abort("a")

    def test_a_failed_step_leaves_an_engine_that_can_be_used_again(self, llm, greedy):
        """The step that fails has taken the pools by donation: they are gone."""

        def fail(*_: object) -> None:
            for pool in llm.engine.runner.pools:
                pool.delete()
            raise RuntimeError("out of memory")

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(llm.engine.runner, "decode", fail)
            with pytest.raises(RuntimeError, match="out of memory"):
                generate(llm, [PROMPT, PROMPT])
        assert not llm.engine.has_unfinished
        assert only(llm, PROMPT).token_ids == greedy

    def test_stats_count_tokens(self, llm):
        before = llm.engine.stats()
        generate(llm, [PROMPT, [9, 9]])
        after = llm.engine.stats()
        assert after.prompt_tokens - before.prompt_tokens == len(PROMPT) + 2
        assert after.generation_tokens - before.generation_tokens == 16
        assert (after.running, after.waiting) == (0, 0)


class TestNaN:
    """A checkpoint whose embeddings of two tokens are NaN: what touches them fails, what does not is untouched."""

    GOOD = random_prompts(6, 20, 40, seed=8)

    @pytest.fixture(scope="class")
    def poison(self, greedy) -> int:
        """PROMPT's third greedy token."""
        assert greedy[2] not in PROMPT + greedy[:2]
        return greedy[2]

    @pytest.fixture(scope="class")
    def broken(self, tmp_path_factory, poison) -> LLM:
        """Token 0 is poisoned too: padded rows hold it."""
        return tiny_llm(write_tiny(tmp_path_factory.mktemp("broken"), nan_tokens=(0, poison)))

    @pytest.fixture(autouse=True)
    def nothing_is_left(self, broken) -> Iterator[None]:
        yield
        assert not broken.engine.has_unfinished
        assert broken.engine.scheduler.allocator.num_used == 0

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
