"""LLM's requests from end to end on a very small checkpoint: prompts, limits, stops, sampling, log probabilities."""

import math

import numpy as np
import pytest
from numpy_reference import NumpyReference, load_checkpoint
from tiny import (
    CONFIG,
    GREEDY,
    PROMPT,
    SETTINGS,
    changed,
    generate,
    make_tokenizer,
    only,
    random_prompts,
    tokens_of,
)

from glm_dcp_jax import SamplingParams

MAX_MODEL_LEN, VOCABULARY = SETTINGS["max_model_len"], CONFIG["vocab_size"]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=-1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=-1, keepdims=True))


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
        params = changed(self.RANDOM, n=3)
        first, second = (generate(llm, [PROMPT], params)[0] for _ in range(2))
        assert [output.index for output in first.outputs] == [0, 1, 2] and first.finished
        assert len({tuple(output.token_ids) for output in first.outputs}) == 3
        assert tokens_of([first]) == tokens_of([second])

    def test_more_outputs_than_run_at_once(self, llm):
        params = changed(GREEDY, n=9)
        (request,) = generate(llm, [PROMPT], params)
        assert len(request.outputs) == 9 and len({tuple(output.token_ids) for output in request.outputs}) == 1

    def test_seeds_make_the_difference(self, llm):
        outputs = [tuple(only(llm, PROMPT, self.RANDOM, seed=seed).token_ids) for seed in (1, 2, 1)]
        assert outputs[0] == outputs[2] != outputs[1]

    def test_requests_without_a_seed_differ(self, llm):
        params = changed(self.RANDOM, seed=None)
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
        asking = changed(GREEDY, logprobs=2)
        outputs = [request.outputs[0] for request in generate(llm, [PROMPT] * 2, [GREEDY, asking])]
        assert outputs[0].logprobs is None and len(outputs[1].logprobs) == 8
