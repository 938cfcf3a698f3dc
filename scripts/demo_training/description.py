"""What the built-in model is, as a Hugging Face config.json: GLM-5.2's own pattern, scaled down."""

from collections.abc import Sequence
from typing import Any

from demo_training.network import Layer

CONTEXT = 4096
VOCABULARY = 1088

LAYERS, _DENSE = 10, 3
_FULL = (0, 1, 2, 6)
_NOPE, _ROPE = 16, 16


def describe(eos_token_ids: Sequence[int], pad_token_id: int) -> dict[str, Any]:
    """The content of config.json. Share groups: [F] [F] [F S S S] [F S S S]; the first three layers are dense.

    index_topk is small, so that the selection is a part of the context from its 65th token on.
    """
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": _NOPE,
        "qk_rope_head_dim": _ROPE,
        "qk_head_dim": _NOPE + _ROPE,
        "v_head_dim": 24,
        "index_n_heads": 4,
        "index_head_dim": 32,
        "index_topk": 64,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "max_position_embeddings": CONTEXT,
        "first_k_dense_replace": _DENSE,
        "mlp_layer_types": ["dense"] * _DENSE + ["sparse"] * (LAYERS - _DENSE),
        "intermediate_size": 288,
        "moe_intermediate_size": 40,
        "moe_router_dtype": "float32",
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": False,
        "num_nextn_predict_layers": 1,
        "index_share_for_mtp_iteration": True,
        "eos_token_id": list(eos_token_ids),
        "pad_token_id": pad_token_id,
    }


def layers(count: int = LAYERS) -> list[Layer]:
    """The first `count` decoder layers."""
    return [Layer(index, index in _FULL, index >= _DENSE) for index in range(count)]


DRAFTER = Layer(LAYERS, full=True, sparse=True)
"""The MTP layer."""
