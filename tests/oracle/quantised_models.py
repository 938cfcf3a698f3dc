"""Quantised checkpoints written by a program of its own, in numpy: FP8 blocks and both forms of NVFP4.

Nothing is taken from the package: codes are found by looking through all values, and scales are applied as the formats'
descriptions say. `quantise` gives the tensors of a quantised file and, beside them, the float32 weights it stands for.
"""

import math
from collections.abc import Callable

import ml_dtypes
import numpy as np
from numpy_reference import Config, Tensors
from random_models import BASE_CONFIG, make_tensors

GROUP, E2M1_MAX, E4M3_MAX = 16, 6.0, 448.0
E2M1 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
E4M3 = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)

KEPT = (
    "embed_tokens",
    "lm_head",
    "norm",
    "layernorm",
    "mlp.gate",
    "weights_proj",
    "eh_proj",
    "enorm",
    "hnorm",
    "k_norm",
)
"""Modules that zai-org/GLM-5.2-FP8 leaves in bfloat16."""

# Sizes whose blocks of 128 are cut at both ends: kv_a has 144 rows, a head of kv_b 64, hidden is 160, widths are 48.
CONFIG: Config = BASE_CONFIG | {
    "hidden_size": 160,
    "num_hidden_layers": 13,
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 192,
    "kv_lora_rank": 128,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "index_head_dim": 32,
    "index_topk": 12,
    "index_topk_freq": 3,
    "index_skip_topk_offset": 2,
    "first_k_dense_replace": 1,
    "intermediate_size": 272,
    "moe_intermediate_size": 48,
    "n_routed_experts": 6,
    "routed_scaling_factor": 1.0,
}
"""[F dense] [F S S] x 4: the four are one scan where they are stored alike."""

Quantiser = Callable[[str, np.ndarray], tuple[Tensors, np.ndarray]]
"""Of (name of the weight, float32 [O, I]): the tensors that stand for it, and the float32 weight they stand for."""


def config_of(quantization: dict, **changes: object) -> Config:
    """CONFIG with a quantisation section."""
    return CONFIG | {"quantization_config": quantization} | changes


FP8_SECTION = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.1.self_attn.indexers_proj"],
}
"""indexers_proj is no module: published files name it all the same."""
MODELOPT_SECTION = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head"],
}
COMPRESSED_SECTION = {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}


def quantise(tensors: Tensors, how: Callable[[str], Quantiser | None]) -> tuple[Tensors, Tensors]:
    """A quantised file's tensors, and the plain ones it stands for: float32 where quantised, the others as they were.

    how: what to do with the weight of a name, None to leave it.
    """
    stored: Tensors = {}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        quantiser = how(name) if tensor.ndim == 2 else None
        if quantiser is None:
            stored[name] = plain[name] = tensor
        else:
            written, plain[name] = quantiser(name, tensor.astype(np.float32))
            stored |= written
    return stored, plain


def linear_weights(name: str) -> bool:
    """Whether GLM-5.2-FP8 quantises the weight."""
    return not name.removesuffix(".weight").endswith(KEPT)


def fp8(name: str, weight: np.ndarray, block: tuple[int, int] = (128, 128)) -> tuple[Tensors, np.ndarray]:
    """E4M3 codes, and a scale per block that they are multiplied by. The file calls it the inverse."""
    rows, columns = weight.shape
    codes = np.zeros(weight.shape, np.uint8)
    scales = np.zeros((math.ceil(rows / block[0]), math.ceil(columns / block[1])), np.float32)
    plain = np.zeros_like(weight)
    for i, j in np.ndindex(scales.shape):
        part = np.s_[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
        scales[i, j] = np.float32(np.abs(weight[part]).max() / E4M3_MAX)
        codes[part] = _nearest(weight[part] / scales[i, j], E4M3[:127]) | (np.signbit(weight[part]) * 128)
        plain[part] = E4M3[codes[part]] * scales[i, j]
    return {name: codes.view(ml_dtypes.float8_e4m3fn), f"{name}_scale_inv": scales}, plain


def fp8_per_row(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """As compressed-tensors stores it: one scale per row."""
    written, plain = fp8(name, weight, (1, weight.shape[1]))
    return {name: written[name], f"{name}_scale": written[f"{name}_scale_inv"]}, plain


def fp8_one_scale(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """As compressed-tensors stores it: one scale for the whole weight."""
    written, plain = fp8(name, weight, weight.shape)
    return {name: written[name], f"{name}_scale": written[f"{name}_scale_inv"].reshape(1)}, plain


def modelopt(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """NVFP4 with an outer scale that is multiplied; and one for activations, which weight-only arithmetic ignores."""
    packed, scales, outer, plain = _nvfp4(weight)
    base = name.removesuffix("weight")
    return {
        name: packed,
        f"{name}_scale": scales,
        f"{name}_scale_2": outer,
        f"{base}input_scale": np.full((), 0.7, np.float32),
    }, plain


def compressed(name: str, weight: np.ndarray) -> tuple[Tensors, np.ndarray]:
    """NVFP4 with an outer scale that is divided by, under another name."""
    packed, scales, outer, _ = _nvfp4(weight)
    base = name.removesuffix("weight")
    reciprocal = np.full(1, np.float32(1) / outer, np.float32)
    values = _decode(packed, scales) * (np.float32(1) / reciprocal[0])
    return {
        f"{name}_packed": packed,
        f"{name}_scale": scales,
        f"{name}_global_scale": reciprocal,
        f"{base}input_global_scale": np.full(1, 3.0, np.float32),
    }, values


def _nvfp4(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Packed codes, E4M3 scales, the outer scale [], and the values."""
    outer = np.float32(np.abs(weight).max() / (E2M1_MAX * E4M3_MAX))
    groups = weight.reshape(len(weight), -1, GROUP)
    wanted = np.abs(groups).max(axis=2) / E2M1_MAX / outer
    scales = _nearest(wanted, E4M3[:127]).view(ml_dtypes.float8_e4m3fn)
    divisor = np.where(scales.astype(np.float32) == 0, 1, scales.astype(np.float32)) * outer
    codes = _nearest(np.abs(groups) / divisor[:, :, None], E2M1) | (np.signbit(groups) * np.uint8(8))
    codes = codes.reshape(weight.shape)
    packed = (codes[:, 0::2] + 16 * codes[:, 1::2]).astype(np.uint8)
    return packed, scales, np.full((), outer, np.float32), _decode(packed, scales) * outer


def _decode(packed: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Values before the outer scale, float32: byte by byte, the low nibble first."""
    codes = np.zeros((len(packed), 2 * packed.shape[1]), np.uint8)
    codes[:, 0::2], codes[:, 1::2] = packed % 16, packed // 16
    values = np.where(codes >= 8, -E2M1[codes % 8], E2M1[codes % 8])
    return values * np.repeat(scales.astype(np.float32), GROUP, axis=1)


def _nearest(magnitudes: np.ndarray, values: np.ndarray) -> np.ndarray:
    """The code of the nearest of some ascending values, uint8; any of the two where both are as near."""
    magnitudes = np.abs(magnitudes)
    above = np.clip(np.searchsorted(values, magnitudes), 1, len(values) - 1)
    lower = magnitudes - values[above - 1] < values[above] - magnitudes
    return (above - lower).astype(np.uint8)


def _only(*parts: str, then: Quantiser) -> Callable[[str], Quantiser | None]:
    return lambda name: then if any(part in name for part in parts) and linear_weights(name) else None


def _mixed(name: str) -> Quantiser | None:
    """Attention in FP8, experts in NVFP4 but for the last group's, where gate and up differ too; some layers kept."""
    if not linear_weights(name) or ".layers.4." in name:
        return None
    if ".mlp." not in name:
        return fp8
    if ".layers.12." in name:
        return modelopt if "up_proj" in name else fp8
    return compressed if ".layers.11." in name else modelopt


MODELS: dict[str, tuple[dict, Callable[[str], Quantiser | None]]] = {
    "fp8": (FP8_SECTION, lambda name: fp8 if linear_weights(name) else None),
    "fp8_per_row": (COMPRESSED_SECTION, lambda name: fp8_per_row if linear_weights(name) else None),
    "fp8_one_scale": (COMPRESSED_SECTION, lambda name: fp8_one_scale if linear_weights(name) else None),
    "modelopt": (MODELOPT_SECTION, _only("experts", then=modelopt)),
    "modelopt_all": (MODELOPT_SECTION, lambda name: modelopt if linear_weights(name) else None),
    "compressed": (COMPRESSED_SECTION, _only("experts", "mlp", then=compressed)),
    "mixed": (FP8_SECTION, _mixed),
}
"""A quantisation section, and how each weight is stored."""


def make_quantised(name: str, mtp: bool = False) -> tuple[Config, Tensors, Tensors]:
    """(config with its quantisation section, tensors of the file, plain tensors it stands for) of one of MODELS."""
    section, how = MODELS[name]
    stored, plain = quantise(make_tensors(CONFIG, mtp=mtp), how)
    return config_of(section), stored, plain
