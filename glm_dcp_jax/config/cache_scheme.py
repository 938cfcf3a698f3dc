"""What a checkpoint's quantisation section says of its KV cache.

Two spellings are in use: `kv_cache_scheme` {"num_bits", "type"} of compressed-tensors and newer ModelOpt files, and
ModelOpt's `kv_cache_quant_algo` "FP8" or "NVFP4" (in config.json or in hf_quant_config.json's "quantization").
"""

from collections.abc import Mapping
from typing import Any

_FORMATS = {"FP8": "fp8_ds_mla", "NVFP4": "nvfp4_ds_mla", 8: "fp8_ds_mla", 4: "nvfp4_ds_mla"}
_NOT_ABOUT_WEIGHTS = {"quant_method", "producer", "exclude_modules", "ignore"}


def cache_scheme(section: Mapping[str, Any]) -> str | None:
    """The record format that the checkpoint asks for, None where it says nothing.

    A scheme that no record format answers to comes back as it is written, for an error that can name it.
    """
    algorithm, scheme = section.get("kv_cache_quant_algo"), section.get("kv_cache_scheme")
    if algorithm is not None:
        return _FORMATS.get(algorithm, f"kv_cache_quant_algo {algorithm!r}")
    if scheme is None:
        return None
    if isinstance(scheme, Mapping) and scheme.get("type", "float") == "float":
        bits = scheme.get("num_bits")
        if bits in (8, 4):
            return _FORMATS[bits]
    return f"kv_cache_scheme {scheme!r}"


def is_only_about_the_cache(section: Mapping[str, Any]) -> bool:
    """Whether weights are plain although there is a quantisation section."""
    about_weights = {key for key, value in section.items() if value} - _NOT_ABOUT_WEIGHTS
    return cache_scheme(section) is not None and about_weights <= {"kv_cache_scheme", "kv_cache_quant_algo"}
