"""Random weights that behave like a trained network's: activations stay of order 1, nothing saturates, nothing ties."""

import zlib

import ml_dtypes
import numpy as np

from glm_dcp_jax.config import ModelConfig

Shapes = dict[str, tuple[int, ...]]

_SEED = 52
_BIAS = "e_score_correction_bias"
_GAINS = {"q_b_proj": 1.5, "kv_b_proj": 1.5, "lm_head": 2.0}
"""Standard deviation times the square root of the fan-in, where not 1: attention that prefers, logits that decide."""
_ROUTER_BIAS, _ROUTER_SPREAD = 7.0, 0.08
"""Published routers have a bias like this: a large offset with a small spread."""


def make_weights(model: ModelConfig, writable: np.ndarray) -> dict[str, np.ndarray]:
    """The checkpoint's tensors by Hugging Face name: bfloat16, the routers' biases float32. The same on every run.

    writable: [V] bool, which tokens the model may say. The others' logits are 0, so they hardly ever win.
    """
    tensors = {name: _draw(model, name, shape) for name, shape in _network(model).items()}
    tensors["lm_head.weight"][~writable] = 0.0
    return {
        name: tensor.astype(np.float32 if name.endswith(_BIAS) else ml_dtypes.bfloat16)
        for name, tensor in tensors.items()
    }


def _network(model: ModelConfig) -> Shapes:
    embedding = (model.vocab_size, model.hidden_size)
    shapes: Shapes = {"model.embed_tokens.weight": embedding, "lm_head.weight": embedding}
    shapes["model.norm.weight"] = (model.hidden_size,)
    for layer, (full, sparse) in enumerate(zip(model.full, model.sparse, strict=True)):
        shapes |= _layer(f"model.layers.{layer}", model, full, sparse)
    return shapes | _mtp(f"model.layers.{model.num_hidden_layers}", model)


def _layer(name: str, model: ModelConfig, full: bool, sparse: bool) -> Shapes:
    shapes: Shapes = {
        f"{name}.{norm}.weight": (model.hidden_size,)
        for norm in ("input_layernorm", "post_attention_layernorm")
    }
    shapes |= _attention(f"{name}.self_attn", model)
    if full:
        shapes |= _indexer(f"{name}.self_attn.indexer", model)
    if sparse:
        return shapes | _experts(f"{name}.mlp", model)
    return shapes | _feed_forward(f"{name}.mlp", model, model.intermediate_size)


def _mtp(name: str, model: ModelConfig) -> Shapes:
    """The layer that drafts; embedding and head are the network's."""
    shapes = _layer(name, model, full=True, sparse=True)
    for norm in ("enorm", "hnorm", "shared_head.norm"):
        shapes[f"{name}.{norm}.weight"] = (model.hidden_size,)
    shapes[f"{name}.eh_proj.weight"] = (model.hidden_size, 2 * model.hidden_size)
    return shapes


def _attention(name: str, model: ModelConfig) -> Shapes:
    hidden, heads = model.hidden_size, model.num_attention_heads
    q_rank, kv_rank = model.q_lora_rank, model.kv_lora_rank
    return {
        f"{name}.q_a_proj.weight": (q_rank, hidden),
        f"{name}.q_a_layernorm.weight": (q_rank,),
        f"{name}.q_b_proj.weight": (heads * model.qk_head_dim, q_rank),
        f"{name}.kv_a_proj_with_mqa.weight": (model.record_width, hidden),
        f"{name}.kv_a_layernorm.weight": (kv_rank,),
        f"{name}.kv_b_proj.weight": (heads * (model.qk_nope_head_dim + model.v_head_dim), kv_rank),
        f"{name}.o_proj.weight": (hidden, heads * model.v_head_dim),
    }


def _indexer(name: str, model: ModelConfig) -> Shapes:
    return {
        f"{name}.wq_b.weight": (model.index_n_heads * model.index_head_dim, model.q_lora_rank),
        f"{name}.wk.weight": (model.index_head_dim, model.hidden_size),
        f"{name}.k_norm.weight": (model.index_head_dim,),
        f"{name}.k_norm.bias": (model.index_head_dim,),
        f"{name}.weights_proj.weight": (model.index_n_heads, model.hidden_size),
    }


def _experts(name: str, model: ModelConfig) -> Shapes:
    shapes: Shapes = {
        f"{name}.gate.weight": (model.n_routed_experts, model.hidden_size),
        f"{name}.gate.{_BIAS}": (model.n_routed_experts,),
    }
    for expert in range(model.n_routed_experts):
        shapes |= _feed_forward(f"{name}.experts.{expert}", model, model.moe_intermediate_size)
    width = model.moe_intermediate_size * model.n_shared_experts
    return shapes | _feed_forward(f"{name}.shared_experts", model, width)


def _feed_forward(name: str, model: ModelConfig, width: int) -> Shapes:
    return {
        f"{name}.gate_proj.weight": (width, model.hidden_size),
        f"{name}.up_proj.weight": (width, model.hidden_size),
        f"{name}.down_proj.weight": (model.hidden_size, width),
    }


def _draw(model: ModelConfig, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor, float32, from a random stream of its own."""
    rng = np.random.default_rng([_SEED, zlib.crc32(name.encode())])
    module, kind = name.split(".")[-2:]
    if kind == _BIAS:
        return _ROUTER_BIAS + rng.uniform(-_ROUTER_SPREAD, _ROUTER_SPREAD, shape).astype(np.float32)
    if kind == "bias":
        return 0.3 * rng.standard_normal(shape, np.float32)
    if len(shape) == 1:
        return rng.uniform(0.7, 1.4, shape).astype(np.float32)
    weight = rng.standard_normal(shape, np.float32)
    if module == "embed_tokens":
        return weight
    weight *= np.float32(_GAINS.get(module, 1.0) / np.sqrt(shape[1]))
    if module == "wq_b":
        _oppose(weight.reshape(model.index_n_heads, model.index_head_dim, -1))
    return weight


def _oppose(heads: np.ndarray) -> None:
    """Turn every second index head nearly against the one before it, in place. heads: [index heads, dim, q rank].

    Of two opposite heads one always gets past the relu. Where no head does, whole groups of keys tie at a score of 0.
    """
    pairs = len(heads) // 2 * 2
    heads[1:pairs:2] = 0.2 * heads[1:pairs:2] - heads[0:pairs:2]
