"""Many requests at once equal each alone: over waiting for a turn or for pages, chunks, and meshes."""

import json

import pytest
from tiny import (
    GREEDY,
    MIXED,
    PROMPT,
    SETTINGS,
    check_idle,
    generate,
    left_behind,
    make_tokenizer,
    only,
    random_prompts,
    tiny_llm,
    tokens_of,
    write_tiny,
)

from glm_dcp_jax import SamplingParams
from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.engine import runner
from glm_dcp_jax.engine.sequence import Progress

PAGES = SETTINGS["num_gpu_blocks_override"]


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

        def watched() -> list[Progress]:
            progress = step()
            stats = llm.engine.stats()
            seen.append((stats.running, stats.waiting))
            return progress

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
        assert left_behind(bare) == []
        assert only(bare, PROMPT).token_ids == greedy

    def test_the_override_counts_usable_pages(self, llm):
        assert llm.engine.stats().num_pages == PAGES
        assert llm.engine.scheduler.allocator.num_free == PAGES


class TestOtherEngines:
    @pytest.mark.parametrize(
        "settings",
        [
            {"max_num_batched_tokens": 5, "precompile_token_paddings": (5,)},
            {
                "tensor_parallel_size": 4,
                "decode_context_parallel_size": 2,
                "cp_kv_cache_interleave_size": 2,
            },
        ],
        ids=["chunks of 5", "a mesh of 4 by 2"],
    )
    def test_chunks_and_meshes_change_nothing(self, llm, directory, devices, settings):
        devices(settings.get("tensor_parallel_size", 1))
        other = tiny_llm(directory, **settings)
        params = [
            SamplingParams(temperature=row % 2, seed=row, max_tokens=8, ignore_eos=True, logprobs=0)
            for row in range(len(MIXED))
        ]
        for own, others in zip(generate(llm, MIXED, params), generate(other, MIXED, params), strict=True):
            assert others.outputs[0].token_ids == own.outputs[0].token_ids
            difference = others.outputs[0].cumulative_logprob - own.outputs[0].cumulative_logprob
            assert abs(difference) < 1e-3
        check_idle(other)

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"enable_lora": True}, "--enable-lora is not supported"),
            ({"max_model_len": 121}, "max_model_len 121 does not fit the cache, which holds 120 tokens"),
            ({"max_model_len": 513}, "max_model_len 513 exceeds the model's max_position_embeddings 512"),
            (
                {"hf_overrides": {"vocab_size": 200}},
                "the tokenizer has .* tokens, but the model's vocab_size is 200",
            ),
            ({"tensor_parallel_size": 4, "decode_context_parallel_size": 3}, "use one of 1, 2, 4"),
        ],
        ids=lambda value: None if isinstance(value, str) else str(value),
    )
    def test_settings_that_cannot_work_are_refused_before_weights_are_loaded(
        self, directory, settings, message, monkeypatch
    ):
        monkeypatch.setattr(runner, "load_parameters", lambda *_: pytest.fail("loaded weights for nothing"))
        with pytest.raises(ConfigError, match=message):
            tiny_llm(directory, **settings)

    def test_a_checkpoint_without_a_tokenizer_takes_another_ones(self, directory, tmp_path):
        without = write_tiny(tmp_path)
        (without / "tokenizer.json").unlink()
        assert tiny_llm(without).engine.tokenizer is None
        for there in (directory, directory / "tokenizer.json"):
            llm = tiny_llm(without, tokenizer=str(there))
            assert llm.get_tokenizer().encode("the cat") == make_tokenizer().encode("the cat").ids
        with pytest.raises(ConfigError, match=r"there is no tokenizer at .*tokenizer\.json"):
            tiny_llm(without, tokenizer=str(tmp_path))

    def test_a_checkpoint_may_bring_sampling_defaults(self, tmp_path, greedy):
        write_tiny(tmp_path)
        suggestion = {"temperature": 0.0, "max_new_tokens": 3}
        (tmp_path / "generation_config.json").write_text(json.dumps(suggestion))
        llm = tiny_llm(tmp_path)
        (request,) = llm.generate(PROMPT, use_tqdm=False)
        assert request.outputs[0].token_ids == greedy[:3]
        assert only(llm, PROMPT).token_ids == greedy

    def test_text_needs_a_tokenizer(self, bare):
        with pytest.raises(ConfigError, match="pass token ids, or set tokenizer"):
            generate(bare, ["the cat"])
