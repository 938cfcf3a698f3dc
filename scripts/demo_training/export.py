"""What was trained as a Hugging Face checkpoint directory."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import tokenizers
from safetensors.numpy import save

from demo_training.description import CONTEXT
from glm_dcp_jax.demo.tokenizer import tokenizer_settings
from glm_dcp_jax.engine.chat_template import glm_template

LARGEST = 8_000_000
"""Bytes of the weights' file."""
_BIAS = "e_score_correction_bias"
_FLOAT32 = np.dtype(np.float32)


def tensors(parameters: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """By their names in a checkpoint: bfloat16, the routers' biases float32, experts one by one."""
    named: dict[str, np.ndarray] = {}
    for name, array in parameters.items():
        full = name if name == "lm_head" else f"model.{name}"
        full = full if full.endswith((".bias", _BIAS)) else f"{full}.weight"
        if ".experts." not in full:
            named[full] = array.astype(_FLOAT32 if full.endswith(_BIAS) else ml_dtypes.bfloat16)
            continue
        before, _, part = full.partition(".experts.")
        for expert, weight in enumerate(array):
            named[f"{before}.experts.{expert}.{part}"] = weight.astype(ml_dtypes.bfloat16)
    return named


def write(
    directory: Path,
    config: Mapping[str, Any],
    tokenizer: tokenizers.Tokenizer,
    parameters: Mapping[str, np.ndarray],
) -> None:
    """All files but the model card. Raises ValueError where the weights take more than LARGEST."""
    weights = save(tensors(parameters), metadata={"format": "pt"})
    if len(weights) > LARGEST:
        raise ValueError(f"the weights take {len(weights):,} bytes, more than {LARGEST:,}")
    directory.mkdir(parents=True, exist_ok=True)
    generation = {
        "temperature": 1.0,
        "top_p": 0.95,
        "eos_token_id": config["eos_token_id"],
        "pad_token_id": config["pad_token_id"],
    }
    for name, content in (
        ("config.json", config),
        ("generation_config.json", generation),
        ("tokenizer_config.json", tokenizer_settings(CONTEXT)),
    ):
        (directory / name).write_text(json.dumps(content, indent=2) + "\n")
    (directory / "tokenizer.json").write_text(tokenizer.to_str())
    (directory / "chat_template.jinja").write_text(glm_template())
    (directory / "model.safetensors").write_bytes(weights)
