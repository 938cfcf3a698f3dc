"""How weights that are not there would be stored: as much as a quantisation section tells without them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from glm_dcp_jax.config import ConfigError, ModelConfig
from glm_dcp_jax.config.cache_scheme import says_something
from glm_dcp_jax.config.json_file import read_json_object
from glm_dcp_jax.kernels.weights import NVFP4_GROUP
from glm_dcp_jax.model.stored_weights import ALL_PLAIN, WeightFormats
from glm_dcp_jax.plan.presets import ONE_SCALE, fp8_formats, nvfp4_formats, split_group

_KNOWN: dict[str, dict[str, tuple[Any, ...]]] = {
    "fp8": {"fmt": (None, "e4m3"), "quant_algo": (None, "FP8")},
    "modelopt": {"quant_algo": ("NVFP4", "FP8"), "group_size": (None, NVFP4_GROUP)},
}
"""By method: fields that decide how weights are stored, and values that are understood; None: left out."""
_ALGORITHM_OF = {"modelopt_fp4": "NVFP4", "modelopt_fp8": "FP8"}
"""What a quant_method says that is an algorithm as well."""


def assumed_formats(
    model: ModelConfig, directory: Path, overrides: Mapping[str, Any]
) -> tuple[WeightFormats, str]:
    """By the section in a model's directory, which does not say which weights it means; and that in words.

    Raises ConfigError for a section that does not say how weights are stored, or not in a known way.
    """
    found = model.quantisation
    if found is None:
        return ALL_PLAIN, f"{model.dtype}, as config.json has no quantisation"
    section = _section(directory, overrides)
    if found.method not in _KNOWN:
        raise ConfigError(
            f"there are no files of weights in {directory}, and quant_method {found.method} does not say what they "
            "would be stored as; add the files, or plan with --model glm-5.2-fp8 or glm-5.2-nvfp4"
        )
    for field, known in _KNOWN[found.method].items():
        if section.get(field) not in known:
            raise _unknown(directory, field, section.get(field), known)
    if found.method == "fp8":
        return fp8_formats(model, found.block), "quantised as GLM-5.2's FP8 form, by its quant_method fp8"
    named = _ALGORITHM_OF.get(str(section.get("quant_method")))
    if named not in (None, section["quant_algo"]):
        raise ConfigError(
            f"quant_method {section['quant_method']} contradicts quant_algo {section['quant_algo']}; leave one of them "
            "in config.json"
        )
    if section["quant_algo"] == "FP8":
        weights = fp8_formats(model, ONE_SCALE)
        return weights, "what GLM-5.2's FP8 form quantises, with one scale each, by its quant_algo FP8"
    if odd := split_group(model):
        raise ConfigError(
            f"experts cannot be stored in NVFP4, as the quantisation says: {odd}; use the config.json of a quantised "
            "checkpoint"
        )
    return nvfp4_formats(model), "experts in NVFP4, by its quant_algo NVFP4"


def _section(directory: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The quantisation section that counts, as ModelConfig.load finds it; an algorithm that its method names is in."""
    config = read_json_object(directory / "config.json") | dict(overrides)
    section = config.get("quantization_config")
    if not says_something(section or {}):
        exported = read_json_object(directory / "hf_quant_config.json")
        section = exported.get("quantization", exported)
    section = dict(section or {})
    if section.get("quant_algo") is None:
        section["quant_algo"] = _ALGORITHM_OF.get(str(section.get("quant_method")))
    return section


def _unknown(directory: Path, field: str, value: Any, known: tuple[Any, ...]) -> ConfigError:
    said = f"{field} {value!r} is not" if value is not None else f"{field} is left out, and is not"
    return ConfigError(
        f"there are no files of weights in {directory}, and the quantisation's {said} among what could be planned "
        f"without them: {', '.join(str(each) for each in known if each is not None)}; add the files, or change it "
        "in config.json"
    )
