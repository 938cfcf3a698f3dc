"""Parameters before training: random, but for what else takes long to emerge. Names as in network.py."""

import numpy as np

from demo_training.network import Layer, Shape

Arrays = dict[str, np.ndarray]

_CONSTANT = 0
"""The hidden dimension that is the same in every embedding, so that heads can attend by distance alone."""
_CONSTANT_VALUE, _EMBEDDING = 2.0, 0.5
_SHARPNESS = 2.2
"""Of the heads that attend to one distance."""
_PERIODS = (2, 4, 5, 10, 20, 25, 50, 100, 200)
"""In which the embeddings of numbers turn, so that numbers that are near, or end alike, resemble each other."""


def embeddings(s: Shape, numbers: dict[int, int], rng: np.random.Generator) -> Arrays:
    """Embeddings, head and last norm. numbers: value -> token."""
    table = _EMBEDDING * rng.standard_normal((s.vocabulary, s.hidden))
    angles = 2 * np.pi * np.arange(100)[:, None] / np.array(_PERIODS)
    features = np.concatenate((np.cos(angles), np.sin(angles)), axis=1)
    features = features @ np.linalg.qr(rng.standard_normal((s.hidden, features.shape[1])))[0].T
    for value, token in numbers.items():
        table[token] = 0.5 * table[token] + 2 * _EMBEDDING * features[value]
    table[:, _CONSTANT] = 0.0
    head = 0.1 * table
    table[:, _CONSTANT] = _CONSTANT_VALUE
    return _floats({"embed_tokens": table, "lm_head": head, "norm": np.ones(s.hidden)})


def layer(s: Shape, kind: Layer, rng: np.random.Generator, silent: bool = False) -> Arrays:
    """A decoder layer. silent: one that adds nothing yet."""
    name = f"layers.{kind.index}"
    arrays: Arrays = {
        f"{name}.{norm}": np.ones(s.hidden) for norm in ("input_layernorm", "post_attention_layernorm")
    }
    arrays |= _attention(s, f"{name}.self_attn", rng)
    if kind.full:
        arrays |= _indexer(s, f"{name}.self_attn.indexer", rng)
    arrays |= _feed_forward(s, f"{name}.mlp", kind.sparse, rng)
    if silent:
        for one in arrays:
            if one.endswith(("o_proj", "down_proj")):
                arrays[one] *= 0.0
    return _floats(arrays)


def drafter(s: Shape, kind: Layer, rng: np.random.Generator) -> Arrays:
    """The MTP layer, which begins as what it is given: half of it the next token, half of it the trunk's hidden."""
    name = f"layers.{kind.index}"
    arrays = layer(s, kind, rng)
    arrays |= {f"{name}.{norm}": np.ones(s.hidden) for norm in ("enorm", "hnorm", "shared_head.norm")}
    arrays[f"{name}.eh_proj"] = np.concatenate((np.eye(s.hidden), np.eye(s.hidden)), axis=1)
    return _floats(arrays)


def attend_to_distances(s: Shape, name: str, arrays: Arrays) -> None:
    """Let head n of a layer whose input is embeddings attend to the token n + 1 before. name: of its attention.

    Query and key turn with their positions; a query that starts turned back by a distance meets the key of that
    distance where it points.
    """
    q_a, q_b, kv_a = (arrays[f"{name}.{part}"] for part in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa"))
    q_a[0] = 0.0
    q_a[0, _CONSTANT] = 1.0
    kv_a[s.latent :] = 0.0
    kv_a[s.latent :: 2, _CONSTANT] = _SHARPNESS
    angles = (1 + np.arange(s.heads))[:, None] * _frequencies(s)
    heads = q_b.reshape(s.heads, s.nope + s.rope, s.q_rank)
    heads[:, : s.nope] *= 0.1
    heads[:, s.nope :] = 0.0
    heads[:, s.nope :: 2, 0] = _SHARPNESS * np.cos(angles)
    heads[:, s.nope + 1 :: 2, 0] = -_SHARPNESS * np.sin(angles)


def _frequencies(s: Shape) -> np.ndarray:
    return s.theta ** (-np.arange(0, s.rope, 2) / s.rope)


def _attention(s: Shape, name: str, rng: np.random.Generator) -> Arrays:
    return {
        f"{name}.q_a_proj": _matrix(rng, s.q_rank, s.hidden),
        f"{name}.q_a_layernorm": np.ones(s.q_rank),
        f"{name}.q_b_proj": _matrix(rng, s.heads * (s.nope + s.rope), s.q_rank),
        f"{name}.kv_a_proj_with_mqa": _matrix(rng, s.latent + s.rope, s.hidden),
        f"{name}.kv_a_layernorm": np.ones(s.latent),
        f"{name}.kv_b_proj": _matrix(rng, s.heads * (s.nope + s.value), s.latent),
        f"{name}.o_proj": 0.3 * _matrix(rng, s.hidden, s.heads * s.value),
    }


def _indexer(s: Shape, name: str, rng: np.random.Generator) -> Arrays:
    """Heads come in pairs of opposite queries: one of a pair always has a score, so that keys do not tie at 0."""
    half = _matrix(rng, s.index_heads // 2 * s.index_width, s.q_rank)
    return {
        f"{name}.wq_b": np.concatenate((half, -half)),
        f"{name}.wk": _matrix(rng, s.index_width, s.hidden),
        f"{name}.k_norm": np.ones(s.index_width),
        f"{name}.k_norm.bias": np.zeros(s.index_width),
        f"{name}.weights_proj": _matrix(rng, s.index_heads, s.hidden),
    }


def _feed_forward(s: Shape, name: str, sparse: bool, rng: np.random.Generator) -> Arrays:
    if not sparse:
        return _gated(name, s.hidden, s.dense, rng)
    experts = [_gated("", s.hidden, s.expert, rng) for _ in range(s.experts)]
    return {
        f"{name}.gate": 0.3 * _matrix(rng, s.experts, s.hidden),
        f"{name}.gate.e_score_correction_bias": np.zeros(s.experts),
        **{f"{name}.experts{part}": np.stack([one[part] for one in experts]) for part in experts[0]},
        **_gated(f"{name}.shared_experts", s.hidden, s.expert, rng),
    }


def _gated(name: str, hidden: int, width: int, rng: np.random.Generator) -> Arrays:
    return {
        f"{name}.gate_proj": _matrix(rng, width, hidden),
        f"{name}.up_proj": _matrix(rng, width, hidden),
        f"{name}.down_proj": 0.3 * _matrix(rng, hidden, width),
    }


def _matrix(rng: np.random.Generator, out: int, into: int) -> np.ndarray:
    return rng.standard_normal((out, into)) / np.sqrt(into)


def _floats(arrays: Arrays) -> Arrays:
    return {name: np.asarray(array, np.float32) for name, array in arrays.items()}
