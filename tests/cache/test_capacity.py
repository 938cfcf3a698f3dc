"""Capacity arithmetic against the published bytes per token, and how the cache's memory is decided."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from glm_dcp_jax.cache.capacity import (
    capacity_lines,
    capacity_tokens,
    page_bytes,
    pages_in,
    resolve_max_model_len,
)
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import CacheConfig, ConfigError, ModelConfig, engine_config
from glm_dcp_jax.engine import memory
from glm_dcp_jax.engine.memory import CPU_DEFAULT_BYTES, number_of_pages

sys.path.append(str(Path(__file__).parents[1] / "config"))

from published import GLM_5, GLM_5_2

GLM = ModelConfig.from_hf(GLM_5_2)
BFLOAT16, FLOAT32, FP8, NVFP4 = (
    RecordFormat.named(name, GLM) for name in ("bfloat16", "float32", "fp8_ds_mla", "nvfp4_ds_mla")
)


class TestBytes:
    def test_a_record_is_1152_bytes_and_an_index_key_256(self):
        assert (BFLOAT16.record_bytes, BFLOAT16.index.key_bytes) == (1152, 256)
        assert (FLOAT32.record_bytes, FLOAT32.index.key_bytes) == (2304, 512)

    def test_a_token_of_glm_5_2_takes_95_232_bytes_on_one_device(self):
        assert page_bytes(GLM, Layout(64), BFLOAT16) == 64 * 95_232
        assert page_bytes(GLM, Layout(64), FLOAT32) == 64 * 2 * 95_232

    def test_a_million_tokens_take_93_gib(self):
        assert 1_048_576 * page_bytes(GLM, Layout(1), BFLOAT16) / 2**30 == 93.0

    def test_a_token_of_glm_5_takes_109_824_bytes(self):
        glm_5 = ModelConfig.from_hf(GLM_5)
        assert page_bytes(glm_5, Layout(1), RecordFormat.named("bfloat16", glm_5)) == 109_824

    @pytest.mark.parametrize("world", range(1, 9))
    def test_records_are_split_over_the_ranks_and_index_keys_are_on_all_of_them(self, world):
        per_token = page_bytes(GLM, Layout(64, world), BFLOAT16) / (64 * world)
        assert per_token == pytest.approx(78 * 1152 / world + 21 * 256)

    @pytest.mark.parametrize("shards", [1, 2, 4, 8])
    def test_index_keys_in_parts_cost_one_part(self, shards):
        per_token = page_bytes(GLM, Layout(64, 8, 1, shards), BFLOAT16) / (64 * 8)
        assert per_token == pytest.approx(78 * 1152 / 8 + 21 * 256 / shards)

    @pytest.mark.parametrize(
        ("world", "shards", "each", "tokens"),
        [(4, 1, 2_902_272, 302_080), (4, 4, 2_370_048, 369_920), (1, 1, 2_370_048, 92_480)],
    )
    def test_the_published_capacity_of_432_byte_records(self, world, shards, each, tokens):
        """With the MTP layer, whose records and index keys are both split over the ranks."""
        layout = Layout(64, world, 1, shards)
        assert page_bytes(GLM, layout, NVFP4, mtp_layers=1) == each
        assert 3_426_112_942 // each * layout.virtual_block == tokens

    def test_half_replicated_index_keys_of_eight_ranks_cost_a_twentieth_of_the_capacity(self):
        whole, half, none = (page_bytes(GLM, Layout(64, 8, 1, shards), FP8) for shards in (1, 4, 8))
        assert (1 - none / half, 1 - none / whole) == pytest.approx((0.05, 0.266), abs=2e-3)

    def test_a_token_with_the_mtp_layer_takes_96_640_bytes(self):
        assert page_bytes(GLM, Layout(1), BFLOAT16, mtp_layers=1) == 96_640

    def test_interleave_costs_nothing(self):
        assert page_bytes(GLM, Layout(64, 4, 16), BFLOAT16) == page_bytes(GLM, Layout(64, 4), BFLOAT16)


class TestPages:
    def test_as_many_as_fit(self):
        each = page_bytes(GLM, Layout(64, 4), BFLOAT16)
        assert each == 64 * 78 * 1152 + 256 * 21 * 256
        for held, pages in ((2 * each, 2), (3 * each - 1, 2), (1181 * each + 5, 1181)):
            assert pages_in(held, GLM, Layout(64, 4), BFLOAT16) == pages
        more = page_bytes(GLM, Layout(64, 4), BFLOAT16, mtp_layers=1)
        assert more > each and pages_in(5 * more - 1, GLM, Layout(64, 4), BFLOAT16, mtp_layers=1) == 4

    def test_four_ranks_hold_more_than_three_times_the_tokens_of_one(self):
        budget = 64 * 2**30
        one, four = (
            capacity_tokens(pages_in(budget, GLM, layout, BFLOAT16), layout)
            for layout in (Layout(64), Layout(64, 4))
        )
        assert four / one == pytest.approx(4 * 95_232 / (78 * 1152 + 4 * 21 * 256), rel=1e-3)

    def test_fewer_than_two_pages_are_refused_with_what_one_takes(self):
        each = page_bytes(GLM, Layout(64, 2), BFLOAT16)
        with pytest.raises(ConfigError) as raised:
            pages_in(2 * each - 1, GLM, Layout(64, 2), BFLOAT16)
        for part in (f"{2 * each - 1:,}", "one page of 128 tokens", f"{each:,}", "--kv-cache-memory-bytes"):
            assert part in str(raised.value)

    def test_the_null_page_holds_no_tokens(self):
        assert capacity_tokens(2, Layout(64)) == 64
        assert capacity_tokens(1181, Layout(64, 4)) == 302_080


class TestMaxModelLen:
    def test_unset_it_is_the_shorter_of_model_and_cache(self):
        assert resolve_max_model_len(None, GLM, 1181, Layout(64, 4)) == 302_080
        assert resolve_max_model_len(None, GLM, 10**6, Layout(64, 4)) == GLM.max_position_embeddings

    def test_set_it_may_be_all_of_the_cache_but_no_more(self):
        assert resolve_max_model_len(302_080, GLM, 1181, Layout(64, 4)) == 302_080
        with pytest.raises(
            ConfigError, match="max_model_len 302081 does not fit the cache, .* 302080 tokens"
        ):
            resolve_max_model_len(302_081, GLM, 1181, Layout(64, 4))

    def test_it_cannot_exceed_the_model(self):
        most = GLM.max_position_embeddings
        assert resolve_max_model_len(most, GLM, 10**6, Layout(64, 4)) == most
        with pytest.raises(ConfigError, match=f"max_model_len {most + 1} exceeds .* {most}"):
            resolve_max_model_len(most + 1, GLM, 10**6, Layout(64, 4))


class TestLines:
    def test_the_published_profile(self):
        # 302,080 tokens are 1.0067 of ceil(300,000 / 256) = 1172 pages.
        assert capacity_lines(1181, Layout(64, 4), 300_000) == (
            "GPU KV cache size: 302,080 tokens",
            "Maximum concurrency for 300,000 tokens per request: 1.01x",
        )

    def test_a_request_takes_whole_pages(self):
        assert capacity_lines(11, Layout(4), 5) == (
            "GPU KV cache size: 40 tokens",
            "Maximum concurrency for 5 tokens per request: 5.00x",
        )


class TestMemory:
    """number_of_pages: the override, then bytes, then what the platform has."""

    LAYOUT = Layout(64, 2)
    EACH = page_bytes(GLM, LAYOUT, BFLOAT16)

    HOST = 16 * 2**30

    @pytest.fixture(autouse=True)
    def _a_machine_of_16_gib_whose_gpus_jax_may_take_whole(self, monkeypatch):
        monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "1.0")
        monkeypatch.setattr(memory, "_available_host_bytes", lambda: self.HOST)

    def pages(self, devices: list, **flags) -> int:
        mesh = SimpleNamespace(devices=SimpleNamespace(flat=devices), local_devices=devices)
        cache = engine_config("m", **flags).cache
        return number_of_pages(cache, GLM, self.LAYOUT, BFLOAT16, mesh, lambda pages: 0)

    @staticmethod
    def gpu(total: float, used: float) -> SimpleNamespace:
        stats = {"bytes_limit": int(total * 2**30), "bytes_in_use": int(used * 2**30)}
        return SimpleNamespace(platform="gpu", memory_stats=lambda: stats)

    def test_the_override_counts_usable_pages_and_wins(self):
        cpu = SimpleNamespace(platform="cpu")
        assert self.pages([cpu], num_gpu_blocks_override=7, kv_cache_memory_bytes=2 * self.EACH) == 8

    def test_bytes_are_per_device(self):
        cpu = SimpleNamespace(platform="cpu")
        assert self.pages([cpu, cpu], kv_cache_memory_bytes=9 * self.EACH) == 9
        with pytest.raises(ConfigError, match="--kv-cache-memory-bytes"):
            self.pages([cpu, cpu], kv_cache_memory_bytes=self.EACH)

    def test_on_the_cpu_the_default_is_256_mib_and_one_page_at_least(self):
        cpu = SimpleNamespace(platform="cpu")
        assert CPU_DEFAULT_BYTES == 256 * 2**20
        assert self.pages([cpu]) == CPU_DEFAULT_BYTES // self.EACH > 2
        mesh = SimpleNamespace(devices=SimpleNamespace(flat=[cpu]), local_devices=[cpu])
        huge = Layout(65536)
        assert page_bytes(GLM, huge, BFLOAT16) > CPU_DEFAULT_BYTES
        assert number_of_pages(CacheConfig(), GLM, huge, BFLOAT16, mesh, lambda pages: 0) == 2

    def test_a_cache_larger_than_the_host_is_refused_with_a_cure(self, monkeypatch):
        cpu = SimpleNamespace(platform="cpu")
        monkeypatch.setattr(memory, "_available_host_bytes", lambda: CPU_DEFAULT_BYTES - self.EACH)
        with pytest.raises(ConfigError, match=r"takes 0\.\d\d GiB on 1 virtual devices.* lower --kv-cache"):
            self.pages([cpu])

    def test_on_gpus_the_fullest_one_decides(self):
        one, both = self.pages([self.gpu(80, 20)]), self.pages([self.gpu(80, 20), self.gpu(80, 60)])
        assert 40 * 2**30 // self.EACH < one < 54 * 2**30 // self.EACH
        assert both == self.pages([self.gpu(80, 60)]) < one

    def test_utilization_is_of_the_whole_device(self):
        less, more = (self.pages([self.gpu(80, 20)], gpu_memory_utilization=share) for share in (0.5, 0.75))
        assert (more - less) * self.EACH == pytest.approx(20 * 2**30, rel=1e-2)

    def test_weights_that_leave_nothing_are_an_error_with_a_cure(self):
        with pytest.raises(ConfigError, match=r"weights take 76.00 GiB.* raise --tensor-parallel-size"):
            self.pages([self.gpu(80, 76)])
