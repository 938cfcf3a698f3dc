"""Flags as keyword arguments: defaults, types, and errors that say what would work."""

import dataclasses

import pytest

from glm_dcp_jax.config import FLAGS, REFUSED, ConfigError, EngineConfig, engine_config
from glm_dcp_jax.config.engine import CacheConfig, ParallelConfig, SchedulerConfig
from glm_dcp_jax.config.flags import field_of, in_flags, value_type
from glm_dcp_jax.config.processes import ProcessConfig
from glm_dcp_jax.config.refused import SO_ANYWAY

SECTIONS = (ParallelConfig, CacheConfig, SchedulerConfig, ProcessConfig)
NOT_FLAGS = {"model", "parallel", "cache", "scheduler", "processes", "speculative", "transfer"}
OBJECTS = {"speculative_config", "kv_transfer_config"}


def test_every_setting_is_a_flag_and_every_flag_a_setting():
    settings = [field.name for kind in (EngineConfig, *SECTIONS) for field in dataclasses.fields(kind)]
    flags = [flag.name for flag in FLAGS]
    assert len(settings) == len(set(settings)) and len(flags) == len(set(flags))
    assert set(flags) == set(settings) - NOT_FLAGS | OBJECTS
    assert not REFUSED.keys() & set(flags)


def test_a_flags_default_has_the_flags_type():
    for flag in FLAGS:
        default = field_of(flag.name).default
        if not isinstance(default, (type(None), tuple)):
            assert type(default) is value_type(flag.name), flag.name
        if flag.choices and default is not None:
            assert default in flag.choices


def test_the_command_lines_spelling():
    spelled = {flag.name: flag.option for flag in FLAGS}
    assert spelled["cp_kv_cache_interleave_size"] == "--cp-kv-cache-interleave-size"
    shorts = {flag.name: flag.short for flag in FLAGS if flag.short}
    assert shorts == {
        "tensor_parallel_size": "-tp",
        "decode_context_parallel_size": "-dcp",
        "enable_expert_parallel": "-ep",
        "quantization": "-q",
        "speculative_config": "-sc",
    }


def test_errors_are_told_in_the_words_of_a_command_line():
    spelled = {"block_size": "--block-size", "watermark": "--watermark"}
    for message, told in {
        "block_size 3 does not divide block_size 4": "--block-size 3 does not divide --block-size 4",
        "watermark 2 must be below 1": "--watermark 2 must be below 1",
        "lower the watermark": "lower the watermark",
        "'block_size' in /a/block_size and block_size_too": "'block_size' in /a/block_size and block_size_too",
    }.items():
        assert in_flags(message, spelled) == told


def test_what_auto_and_an_unset_flag_mean_is_said():
    for flag in FLAGS:
        if "auto" in flag.choices:
            assert "auto:" in flag.help, flag.name
        if not isinstance(field_of(flag.name).default, (int, float, str)):
            assert "unset:" in flag.help, flag.name


def test_defaults():
    config = engine_config("m")
    assert config == EngineConfig(model="m")
    assert (config.cache.block_size, config.cache.cp_kv_cache_interleave_size) == (64, 1)
    assert (config.parallel.tensor_parallel_size, config.parallel.decode_context_parallel_size) == (1, 1)
    assert config.scheduler.max_num_batched_tokens == 2048 and config.dtype == "auto"


def test_settings_go_to_their_sections_and_none_means_unset():
    config = engine_config(
        "m",
        tensor_parallel_size=8,
        decode_context_parallel_size=4,
        block_size=16,
        max_model_len=None,
        max_num_seqs=3,
        dtype="bfloat16",
        skip_tokenizer_init=True,
        seed=-5,
        num_gpu_blocks_override=None,
    )
    assert (config.parallel, config.cache) == (ParallelConfig(8, 4), CacheConfig(16))
    assert config.scheduler == SchedulerConfig(max_num_seqs=3)
    assert (config.dtype, config.skip_tokenizer_init, config.seed) == ("bfloat16", True, -5)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("max_model_length", "unknown flag --max-model-length; did you mean --max-model-len?"),
        ("tensor_paralel_size", "unknown flag --tensor-paralel-size; did you mean --tensor-parallel-size?"),
        ("blocksize", "unknown flag --blocksize; did you mean --block-size?"),
        ("zzz", "unknown flag --zzz"),
    ],
)
def test_an_unknown_flag_names_the_nearest_known_one(name, message):
    for value in (1, None):
        with pytest.raises(ConfigError) as raised:
            engine_config("m", **{name: value})
        assert str(raised.value) == message


@pytest.mark.parametrize("name", REFUSED)
def test_flags_of_vllm_that_we_lack_are_refused_with_a_reason(name):
    with pytest.raises(ConfigError) as raised:
        engine_config("m", **{name: "else"})
    option = "--" + name.replace("_", "-")
    assert str(raised.value) == f"{option} is not supported: {REFUSED[name]}"
    assert "did you mean" not in str(raised.value) and len(REFUSED[name]) > 10


def test_all_of_them_are_named_at_once():
    with pytest.raises(ConfigError, match="--enable-lora is not supported: .*; unknown flag --zzz$"):
        engine_config("m", enable_lora=True, zzz=1)


def test_what_is_so_anyway_may_be_asked_for():
    asked = {name: value for name, values in SO_ANYWAY.items() for value in values[:1]}
    assert engine_config("m", **asked) == engine_config("m")
    for name, value in [("pipeline_parallel_size", True), ("enable_chunked_prefill", 1), ("swap_space", 4)]:
        with pytest.raises(ConfigError, match=f"{name.replace('_', '-')} is not supported"):
            engine_config("m", **{name: value})


def test_lora_pipeline_and_data_parallelism_are_among_them():
    assert {"enable_lora", "pipeline_parallel_size", "data_parallel_size"} <= REFUSED.keys()


@pytest.mark.parametrize(
    ("name", "value", "kind"),
    [
        ("block_size", "64", "int"),
        ("block_size", 64.0, "int"),
        ("block_size", True, "int"),
        ("max_model_len", "8k", "int"),
        ("seed", 1.5, "int"),
        ("gpu_memory_utilization", "0.9", "float"),
        ("gpu_memory_utilization", True, "float"),
        ("latent_norm_eps", "1e-6", "float"),
        ("skip_tokenizer_init", "yes", "bool"),
        ("skip_tokenizer_init", 1, "bool"),
        ("dtype", 32, "str"),
        ("tokenizer", 7, "str"),
    ],
)
def test_a_value_of_the_wrong_type(name, value, kind):
    with pytest.raises(ConfigError) as raised:
        engine_config("m", **{name: value})
    assert str(raised.value) == f"{name} takes {kind}, but got {value!r}"


def test_a_whole_number_is_a_float_too():
    utilization = engine_config("m", gpu_memory_utilization=1).cache.gpu_memory_utilization
    assert utilization == 1.0 and type(utilization) is float


@pytest.mark.parametrize("sizes", ["1,4,16", "1 4 16", "1, 4, 16", [1, 4, 16], (1, 4, 16)])
def test_lists_of_sizes(sizes):
    config = engine_config("m", precompile_bs_paddings=sizes, precompile_token_paddings=sizes).scheduler
    assert config.precompile_bs_paddings == config.precompile_token_paddings == (1, 4, 16)


@pytest.mark.parametrize("sizes", ["1,x", 5, [None], "1.5", {"a": 1}, [1.7, 4.2], [True, 4], ["1", "4"]])
def test_lists_of_sizes_that_are_none(sizes):
    with pytest.raises(ConfigError, match="precompile_bs_paddings takes sizes such as 1,4,16, but got"):
        engine_config("m", precompile_bs_paddings=sizes)


@pytest.mark.parametrize("value", ['{"num_hidden_layers": 2}', {"num_hidden_layers": 2}])
def test_overrides_are_json_or_a_dict(value):
    assert dict(engine_config("m", hf_overrides=value).hf_overrides) == {"num_hidden_layers": 2}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "hf_overrides is not valid JSON"),
        pytest.param("[" * 100_000, "hf_overrides is not valid JSON", id="deep"),
        pytest.param('{"x": ' + "1" * 5000 + "}", "hf_overrides is not valid JSON", id="digits"),
        ("[1]", "must be a JSON object"),
        (5, "must be a JSON object"),
        ({"num_hidden_layers": 2, 1: 2}, "must have field names of config.json as keys, but has 1"),
    ],
)
def test_overrides_that_are_neither(value, message):
    with pytest.raises(ConfigError, match=message):
        engine_config("m", hf_overrides=value)


@pytest.mark.parametrize("name", [flag.name for flag in FLAGS if flag.choices])
def test_a_choice_that_does_not_exist_lists_those_that_do(name):
    choices = next(flag.choices for flag in FLAGS if flag.name == name)
    with pytest.raises(ConfigError) as raised:
        engine_config("m", **{name: "other"})
    assert str(raised.value) == f"{name} 'other' is unknown; use one of {', '.join(choices)}"


def test_refused_values_of_a_section_come_through():
    with pytest.raises(ConfigError, match="does not divide tensor_parallel_size 4; use one of 1, 2, 4"):
        engine_config("m", tensor_parallel_size=4, decode_context_parallel_size=3)


def test_a_number_beyond_all_floats_is_refused():
    with pytest.raises(ConfigError, match="gpu_memory_utilization is beyond"):
        engine_config("m", gpu_memory_utilization=10**400)
