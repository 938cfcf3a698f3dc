"""What the `auto` of flags comes to: arithmetic, record format, and implementation of the ops."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from glm_dcp_jax.cache.records import RecordFormat
from glm_dcp_jax.config import CacheConfig, ConfigError, EngineConfig, ModelConfig
from glm_dcp_jax.config.engine import DTYPE_ALIASES, RECORD_ALIASES, RECORD_FORMATS
from glm_dcp_jax.config.outer_scales import load_outer_scales
from glm_dcp_jax.kernels.dispatch import Backend


@dataclass(frozen=True)
class Formats:
    """compute: dtype of weights and activations. latent_scales: outer scales, one per layer, None for none."""

    compute: Any
    record: RecordFormat
    latent_scales: tuple[float, ...] | None
    kernels: Backend

    def __str__(self) -> str:
        """A line for the log: what the cache keeps of a token, in words and bytes."""
        record, index = self.record, self.record.index
        rope = ", roped key in fp8" if record.has("rope_scale") else ""
        scales = ", outer scales" if self.latent_scales else ""
        return (
            f"{record.name}{rope}{scales}: {record.record_bytes} bytes a token and layer; index keys "
            f"{index.kind}: {index.key_bytes} bytes a token and Full layer"
        )

    @staticmethod
    def of(config: EngineConfig, model: ModelConfig, on_cpu: bool) -> "Formats":
        """Resolve and check what depends on model and platform. Raises ConfigError.

        dtype auto: the checkpoint's on GPUs, float32 on CPU, where bfloat16 is slower.
        """
        name = DTYPE_ALIASES.get(config.dtype, config.dtype)
        if name == "auto":
            name = "float32" if on_cpu else model.dtype
        record = RecordFormat.named(
            _record_name(config.cache, model, name), model, config.cache.nvfp4_rope_dtype
        )
        if config.kernels == "triton" and on_cpu:
            raise ConfigError("kernels 'triton' run on NVIDIA GPUs only; use auto or reference on the CPU")
        return Formats(
            jnp.dtype(name),
            record,
            _latent_scales(config.cache, model, record),
            config.kernels,  # type: ignore[arg-type]
        )


def _record_name(cache: CacheConfig, model: ModelConfig, dtype: str) -> str:
    """auto: the checkpoint's cache scheme; without one bfloat16 beside bfloat16 arithmetic, else float32."""
    if cache.kv_cache_dtype != "auto":
        return RECORD_ALIASES.get(cache.kv_cache_dtype, cache.kv_cache_dtype)
    if model.cache_scheme is None:
        return "bfloat16" if dtype == "bfloat16" else "float32"
    if model.cache_scheme not in RECORD_FORMATS:
        raise ConfigError(
            f"the checkpoint asks for a KV cache that is not supported ({model.cache_scheme}); choose one with "
            f"--kv-cache-dtype: {', '.join(RECORD_FORMATS[1:])}"
        )
    return model.cache_scheme


def _latent_scales(cache: CacheConfig, model: ModelConfig, record: RecordFormat) -> tuple[float, ...] | None:
    """The outer scales' file, which is for nvfp4_ds_mla records only."""
    if cache.nvfp4_scales is None:
        return None
    if record.name != "nvfp4_ds_mla":
        raise ConfigError(
            f"--nvfp4-scales is for nvfp4_ds_mla records, not for {record.name}; add --kv-cache-dtype nvfp4_ds_mla"
        )
    return load_outer_scales(Path(cache.nvfp4_scales), model.num_hidden_layers, model.kv_lora_rank)
