"""What a checkpoint's quantisation section says of its KV cache.

Two spellings are in use: `kv_cache_scheme` {"num_bits", "type"} of compressed-tensors and newer ModelOpt files, and
ModelOpt's `kv_cache_quant_algo` "FP8" or "NVFP4" (in config.json or in hf_quant_config.json's "quantization").
"""

from collections.abc import Mapping
from typing import Any

_OF_ALGORITHM = {"FP8": "fp8_ds_mla", "NVFP4": "nvfp4_ds_mla"}
_OF_BITS = {8: "fp8_ds_mla", 4: "nvfp4_ds_mla"}
_NOT_ABOUT_WEIGHTS = {"quant_method", "producer", "exclude_modules", "ignore"}


def cache_scheme(section: Mapping[str, Any]) -> str | None:
    """The record format that the checkpoint asks for, None where it says nothing.

    A scheme that no record format answers to comes back as it is written, for an error that can name it.
    """
    algorithm, scheme = section.get("kv_cache_quant_algo"), section.get("kv_cache_scheme")
    by_algorithm = None if algorithm is None else _by_algorithm(algorithm)
    by_scheme = None if scheme is None else _by_scheme(scheme)
    if by_algorithm and by_scheme and by_algorithm != by_scheme:
        return f"kv_cache_quant_algo {algorithm!r}, but kv_cache_scheme {scheme!r}"
    return by_algorithm or by_scheme


def _by_algorithm(algorithm: Any) -> str:
    known = _OF_ALGORITHM.get(algorithm) if isinstance(algorithm, str) else None
    return known or f"kv_cache_quant_algo {algorithm!r}"


def _by_scheme(scheme: Any) -> str:
    if isinstance(scheme, Mapping) and scheme.get("type", "float") == "float":
        bits = scheme.get("num_bits")
        if type(bits) is int and bits in _OF_BITS:
            return _OF_BITS[bits]
    return f"kv_cache_scheme {scheme!r}"


def says_something(section: Any) -> bool:
    """Whether a quantisation section has any content: exporters leave empty ones, and fields of null."""
    return not isinstance(section, Mapping) or any(value is not None for value in section.values())


def is_only_about_the_cache(section: Mapping[str, Any]) -> bool:
    """Whether weights are plain although there is a quantisation section."""
    about_weights = {key for key, value in section.items() if value} - _NOT_ABOUT_WEIGHTS
    return cache_scheme(section) is not None and about_weights <= {"kv_cache_scheme", "kv_cache_quant_algo"}
