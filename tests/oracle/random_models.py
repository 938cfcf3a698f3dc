"""Small random checkpoints of the glm_moe_dsa family, the same on every run, and prompts safe to compare on.

`CONFIGS` names one Hugging Face config per trait that no golden shows. `make_model` gives a named config and
its tensors, `write_checkpoint` lays them out as a Hugging Face directory, and `pick_prompts` searches for
prompts whose every decision (keys, experts, next token) has more room than float32 noise can cross.
"""

import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import numpy as np
from numpy_reference import Config, Forward, NumpyReference, Tensors, full_layers, sparse_layers
from safetensors.numpy import save_file

INDEX_MARGIN, EXPERT_MARGIN, LOGIT_MARGIN = 5e-5, 4e-5, 5e-3
MAX_ATTEMPTS = 200

BASE_CONFIG: Config = {
    "architectures": ["GlmMoeDsaForCausalLM"],
    "model_type": "glm_moe_dsa",
    "dtype": "bfloat16",
    "vocab_size": 256,
    "hidden_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 16,  # misleading, as in the published files: nothing may read it
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "intermediate_size": 96,
    "first_k_dense_replace": 2,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 16,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "index_topk": 8,
    "index_n_heads": 4,
    "index_head_dim": 16,
    "indexer_rope_interleave": True,
    "rope_interleave": True,
    "rope_parameters": {"rope_theta": 8000000.0, "rope_type": "default"},
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": False,
    "eos_token_id": None,
    "pad_token_id": None,
    "num_nextn_predict_layers": 1,
    "index_share_for_mtp_iteration": True,
}


def _config(**fields: object) -> Config:
    return BASE_CONFIG | fields


def _kinds(letters: str) -> list[str]:
    kinds = {"F": "full", "S": "shared", "D": "dense", "M": "sparse"}
    return [kinds[letter] for letter in letters]


CONFIGS: dict[str, Config] = {
    # sizes that are no powers of two and divide nothing
    "odd_sizes": _config(
        vocab_size=509,
        hidden_size=120,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=44,
        kv_lora_rank=36,
        qk_nope_head_dim=20,
        v_head_dim=18,
        index_head_dim=40,
        index_n_heads=6,
        index_topk=11,
        index_topk_freq=2,
        index_skip_topk_offset=2,
        intermediate_size=101,
        moe_intermediate_size=15,
        n_routed_experts=7,
        num_experts_per_tok=3,
    ),
    # every choice value is negative: a group masked with 0 instead of -inf would win
    "expert_groups": _config(
        n_routed_experts=12,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        moe_intermediate_size=12,
        index_topk_freq=3,
        index_skip_topk_offset=2,
    ),
    # lists only: share groups of 2, 3, 1 and 4 layers, and a dense layer in the middle of one
    "explicit_lists": _config(
        num_hidden_layers=10,
        indexer_types=_kinds("FSFSSFFSSS"),
        mlp_layer_types=_kinds("DMMDMMMMMM"),
        n_routed_experts=6,
        moe_intermediate_size=12,
    ),
    "pattern_string": _config(index_topk_pattern="FFSSFS", index_topk_freq=None),
    # GLM-5: no schedule field at all, every layer is full
    "all_full": _config(num_hidden_layers=4, index_topk=12),
    # a full layer with no shared layer behind it ends the network
    "lone_full_end": _config(num_hidden_layers=8, index_topk_freq=3, index_skip_topk_offset=2),
    # no tensor parallel size but 5 divides the heads
    "five_heads": _config(
        num_attention_heads=5, num_key_value_heads=5, index_topk_freq=4, index_skip_topk_offset=3
    ),
    "two_shared_experts": _config(
        n_shared_experts=2,
        norm_topk_prob=False,
        routed_scaling_factor=1.0,
        index_topk_freq=2,
        index_skip_topk_offset=1,
    ),
    # no mlp_layer_types: first_k_dense_replace decides
    "one_dense": _config(first_k_dense_replace=1, index_topk_freq=4, index_skip_topk_offset=3, index_topk=16),
    # [F dense] [F S S] x 4: equal share groups in a row, which a scan may run over
    "equal_groups": _config(
        num_hidden_layers=13,
        first_k_dense_replace=1,
        index_topk_freq=3,
        index_skip_topk_offset=2,
        n_routed_experts=6,
        moe_intermediate_size=12,
        routed_scaling_factor=1.0,  # 13 layers at 2.5 would amplify float32 noise to the hidden states' tolerance
    ),
    "single_layer": _config(num_hidden_layers=1, first_k_dense_replace=0),
    # DeepSeek-V3.2's pairs in the indexer, interleaved ones in the attention; transformers ignores the flag
    "half_split_indexer": _config(
        num_hidden_layers=4, indexer_rope_interleave=False, index_topk_freq=2, index_skip_topk_offset=2
    ),
}

ROUTER_BIAS = {"expert_groups": -3.0}  # where the published offset (about 7) is not wanted

_GAINS = {  # standard deviation times sqrt(fan-in), by module; 1 where absent
    "q_a_proj": 0.1,  # small latents and index keys, so that the eps of their norms is seen
    "wk": 0.1,
    "q_b_proj": 1.5,
    "kv_b_proj": 1.5,
    "lm_head": 2.0,
}


def _mlp_shapes(name: str, hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    shapes = {f"{name}.{part}_proj.weight": (width, hidden) for part in ("gate", "up")}
    return shapes | {f"{name}.down_proj.weight": (hidden, width)}


def _layer_shapes(config: Config, i: int, full: bool, sparse: bool) -> dict[str, tuple[int, ...]]:
    hidden, heads, width = (
        config["hidden_size"],
        config["num_attention_heads"],
        config["moe_intermediate_size"],
    )
    q_rank, kv_rank = config["q_lora_rank"], config["kv_lora_rank"]
    nope, rope, value = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
    name, attention = f"model.layers.{i}", f"model.layers.{i}.self_attn"
    shapes: dict[str, tuple[int, ...]] = {
        f"{name}.input_layernorm.weight": (hidden,),
        f"{name}.post_attention_layernorm.weight": (hidden,),
        f"{attention}.q_a_proj.weight": (q_rank, hidden),
        f"{attention}.q_a_layernorm.weight": (q_rank,),
        f"{attention}.q_b_proj.weight": (heads * (nope + rope), q_rank),
        f"{attention}.kv_a_proj_with_mqa.weight": (kv_rank + rope, hidden),
        f"{attention}.kv_a_layernorm.weight": (kv_rank,),
        f"{attention}.kv_b_proj.weight": (heads * (nope + value), kv_rank),
        f"{attention}.o_proj.weight": (hidden, heads * value),
    }
    if full:
        index_heads, dim = config["index_n_heads"], config["index_head_dim"]
        shapes |= {
            f"{attention}.indexer.wq_b.weight": (index_heads * dim, q_rank),
            f"{attention}.indexer.wk.weight": (dim, hidden),
            f"{attention}.indexer.k_norm.weight": (dim,),
            f"{attention}.indexer.k_norm.bias": (dim,),
            f"{attention}.indexer.weights_proj.weight": (index_heads, hidden),
        }
    if not sparse:
        return shapes | _mlp_shapes(f"{name}.mlp", hidden, config["intermediate_size"])
    shapes |= {
        f"{name}.mlp.gate.weight": (config["n_routed_experts"], hidden),
        f"{name}.mlp.gate.e_score_correction_bias": (config["n_routed_experts"],),
    }
    for expert in range(config["n_routed_experts"]):
        shapes |= _mlp_shapes(f"{name}.mlp.experts.{expert}", hidden, width)
    return shapes | _mlp_shapes(f"{name}.mlp.shared_experts", hidden, width * config["n_shared_experts"])


def tensor_shapes(config: Config, mtp: bool = False) -> dict[str, tuple[int, ...]]:
    """Hugging Face name -> shape of every tensor; with `mtp` also layer num_hidden_layers, the MTP layer."""
    hidden, last = config["hidden_size"], config["num_hidden_layers"]
    full, sparse = full_layers(config), sparse_layers(config)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], hidden)}
    for i in range(last):
        shapes |= _layer_shapes(config, i, i in full, i in sparse)
    if mtp:
        shapes |= _layer_shapes(config, last, full=True, sparse=True)
        shapes |= {f"model.layers.{last}.{norm}.weight": (hidden,) for norm in ("enorm", "hnorm")}
        shapes[f"model.layers.{last}.shared_head.norm.weight"] = (hidden,)
        shapes[f"model.layers.{last}.eh_proj.weight"] = (hidden, 2 * hidden)
    return shapes | {"model.norm.weight": (hidden,), "lm_head.weight": (config["vocab_size"], hidden)}


def _draw(
    config: Config, name: str, shape: tuple[int, ...], router_bias: float, rng: np.random.Generator
) -> np.ndarray:
    """One tensor, float64, scaled so that activations stay of order 1 and logits of order 1 to 10."""
    module, kind = name.split(".")[-2:]
    if kind == "e_score_correction_bias":
        return router_bias + rng.uniform(
            -0.08, 0.08, shape
        )  # a large offset with a small spread, as published
    if kind == "bias":
        return 0.3 * rng.standard_normal(shape)
    if len(shape) == 1:
        return rng.uniform(0.5, 1.7, shape)
    if module == "embed_tokens":
        return rng.standard_normal(shape)
    weight = rng.standard_normal(shape) * _GAINS.get(module, 1.0) / np.sqrt(shape[1])
    if module == "kv_a_proj_with_mqa":
        weight[: config["kv_lora_rank"]] *= 0.1
        weight[config["kv_lora_rank"] :] *= 1.5
    if module == "wq_b":
        # Opposite pairs: of two opposite heads one is always past the relu, so no index score is exactly 0,
        # where whole groups of keys would tie.
        heads = weight.reshape(config["index_n_heads"], -1)
        heads[1::2] = 0.2 * heads[1::2] - heads[0 : len(heads) // 2 * 2 : 2]
    return weight


def make_tensors(config: Config, seed: int = 0, mtp: bool = False, router_bias: float = 7.0) -> Tensors:
    """Random weights by Hugging Face name: bfloat16, the router bias float32.

    Each tensor has its own random stream, so asking for MTP tensors does not change the others.
    """
    tensors = {}
    for name, shape in tensor_shapes(config, mtp).items():
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        dtype = np.float32 if name.endswith("e_score_correction_bias") else ml_dtypes.bfloat16
        tensors[name] = _draw(config, name, shape, router_bias, rng).astype(dtype)
    return tensors


def make_model(name: str, seed: int = 0, mtp: bool = False) -> tuple[Config, Tensors]:
    """The named config of `CONFIGS` and its tensors."""
    return CONFIGS[name], make_tensors(CONFIGS[name], seed, mtp, ROUTER_BIAS.get(name, 7.0))


def write_checkpoint(directory: str | Path, config: Config, tensors: Tensors, shards: int = 1) -> Path:
    """Writes a Hugging Face directory: config.json and one safetensors file, or `shards` and their index."""
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    names = list(tensors)
    files = ["model.safetensors"]
    if shards > 1:
        files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    weight_map = {name: files[i * shards // len(names)] for i, name in enumerate(names)}
    for file in files:
        part = {name: tensors[name] for name in names if weight_map[name] == file}
        save_file(part, directory / file, metadata={"format": "pt"})
    if shards > 1:
        total = sum(tensor.nbytes for tensor in tensors.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return directory


@dataclass(frozen=True)
class Prompt:
    """ids: the prompt. continuation: its greedy tokens. forward: of ids + continuation[:-1], in float32."""

    ids: list[int]
    continuation: list[int]
    forward: Forward


def _try_prompt(reference: NumpyReference, ids: list[int], greedy_tokens: int) -> Prompt | None:
    """The prompt with its continuation, or None as soon as a decision is too close."""
    tokens = list(ids)
    for _ in range(greedy_tokens):
        forward = reference(tokens)
        if forward.index_margin.min() < INDEX_MARGIN or forward.expert_margin.min() < EXPERT_MARGIN:
            return None
        if forward.logit_margin[-1] < LOGIT_MARGIN:
            return None
        tokens.append(int(forward.logits[-1].argmax()))
    return Prompt(ids, tokens[len(ids) :], forward)


def pick_prompts(
    config: Config, tensors: Tensors, lengths: Sequence[int], greedy_tokens: int = 8, seed: int = 0
) -> list[Prompt]:
    """One random prompt of each length whose decisions all have room, also along the greedy continuation.

    greedy_tokens: the length of the continuation, at least 1. Room is `INDEX_MARGIN`, `EXPERT_MARGIN` and, for
    the tokens produced, `LOGIT_MARGIN`. Raises RuntimeError when `MAX_ATTEMPTS` prompts of a length had none.
    """
    reference, prompts = NumpyReference(config, tensors), []
    for length in lengths:
        for attempt in range(MAX_ATTEMPTS):
            rng = np.random.default_rng([seed, length, attempt])
            ids = rng.integers(config["vocab_size"], size=length).tolist()
            if (prompt := _try_prompt(reference, ids, greedy_tokens)) is not None:
                prompts.append(prompt)
                break
        else:
            raise RuntimeError(
                f"no prompt of length {length} with room in {MAX_ATTEMPTS} attempts; use shorter ones"
            )
    return prompts
