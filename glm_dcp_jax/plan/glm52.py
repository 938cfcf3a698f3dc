"""GLM-5.2 without its checkpoint: the published sizes, for programs that are compiled and not run."""

from typing import Any

from glm_dcp_jax.config import ModelConfig

_GROUP = ["full", "shared", "shared", "shared"]
_LONE, _GROUPS, _DENSE = 2, 19, 3

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
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
    "eos_token_id": [154_820, 154_827, 154_829],
}
"""The published config.json; what this engine does not read is left out."""


def glm52() -> ModelConfig:
    """All 78 layers."""
    return ModelConfig.from_hf(CONFIG)
