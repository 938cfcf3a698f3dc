"""GLM-5.2 without its checkpoint: the published sizes, for programs that are compiled and not run."""

from typing import Any

from glm_dcp_jax.config import ModelConfig

_GROUP = ["full", "shared", "shared", "shared"]
_LONE, _GROUPS, _SHORT_GROUPS, _DENSE = 2, 19, 3, 3

CONFIG: dict[str, Any] = {
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 154_880,
    "hidden_size": 6144,
    "num_hidden_layers": 78,
    "num_attention_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "intermediate_size": 12_288,
    "mlp_layer_types": ["dense"] * _DENSE + ["sparse"] * 75,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "moe_intermediate_size": 2048,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_topk": 2048,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "indexer_types": ["full"] * _LONE + _GROUP * _GROUPS,
    "rope_parameters": {"rope_theta": 8_000_000, "rope_type": "default"},
    "max_position_embeddings": 1_048_576,
    "rms_norm_eps": 1e-5,
    "eos_token_id": [154_820, 154_827, 154_829],
}
"""The published config.json; what this engine does not read is left out."""

SHORT_LAYERS = _LONE + len(_GROUP) * _SHORT_GROUPS
MIDDLE = (_LONE + len(_GROUP), _LONE + 2 * len(_GROUP) - 1)
"""First and last layer of the shortened model's middle group, in which every layer has experts as in 18 of the 19."""
MIDDLE_COUNTS = 1 + _GROUPS - _SHORT_GROUPS
"""How many groups of the full model the middle one stands for."""


def glm52() -> ModelConfig:
    """All 78 layers."""
    return ModelConfig.from_hf(CONFIG)


def short_glm52() -> ModelConfig:
    """The first 14 layers: two lone Full layers, a group that begins with a dense one, and two groups with experts."""
    return ModelConfig.from_hf(
        CONFIG
        | {
            "num_hidden_layers": SHORT_LAYERS,
            "indexer_types": CONFIG["indexer_types"][:SHORT_LAYERS],
            "mlp_layer_types": CONFIG["mlp_layer_types"][:SHORT_LAYERS],
        }
    )
