"""vLLM's flags that this engine does not have, and the values of theirs that ask for nothing else."""

from collections.abc import Mapping, Sequence

Value = bool | int | str

REFUSED = {
    "api_server_count": "one server process drives the mesh",
    "calculate_kv_scales": "quantised records carry their scales; --nvfp4-scales takes calibrated outer ones",
    "compilation_config": "steps are always compiled; see --precompile-bs-paddings",
    "cpu_offload_gb": "weights are not offloaded",
    "data_parallel_size": "start one server per replica behind a load balancer",
    "distributed_executor_backend": "start each process yourself, with --num-processes and --process-id",
    "enable_chunked_prefill": "prefill is always chunked; set --max-num-batched-tokens",
    "enable_lora": "LoRA adapters are not supported",
    "enforce_eager": "steps are always compiled; see --precompile-bs-paddings",
    "guided_decoding_backend": "llguidance compiles all structured outputs; leave it out",
    "load_format": "what a directory holds is found out: safetensors, or arrays that glm_dcp_jax.convert made",
    "lora_modules": "LoRA adapters are not supported",
    "master_addr": "use --coordinator-address",
    "nnodes": "use --num-processes",
    "node_rank": "use --process-id",
    "num_scheduler_steps": "a step is started while the one before it runs; see --async-scheduling",
    "pipeline_parallel_size": "the model is split by tensor parallelism only; use --tensor-parallel-size",
    "prefill_context_parallel_size": "prefill context parallelism is not supported",
    "revision": "nothing is downloaded; name the directory of the snapshot you want as MODEL",
    "structured_outputs_config": "llguidance compiles all structured outputs; leave it out",
    "swap_space": "the cache is not offloaded",
    "tokenizer_mode": "tokenizer.json is read, which there is one way to do",
    "tokenizer_revision": "nothing is downloaded; name a directory with --tokenizer",
    "trust_remote_code": "no code of a checkpoint is ever run, so there is nothing to trust",
}
"""vLLM flags (and planned ones) that this engine does not have, each with what to do instead."""

SO_ANYWAY: Mapping[str, Sequence[Value]] = {
    "api_server_count": (1,),
    "calculate_kv_scales": (False,),
    "cpu_offload_gb": (0,),
    "data_parallel_size": (1,),
    "enable_chunked_prefill": (True,),
    "enable_expert_parallel": (False,),
    "enable_lora": (False,),
    "enforce_eager": (False,),
    "guided_decoding_backend": ("auto",),
    "load_format": ("auto",),
    "nnodes": (1,),
    "node_rank": (0,),
    "num_scheduler_steps": (1,),
    "pipeline_parallel_size": (1,),
    "prefill_context_parallel_size": (1,),
    "swap_space": (0,),
    "tokenizer_mode": ("auto",),
    "trust_remote_code": (True, False),
}
"""Values that ask for what is so anyway: they are taken, and change nothing. A switch is True, its --no- form False."""


def is_so_anyway(name: str, value: object, table: Mapping[str, Sequence[Value]] = SO_ANYWAY) -> bool:
    """Whether a flag's value asks for what is so anyway. Numbers may be text."""
    return any(
        (type(value) is type(so) and value == so) or (type(so) is int and value == str(so))
        for so in table.get(name, ())
    )
