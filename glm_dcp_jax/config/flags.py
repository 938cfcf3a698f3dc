"""The engine's flags, once: command line, `LLM`'s keyword arguments and docs/flags.md all come from here."""

import dataclasses
import difflib
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from glm_dcp_jax.config.engine import (
    COMM_BACKENDS,
    DECODE_PATHS,
    DTYPES,
    GENERATION_CONFIGS,
    KERNELS,
    MAX_VIRTUAL_DEVICES,
    NVFP4_ROPE_DTYPES,
    PREFILL_PATHS,
    PROJECT_FIRST,
    RECORD_FORMATS,
    SCHEDULING_POLICIES,
    TRANSPORTS,
    CacheConfig,
    EngineConfig,
    ParallelConfig,
    SchedulerConfig,
)
from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.json_file import parse_unique_json
from glm_dcp_jax.config.processes import ProcessConfig
from glm_dcp_jax.config.quantisation import QUANTIZATIONS
from glm_dcp_jax.config.refused import REFUSED, is_so_anyway
from glm_dcp_jax.config.speculative import SpeculativeConfig
from glm_dcp_jax.config.transfer import TransferConfig


@dataclass(frozen=True)
class Flag:
    """One setting. `name` is the keyword; the command line spells it with dashes. `short` is vLLM's short form."""

    name: str
    help: str
    choices: tuple[str, ...] = ()
    short: str | None = None

    @property
    def option(self) -> str:
        """The spelling on the command line."""
        return option_of(self.name)


DEMO_DEVICES = 4
"""Virtual ones, over which the server spreads the built-in model where there is no GPU."""


def option_of(name: str) -> str:
    """A setting's flag: --block-size for block_size."""
    return "--" + name.replace("_", "-")


FLAGS = (
    Flag("tokenizer", "directory or tokenizer.json; unset: the model's own"),
    Flag("skip_tokenizer_init", "load no tokenizer: prompts are token ids only"),
    Flag("dtype", "weights and arithmetic; auto: the checkpoint's on GPUs, float32 on CPU", DTYPES),
    Flag(
        "quantization",
        "how the checkpoint must be quantised, which is checked, and nothing else; unset: however it is",
        QUANTIZATIONS,
        short="-q",
    ),
    Flag(
        "verify_checksums", "compare the files of weights with their SHA-256 sums first, which reads them all"
    ),
    Flag("kernels", "ops in plain JAX or as Triton kernels; auto: Triton on NVIDIA GPUs", KERNELS),
    Flag("seed", "seed of requests that bring none"),
    Flag("max_model_len", "longest prompt plus output, in tokens; unset: what the model and the cache allow"),
    Flag(
        "tensor_parallel_size",
        f"devices the model is split over; without a GPU virtual ones, at most {MAX_VIRTUAL_DEVICES}; without MODEL "
        f"and GPU {DEMO_DEVICES}",
        short="-tp",
    ),
    Flag(
        "decode_context_parallel_size",
        "devices one copy of the KV cache is split over; without MODEL and GPU as -tp",
        short="-dcp",
    ),
    Flag(
        "enable_expert_parallel",
        "whole experts on each device, instead of a part of every expert",
        short="-ep",
    ),
    Flag("num_processes", "processes that drive the mesh together, each with an equal part of its devices"),
    Flag("process_id", "which of them this one is, from 0; process 0 answers requests"),
    Flag(
        "coordinator_address", "host:port of process 0, where the others find it; unset: there are no others"
    ),
    Flag("dcp_comm_backend", "how partial attention outputs are merged", COMM_BACKENDS),
    Flag(
        "dcp_decode_path", "decode: what travels between ranks (docs/dcp.md); auto: by the link", DECODE_PATHS
    ),
    Flag("dcp_transport", "exchanges by copy engines or by kernels; auto: by the GPUs' link", TRANSPORTS),
    Flag("dcp_exchange_memory", "bytes per device for exchanged records; more go in rounds"),
    Flag(
        "dcp_project_first",
        "path queries: project outputs to values before they are merged, for a copy of all heads' expansions; auto: "
        "where it pays",
        PROJECT_FIRST,
    ),
    Flag(
        "dcp_prefill_path",
        "prefill: gather the context, or the queries; auto: context if it fits",
        PREFILL_PATHS,
    ),
    Flag("dcp_context_memory", "bytes per device for gathered contexts in prefill"),
    Flag(
        "dcp_indexer_shards", "parts of the index keys; 1: every rank keeps all of them; W: each its own part"
    ),
    Flag("step_segments", "programs a step is compiled as; unset: 2 on GPUs, 1 on CPUs (docs/dcp.md)"),
    Flag("block_size", "tokens of a page on each rank of the DCP group"),
    Flag("cp_kv_cache_interleave_size", "consecutive tokens kept on one rank"),
    Flag(
        "kv_cache_dtype",
        "format of cached records; auto: the checkpoint's cache scheme, else as dtype; fp8: fp8_ds_mla",
        RECORD_FORMATS,
    ),
    Flag("nvfp4_rope_dtype", "roped key of nvfp4_ds_mla records: 432 or 368 bytes", NVFP4_ROPE_DTYPES),
    Flag("nvfp4_scales", "JSON file of each layer's outer scale for nvfp4_ds_mla records; unset: 1 for all"),
    Flag("num_gpu_blocks_override", "number of pages; unset: what the cache's memory holds"),
    Flag(
        "kv_cache_memory_bytes",
        "bytes per device for the cache; unset: by --gpu-memory-utilization on GPUs, 256 MiB on CPU",
    ),
    Flag("gpu_memory_utilization", "share of a GPU's memory to use in all (GPU only)"),
    Flag("enable_prefix_caching", "share pages between requests that begin with the same tokens"),
    Flag("max_num_seqs", "requests that run together"),
    Flag("max_num_batched_tokens", "tokens of one step: of requests that decode, and of chunks of prompts"),
    Flag(
        "max_num_queued_reqs",
        "requests that may wait for a step to take them up; the server answers 503 to more, if any waits, while `LLM` "
        "queues all it is given; unset: no limit",
    ),
    Flag(
        "max_num_queued_tokens",
        "tokens that the prompts of waiting requests may have in all, likewise; unset: no limit",
    ),
    Flag("long_prefill_token_threshold", "prompt tokens of one request in a step; 0: as many as fit"),
    Flag("scheduling_policy", "who is first: who came first, or by `priority`", SCHEDULING_POLICIES),
    Flag("watermark", "share of the cache that stays free when a request is admitted, for those that run"),
    Flag("async_scheduling", "start a step before the tokens of the one before it were read"),
    Flag("precompile_bs_paddings", "batch sizes to compile decode for, as 1,4,16; unset: powers of 4"),
    Flag("precompile_token_paddings", "chunk sizes to compile prefill for, as 16,64,256; unset: powers of 4"),
    Flag(
        "speculative_config",
        "JSON object with method (mtp, also called deepseek_mtp) and num_speculative_tokens (1 to 7), or "
        "--speculative-config.method and so on; "
        "unset: no drafts",
        short="-sc",
    ),
    Flag(
        "kv_transfer_config",
        "JSON object with kv_connector (tcp, inproc, nixl, jax), kv_role (kv_producer, kv_consumer, kv_both) and more, "
        "see docs/disaggregation.md; unset: prefill and decode are one engine's",
    ),
    Flag("latent_norm_eps", "eps of the norms of the query and KV latents (vLLM uses rms_norm_eps)"),
    Flag(
        "generation_config",
        "sampling defaults; auto: the checkpoint's, vllm: SamplingParams'",
        GENERATION_CONFIGS,
    ),
    Flag("hf_overrides", "JSON object laid over config.json; unset: nothing"),
)

JSON_FLAGS = ("hf_overrides", "speculative_config", "kv_transfer_config")
"""Flags that take a JSON object, or a dict."""
SIZE_LISTS = ("precompile_bs_paddings", "precompile_token_paddings")
"""Flags that take sizes such as 1,4,16, or a list of them."""
_SECTIONS = {
    "parallel": ParallelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "processes": ProcessConfig,
}
_FIELD_OF_FLAG = {"speculative_config": "speculative", "kv_transfer_config": "transfer"}
"""Where a setting is not named as its flag."""


def field_of(name: str) -> dataclasses.Field[Any]:
    """The dataclass field a flag sets; its type and default are the flag's."""
    for owner in (EngineConfig, *_SECTIONS.values()):
        for field in dataclasses.fields(owner):
            if field.name == _FIELD_OF_FLAG.get(name, name):
                return field
    raise KeyError(name)


def section_of(name: str) -> str:
    """The part of the configuration that a flag belongs to: parallel, cache, scheduler, processes, or engine."""
    found = _FIELD_OF_FLAG.get(name, name)
    sections = (
        section
        for section, kind in _SECTIONS.items()
        if any(field.name == found for field in dataclasses.fields(kind))
    )
    return next(sections, "engine")


def value_type(name: str) -> type:
    """int, float, str or bool: what a flag takes (Optional stripped; JSON objects count as str)."""
    kind = field_of(name).type
    if isinstance(kind, types.UnionType):
        kind = next(member for member in typing.get_args(kind) if member is not type(None))
    return kind if kind in (int, float, str, bool) else str  # type: ignore[return-value]


def engine_config(model: str, **settings: Any) -> EngineConfig:
    """Build the engine's configuration from flags with underscores.

    Raises ConfigError for unknown names (with the nearest known one), for vLLM flags we refuse, unless they ask for
    what is so anyway, and for bad values.
    """
    known = {flag.name for flag in FLAGS}
    settings = {
        name: value for name, value in settings.items() if name in known or not is_so_anyway(name, value)
    }
    if strange := [explain_unknown(name, known) for name in settings if name not in known]:
        raise ConfigError("; ".join(strange))
    values = {name: value for name, value in settings.items() if value is not None}
    values = {_FIELD_OF_FLAG.get(name, name): _typed(name, value) for name, value in values.items()}
    sections = {
        section: kind(**{f.name: values.pop(f.name) for f in dataclasses.fields(kind) if f.name in values})
        for section, kind in _SECTIONS.items()
    }
    return EngineConfig(model=model, **sections, **values)


def explain_unknown(name: str, known: set[str]) -> str:
    """Why a flag cannot be used, and what can."""
    option = option_of(name)
    if name in REFUSED:
        return f"{option} is not supported: {REFUSED[name]}"
    if name.removeprefix("no_") in REFUSED:
        return f"{option} is not needed: it is off anyway ({REFUSED[name.removeprefix('no_')]})"
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.75)
    hint = f"; did you mean {option_of(near[0])}?" if near else ""
    return f"unknown flag {option}{hint}"


def in_flags(message: str, spelled: Mapping[str, str]) -> str:
    """A ConfigError's message for a command line, with the flags that users gave instead of settings' names.

    spelled: flags by setting. Names of one word are also words: they are only taken for a setting at the beginning.
    """
    names = "|".join(name for name in spelled if "_" in name)
    message = re.sub(rf"(?<![\w./'\"-])({names})\b(?!['\"])", lambda found: spelled[found[1]], message)
    first, space, rest = message.partition(" ")
    return spelled.get(first, first) + space + rest


def _typed(name: str, value: Any) -> Any:
    if name == "hf_overrides":
        return _overrides(_json_object(name, value))
    if name == "speculative_config":
        return SpeculativeConfig.from_object(_json_object(name, value))
    if name == "kv_transfer_config":
        return TransferConfig.from_object(_json_object(name, value))
    if name in SIZE_LISTS:
        return _sizes(name, value)
    kind = value_type(name)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        try:
            return float(value)
        except OverflowError:
            raise ConfigError(f"{name} is beyond all numbers it could be") from None
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{name} takes {kind.__name__}, but got {value!r}")
    return value


def _sizes(name: str, value: Any) -> tuple[int, ...]:
    try:
        sizes = [int(part) for part in value.replace(",", " ").split()] if isinstance(value, str) else value
        if all(type(size) is int for size in sizes):  # neither a fraction nor a bool
            return tuple(sizes)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{name} takes sizes such as 1,4,16, but got {value!r}")


def _json_object(name: str, value: Any) -> Mapping[Any, Any]:
    if isinstance(value, str):
        try:
            value = parse_unique_json(value)
        except ValueError as error:
            raise ConfigError(f"{name} is not valid JSON: {error}") from None
    if not isinstance(value, Mapping):
        raise ConfigError(f"{name} must be a JSON object, but got {value!r}")
    return value


def _overrides(value: Mapping[Any, Any]) -> tuple[tuple[str, object], ...]:
    strange = [key for key in value if not isinstance(key, str)]
    if strange:
        raise ConfigError(
            f"hf_overrides must have field names of config.json as keys, but has {strange[0]!r}"
        )
    return tuple(value.items())
