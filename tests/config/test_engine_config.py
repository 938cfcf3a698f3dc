"""The engine's settings refuse what cannot work, and list what would."""

import dataclasses
import math

import pytest

from glm_dcp_jax.config import CacheConfig, ConfigError, EngineConfig, ParallelConfig, SchedulerConfig


@pytest.mark.parametrize("tp", range(1, 13))
def test_dcp_divides_tp_or_the_error_lists_what_does(tp):
    divisors = [dcp for dcp in range(1, tp + 1) if tp % dcp == 0]
    for dcp in range(1, tp + 3):
        if dcp in divisors:
            assert ParallelConfig(tp, dcp).replicas * dcp == tp
            continue
        with pytest.raises(ConfigError) as raised:
            ParallelConfig(tp, dcp)
        assert str(raised.value) == (
            f"decode_context_parallel_size {dcp} does not divide tensor_parallel_size {tp}; "
            f"use one of {', '.join(map(str, divisors))}"
        )


def test_indexer_shards_divide_dcp_or_the_error_lists_what_does():
    for shards in (1, 2, 3, 6):
        assert ParallelConfig(12, 6, dcp_indexer_shards=shards).dcp_indexer_shards == shards
    for shards in (4, 5, 12):
        with pytest.raises(ConfigError) as raised:
            ParallelConfig(12, 6, dcp_indexer_shards=shards)
        assert str(raised.value) == (
            f"dcp_indexer_shards {shards} does not divide decode_context_parallel_size 6; use one of 1, 2, 3, 6"
        )


def test_exchange_settings_without_an_exchange_are_known_and_copy_engines_refused():
    settings = {"dcp_decode_path": "bulk", "dcp_comm_backend": "a2a", "dcp_transport": "direct"}
    assert ParallelConfig(2, 1, **settings).without_effect == settings
    assert ParallelConfig(2, 2, **settings).without_effect == ParallelConfig(2).without_effect == {}
    with pytest.raises(ConfigError, match="ce cannot be had: decode_context_parallel_size 1 leaves nothing"):
        ParallelConfig(2, 1, dcp_transport="ce")


@pytest.mark.parametrize("block", [1, 6, 16, 64])
def test_interleave_divides_the_block_or_the_error_lists_what_does(block):
    divisors = [size for size in range(1, block + 1) if block % size == 0]
    for interleave in range(1, block + 3):
        if interleave in divisors:
            assert CacheConfig(block, interleave).cp_kv_cache_interleave_size == interleave
            continue
        with pytest.raises(ConfigError) as raised:
            CacheConfig(block, interleave)
        assert str(raised.value) == (
            f"cp_kv_cache_interleave_size {interleave} does not divide block_size {block}; "
            f"use one of {', '.join(map(str, divisors))}"
        )


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ParallelConfig, "tensor_parallel_size"),
        (ParallelConfig, "decode_context_parallel_size"),
        (ParallelConfig, "dcp_indexer_shards"),
        (CacheConfig, "block_size"),
        (CacheConfig, "cp_kv_cache_interleave_size"),
        (CacheConfig, "num_gpu_blocks_override"),
        (CacheConfig, "kv_cache_memory_bytes"),
        (SchedulerConfig, "max_num_seqs"),
        (SchedulerConfig, "max_num_queued_reqs"),
        (SchedulerConfig, "max_num_queued_tokens"),
        (SchedulerConfig, "max_num_batched_tokens"),
    ],
)
@pytest.mark.parametrize("value", [0, -1, 1.0, "1", True])
def test_counts_are_integers_of_at_least_one(kind, name, value):
    with pytest.raises(ConfigError, match=f"{name} must be an integer of at least 1, but is {value!r}"):
        kind(**{name: value})


@pytest.mark.parametrize("value", [0, 1, 2.0, True])
def test_the_shortest_model_has_room_for_a_prompt_and_an_output(value):
    with pytest.raises(
        ConfigError, match=f"max_model_len must be an integer of at least 2, but is {value!r}"
    ):
        SchedulerConfig(max_model_len=value)
    assert SchedulerConfig(max_model_len=2).max_model_len == 2


@pytest.mark.parametrize(("name", "most"), [("max_num_seqs", 65_536), ("max_num_batched_tokens", 1_048_576)])
def test_absurd_step_sizes_are_refused(name, most):
    assert getattr(SchedulerConfig(**{name: most}), name) == most
    with pytest.raises(ConfigError, match=f"{name} must be at most {most}, but is {most + 1}"):
        SchedulerConfig(**{name: most + 1})


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (ParallelConfig, {"tensor_parallel_size": 10**11, "decode_context_parallel_size": 3}),
        (CacheConfig, {"block_size": 10**11, "cp_kv_cache_interleave_size": 3}),
        (ParallelConfig, {"dcp_exchange_memory": 10**400}),
        (ParallelConfig, {"dcp_context_memory": 10**400}),
        (ParallelConfig, {"step_segments": 10**400}),
        (CacheConfig, {"kv_cache_memory_bytes": 10**400}),
        (CacheConfig, {"num_gpu_blocks_override": 10**400}),
    ],
)
def test_sizes_without_end_are_refused_at_once(kind, settings):
    """Listing what would divide them would take hours, and some are no float any more."""
    with pytest.raises(ConfigError, match="must be at most"):
        kind(**settings)


@pytest.mark.parametrize("value", [0.0, -0.1, 1.01, math.nan, math.inf])
def test_memory_utilization_is_a_share(value):
    with pytest.raises(ConfigError, match="gpu_memory_utilization .* must be above 0 and at most 1"):
        CacheConfig(gpu_memory_utilization=value)
    assert CacheConfig(gpu_memory_utilization=1.0).gpu_memory_utilization == 1.0


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (ParallelConfig, "dcp_comm_backend"),
        (ParallelConfig, "dcp_prefill_path"),
        (CacheConfig, "kv_cache_dtype"),
        (CacheConfig, "nvfp4_rope_dtype"),
        (EngineConfig, "dtype"),
        (EngineConfig, "kernels"),
    ],
)
def test_words_are_checked(kind, name):
    settings = {"model": "m"} if kind is EngineConfig else {}
    with pytest.raises(ConfigError, match=f"{name} 'int8' is unknown; use one of "):
        kind(**settings, **{name: "int8"})


@pytest.mark.parametrize("name", ["precompile_bs_paddings", "precompile_token_paddings"])
@pytest.mark.parametrize("sizes", [(), (4, 1), (4, 4)])
def test_paddings_ascend(name, sizes):
    with pytest.raises(ConfigError, match=f"{name} must be ascending sizes such as 1,4,16"):
        SchedulerConfig(**{name: sizes})


@pytest.mark.parametrize("sizes", [(0, 4), (1.5,), ("4",)])
def test_paddings_are_positive_integers(sizes):
    with pytest.raises(ConfigError, match="precompile_bs_paddings must be an integer of at least 1"):
        SchedulerConfig(precompile_bs_paddings=sizes)


@pytest.mark.parametrize("eps", [0.0, -1e-6, math.nan])
def test_the_latent_eps_is_positive(eps):
    with pytest.raises(ConfigError, match="latent_norm_eps .* must be above 0"):
        EngineConfig("m", latent_norm_eps=eps)


def test_settings_are_frozen():
    for settings in (EngineConfig("m"), ParallelConfig(), CacheConfig(), SchedulerConfig()):
        name = dataclasses.fields(settings)[0].name
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, name, getattr(settings, name))
