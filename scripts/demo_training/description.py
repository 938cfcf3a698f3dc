"""What the built-in model is, as a Hugging Face config.json: GLM-5.2's own pattern, scaled down."""

from collections.abc import Sequence
from typing import Any

from demo_training.network import Layer
from glm_dcp_jax.demo import description
from glm_dcp_jax.demo.description import CONTEXT as CONTEXT

VOCABULARY = 1088

LAYERS, _DENSE = 10, 3
_FULL = (0, 1, 2, 6)
_NOPE, _ROPE = 16, 16


def describe(eos_token_ids: Sequence[int], pad_token_id: int) -> dict[str, Any]:
    """The content of config.json. Share groups: [F] [F] [F S S S] [F S S S]; the first three layers are dense.

    index_topk is small, so that the selection is a part of the context from its 65th token on.
    """
    return description.describe(eos_token_ids, pad_token_id) | {
        "vocab_size": VOCABULARY,
        "hidden_size": 192,
        "qk_nope_head_dim": _NOPE,
        "qk_head_dim": _NOPE + _ROPE,
        "v_head_dim": 24,
        "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"},
        "intermediate_size": 288,
        "moe_intermediate_size": 40,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
    }


def layers(count: int = LAYERS) -> list[Layer]:
    """The first `count` decoder layers."""
    return [Layer(index, index in _FULL, index >= _DENSE) for index in range(count)]


DRAFTER = Layer(LAYERS, full=True, sparse=True)
"""The MTP layer."""
