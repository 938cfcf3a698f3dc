"""Settings of the engine, one frozen dataclass per concern, validated when built."""

from dataclasses import dataclass, fields

from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.processes import ProcessConfig
from glm_dcp_jax.config.quantisation import QUANTIZATIONS
from glm_dcp_jax.config.speculative import SpeculativeConfig
from glm_dcp_jax.config.transfer import TransferConfig

COMM_BACKENDS = ("ag_rs", "a2a")
PREFILL_PATHS = ("auto", "context", "queries")
DECODE_PATHS = ("auto", "queries", "records", "bulk")
PROJECT_FIRST = ("auto", "always", "never")
TRANSPORTS = ("auto", "ce", "direct")
RECORD_FORMATS = ("auto", "float32", "bfloat16", "fp8", "fp8_e4m3", "fp8_ds_mla", "nvfp4_ds_mla")
RECORD_ALIASES = {"fp8": "fp8_ds_mla", "fp8_e4m3": "fp8_ds_mla"}
"""What vLLM makes of a shorter name for models of this family."""
SCHEDULING_POLICIES = ("fcfs", "priority")
NVFP4_ROPE_DTYPES = ("bfloat16", "fp8")
KERNELS = ("auto", "reference", "triton")
GENERATION_CONFIGS = ("auto", "vllm")
FLOAT_DTYPES = ("bfloat16", "float16", "float32")
DTYPE_ALIASES = {"half": "float16", "float": "float32"}
"""vLLM's other names."""
DTYPES = ("auto", *FLOAT_DTYPES, *DTYPE_ALIASES)
MAX_DEVICES = 65_536
MAX_VIRTUAL_DEVICES = 64
MAX_BLOCK_SIZE = 1_048_576
MAX_SEQS = 65_536
MAX_BATCHED_TOKENS = 1_048_576
MAX_BYTES = 2**60
MAX_PAGES = 2**40
"""More than these is a slip of the pen, and would take the machine's memory or time before anything else is said."""


def at_least(name: str, value: int, least: int, most: int | None = None) -> None:
    """Raise ConfigError unless value is an integer of at least `least` and at most `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ConfigError(f"{name} must be an integer of at least {least}, but is {value!r}")
    if most is not None and value > most:
        raise ConfigError(f"{name} must be at most {most}, but is {value}")


def divides(name: str, value: int, whole_name: str, whole: int) -> None:
    """Raise ConfigError unless value, an integer of at least 1, divides whole."""
    at_least(name, value, 1)
    if whole % value:
        allowed = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise ConfigError(f"{name} {value} does not divide {whole_name} {whole}; use one of {allowed}")


def one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Raise ConfigError unless value is one of the allowed words."""
    if value not in allowed:
        raise ConfigError(f"{name} {value!r} is unknown; use one of {', '.join(allowed)}")


def _check_sizes(name: str, sizes: tuple[int, ...] | None) -> None:
    if sizes is None:
        return
    for size in sizes:
        at_least(name, size, 1)
    if not sizes or list(sizes) != sorted(set(sizes)):
        raise ConfigError(f"{name} must be ascending sizes such as 1,4,16, but is {sizes}")


@dataclass(frozen=True)
class ParallelConfig:
    """How the mesh is cut: tensor_parallel_size devices, of which every dcp consecutive ones share one cache."""

    tensor_parallel_size: int = 1
    decode_context_parallel_size: int = 1
    dcp_comm_backend: str = "ag_rs"
    dcp_prefill_path: str = "auto"
    dcp_decode_path: str = "auto"
    dcp_transport: str = "auto"
    dcp_exchange_memory: int = 512 * 2**20
    dcp_context_memory: int = 2**30
    dcp_project_first: str = "auto"
    step_segments: int | None = None
    dcp_indexer_shards: int = 1
    enable_expert_parallel: bool = False

    def __post_init__(self) -> None:
        tp, dcp = self.tensor_parallel_size, self.decode_context_parallel_size
        at_least("tensor_parallel_size", tp, 1, MAX_DEVICES)
        divides("decode_context_parallel_size", dcp, "tensor_parallel_size", tp)
        one_of("dcp_comm_backend", self.dcp_comm_backend, COMM_BACKENDS)
        one_of("dcp_prefill_path", self.dcp_prefill_path, PREFILL_PATHS)
        one_of("dcp_decode_path", self.dcp_decode_path, DECODE_PATHS)
        one_of("dcp_transport", self.dcp_transport, TRANSPORTS)
        if self.step_segments is not None:
            at_least("step_segments", self.step_segments, 1, MAX_DEVICES)
        one_of("dcp_project_first", self.dcp_project_first, PROJECT_FIRST)
        at_least("dcp_exchange_memory", self.dcp_exchange_memory, 1, MAX_BYTES)
        at_least("dcp_context_memory", self.dcp_context_memory, 1, MAX_BYTES)
        divides("dcp_indexer_shards", self.dcp_indexer_shards, "decode_context_parallel_size", dcp)
        if dcp == 1 and self.dcp_transport == "ce":
            raise ConfigError(
                "dcp_transport ce cannot be had: decode_context_parallel_size 1 leaves nothing to exchange; raise it, "
                "or use auto"
            )

    @property
    def replicas(self) -> int:
        """Copies of the sharded cache: tensor_parallel_size / decode_context_parallel_size."""
        return self.tensor_parallel_size // self.decode_context_parallel_size

    @property
    def without_effect(self) -> dict[str, object]:
        """Settings of exchanges that were made, by name, where one rank has all of a sequence and exchanges nothing."""
        if self.decode_context_parallel_size > 1:
            return {}
        values = {
            field.name: getattr(self, field.name) for field in fields(self) if field.name.startswith("dcp_")
        }
        return {name: value for name, value in values.items() if value != getattr(ParallelConfig, name)}


@dataclass(frozen=True)
class CacheConfig:
    """The paged cache: geometry, record format, and how much memory it may take (first given wins, top to bottom)."""

    block_size: int = 64
    cp_kv_cache_interleave_size: int = 1
    kv_cache_dtype: str = "auto"
    nvfp4_rope_dtype: str = "bfloat16"
    nvfp4_scales: str | None = None
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.92
    enable_prefix_caching: bool = True

    def __post_init__(self) -> None:
        block, interleave = self.block_size, self.cp_kv_cache_interleave_size
        at_least("block_size", block, 1, MAX_BLOCK_SIZE)
        divides("cp_kv_cache_interleave_size", interleave, "block_size", block)
        one_of("kv_cache_dtype", self.kv_cache_dtype, RECORD_FORMATS)
        one_of("nvfp4_rope_dtype", self.nvfp4_rope_dtype, NVFP4_ROPE_DTYPES)
        if self.num_gpu_blocks_override is not None:
            at_least("num_gpu_blocks_override", self.num_gpu_blocks_override, 1, MAX_PAGES)
        if self.kv_cache_memory_bytes is not None:
            at_least("kv_cache_memory_bytes", self.kv_cache_memory_bytes, 1, MAX_BYTES)
        if not 0.0 < self.gpu_memory_utilization <= 1.0:
            raise ConfigError(
                f"gpu_memory_utilization {self.gpu_memory_utilization} must be above 0 and at most 1"
            )


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of one step. max_model_len None: as long as the model and the cache allow.

    long_prefill_token_threshold: most prompt tokens of one sequence in a step, 0: as many as fit. watermark: share of
    the pages that stays free when a sequence is admitted. max_num_queued_reqs, max_num_queued_tokens: how many requests
    may wait, and how many tokens their prompts may have in all; None: any number.

    precompile_*_paddings: the sizes steps are compiled for (requests of a decode step, rows of a prefill chunk),
    ascending; None: powers of 4. The limits themselves are always among them.
    """

    max_model_len: int | None = None
    max_num_seqs: int = 16
    max_num_batched_tokens: int = 2048
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    long_prefill_token_threshold: int = 0
    scheduling_policy: str = "fcfs"
    watermark: float = 0.01
    async_scheduling: bool = True
    precompile_bs_paddings: tuple[int, ...] | None = None
    precompile_token_paddings: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        at_least("max_num_seqs", self.max_num_seqs, 1, MAX_SEQS)
        at_least("max_num_batched_tokens", self.max_num_batched_tokens, 1, MAX_BATCHED_TOKENS)
        at_least("long_prefill_token_threshold", self.long_prefill_token_threshold, 0, MAX_BATCHED_TOKENS)
        for name in ("max_num_queued_reqs", "max_num_queued_tokens"):
            if getattr(self, name) is not None:
                at_least(name, getattr(self, name), 1)
        one_of("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        if not 0.0 <= self.watermark < 1.0:
            raise ConfigError(f"watermark {self.watermark} must be at least 0 and below 1")
        if self.max_model_len is not None:
            at_least("max_model_len", self.max_model_len, 2)  # a prompt of one token, and one of output
        _check_sizes("precompile_bs_paddings", self.precompile_bs_paddings)
        _check_sizes("precompile_token_paddings", self.precompile_token_paddings)

    @property
    def limits_queue(self) -> bool:
        """Whether only so much may wait."""
        return self.max_num_queued_reqs is not None or self.max_num_queued_tokens is not None


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is built from, besides the model's own config.json.

    speculative: None for no drafts. transfer: None for an engine that hands no caches over.
    """

    model: str
    parallel: ParallelConfig = ParallelConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    processes: ProcessConfig = ProcessConfig()
    speculative: SpeculativeConfig | None = None
    transfer: TransferConfig | None = None
    tokenizer: str | None = None
    skip_tokenizer_init: bool = False
    dtype: str = "auto"
    quantization: str | None = None
    verify_checksums: bool = False
    kernels: str = "auto"
    seed: int = 0
    latent_norm_eps: float = 1e-6
    generation_config: str = "auto"
    hf_overrides: tuple[tuple[str, object], ...] = ()

    def __post_init__(self) -> None:
        tp = self.parallel.tensor_parallel_size
        divides("num_processes", self.processes.num_processes, "tensor_parallel_size", tp)
        if self.speculative is not None:
            rows = 1 + self.speculative.num_speculative_tokens  # of one request that decodes
            at_least(
                "max_num_batched_tokens", self.scheduler.max_num_batched_tokens, rows, MAX_BATCHED_TOKENS
            )
        if self.transfer is not None and self.processes.num_processes > 1:
            raise ConfigError(
                "kv_transfer_config needs an engine of one process, but num_processes is "
                f"{self.processes.num_processes}; start one process for all GPUs of a machine"
            )
        one_of("dtype", self.dtype, DTYPES)
        one_of("kernels", self.kernels, KERNELS)
        if self.quantization is not None:
            one_of("quantization", self.quantization, QUANTIZATIONS)
        one_of("generation_config", self.generation_config, GENERATION_CONFIGS)
        if not 0 < self.latent_norm_eps < 1:
            raise ConfigError(f"latent_norm_eps {self.latent_norm_eps} must be above 0 and below 1")

    @property
    def devices_here(self) -> int:
        """Devices of the mesh that this process has."""
        return self.parallel.tensor_parallel_size // self.processes.num_processes
