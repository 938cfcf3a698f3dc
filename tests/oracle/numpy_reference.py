"""An independent numpy forward pass of the glm_moe_dsa family: the oracle of the tests.

Written from the model's published formulas, not from this project's network, and as plainly as possible:
the whole sequence goes in at once, heads are expanded (no absorbed projections), nothing is cached. It
reads a Hugging Face `config.json` as a dict and tensors under their Hugging Face names, so it runs on
foreign checkpoints too.

Beside the outputs it returns the *margins* of every decision (which keys, which experts, which token), so
that tests can pick prompts on which float32 noise cannot change a choice.

Letters in the docstrings: S tokens, L layers, H hidden size, V vocabulary, K index_topk, k experts a token.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy, without which safetensors cannot return bf16 arrays
import numpy as np
from safetensors import safe_open

Config = dict
Tensors = dict[str, np.ndarray]

INDEX_KEY_NORM_EPS = 1e-6  # a LayerNorm's own eps, not rms_norm_eps
WEIGHT_SUM_EPS = 1e-20  # keeps the renormalisation finite when all chosen sigmoids underflow


@dataclass(frozen=True)
class Forward:
    """What one pass over a sequence gives; the array layouts are those of the golden files.

    logits: [S, V]. hidden: [L + 1, S, H], the embeddings, then each decoder layer's output before the final
    norm. final_hidden: [S, H] after it. selections: full layer -> [S, K] int32, the chosen positions
    ascending, -1 behind them. router_ids: sparse layer -> [S, k] int32, ascending. router_weights: sparse
    layer -> [S, k], in the order of router_ids, normalised and scaled.

    Margins [S] are inf where there was nothing to decide. index_margin: the gap between the last chosen and
    the first rejected key's index score, smallest over full layers. expert_margin: likewise of the router's
    choice scores and of the expert groups' scores. logit_margin: between the two highest logits.
    """

    logits: np.ndarray
    hidden: np.ndarray
    final_hidden: np.ndarray
    selections: dict[int, np.ndarray]
    router_ids: dict[int, np.ndarray]
    router_weights: dict[int, np.ndarray]
    index_margin: np.ndarray
    expert_margin: np.ndarray
    logit_margin: np.ndarray


def load_checkpoint(directory: str | Path) -> tuple[Config, Tensors]:
    """Reads config.json and every *.safetensors file of a Hugging Face directory."""
    directory = Path(directory)
    tensors: Tensors = {}
    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, framework="numpy") as file:
            tensors.update({name: file.get_tensor(name) for name in file.keys()})
    return json.loads((directory / "config.json").read_text()), tensors


def setting(config: Config, name: str, default: object = None) -> object:
    """A config field; absent and null both mean the default."""
    value = config.get(name)
    return default if value is None else value


def full_layers(config: Config) -> list[int]:
    """Layers with an indexer: indexer_types, else index_topk_pattern, else freq and offset (default: all)."""
    layers = range(config["num_hidden_layers"])
    types = setting(config, "indexer_types", setting(config, "index_topk_pattern"))
    if types is not None:
        return [i for i in layers if types[i] in ("full", "F")]
    frequency = max(setting(config, "index_topk_freq", 1), 1)
    offset = setting(config, "index_skip_topk_offset", 2)
    return [i for i in layers if max(i - offset + 1, 0) % frequency == 0]


def sparse_layers(config: Config) -> list[int]:
    """Layers with routed experts: mlp_layer_types, else all from first_k_dense_replace on."""
    layers = range(config["num_hidden_layers"])
    types = setting(config, "mlp_layer_types")
    if types is not None:
        return [i for i in layers if types[i] == "sparse"]
    return [i for i in layers if i >= setting(config, "first_k_dense_replace", 3)]


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    """x [..., N] scaled to unit root mean square, times weight [N]."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + x.dtype.type(eps)) * weight


def layer_norm(x: np.ndarray, weight: np.ndarray, bias: np.ndarray, eps: float) -> np.ndarray:
    """x [..., N] centred, scaled to unit variance, times weight [N], plus bias [N]."""
    centred = x - np.mean(x, axis=-1, keepdims=True)
    variance = np.mean(centred * centred, axis=-1, keepdims=True)
    return centred / np.sqrt(variance + x.dtype.type(eps)) * weight + bias


def sigmoid(x: np.ndarray) -> np.ndarray:
    """1 / (1 + exp(-x)) without overflow for very negative x."""
    decay = np.exp(-np.abs(x))
    return np.where(x >= 0, 1, decay) / (1 + decay)


def silu(x: np.ndarray) -> np.ndarray:
    """x * sigmoid(x)."""
    return x * sigmoid(x)


def rotate(x: np.ndarray, theta: float, interleaved: bool) -> np.ndarray:
    """RoPE of x [S, heads, R] at positions 0 .. S-1.

    Angle i turns the pair (2i, 2i+1) when interleaved, else (i, i + R/2). Frequencies and angles are float32
    in either precision, as every implementation has them.
    """
    rope_dim = x.shape[-1]
    exponent = np.arange(0, rope_dim, 2, dtype=np.float32) / np.float32(rope_dim)
    frequency = np.float32(1) / np.float32(theta) ** exponent
    angle = (np.arange(len(x), dtype=np.float32)[:, None] * frequency).astype(x.dtype)[:, None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    half = rope_dim // 2
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = (a * cos - b * sin, b * cos + a * sin)
    return np.stack(turned, axis=-1).reshape(x.shape) if interleaved else np.concatenate(turned, axis=-1)


def choose_top(scores: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` best columns of scores [S, N], which may hold -inf for columns that may not be chosen.

    Order: score descending, then lowest column; -0.0 equals +0.0. Returns the chosen columns as a mask [S, N]
    and each row's gap between the last chosen and the first rejected score [S], inf where none was rejected.
    """
    order = np.argsort(-scores, axis=-1, kind="stable")
    ranked = np.take_along_axis(scores, order, axis=-1)
    chosen = np.zeros(scores.shape, bool)
    np.put_along_axis(chosen, order[:, :count], True, axis=-1)
    chosen &= scores > -np.inf
    gap = np.full(len(scores), np.inf)
    if count < scores.shape[1]:
        contested = ranked[:, count] > -np.inf
        gap[contested] = ranked[contested, count - 1] - ranked[contested, count]
    return chosen, gap


def columns(mask: np.ndarray, width: int) -> np.ndarray:
    """The True columns of each row of mask [S, N], ascending and padded with -1: [S, width] int32."""
    padded = np.full((len(mask), width), -1, np.int32)
    for row, line in zip(padded, mask, strict=True):
        found = np.flatnonzero(line)
        row[: len(found)] = found
    return padded


class NumpyReference:
    """The network as a function of token ids.

    config: a Hugging Face config dict. tensors: weights by Hugging Face names, any float type; extra ones are
    ignored. dtype: of all arithmetic, float32 or float64. latent_norm_eps: eps of q_a_ and kv_a_layernorm.
    """

    def __init__(
        self, config: Config, tensors: Tensors, dtype: type = np.float32, latent_norm_eps: float = 1e-6
    ) -> None:
        self.config = config
        self.dtype = np.dtype(dtype)
        self.latent_norm_eps = latent_norm_eps
        self.rms_norm_eps = config["rms_norm_eps"]
        self.full_layers = full_layers(config)
        self.sparse_layers = sparse_layers(config)
        self._weights = {name: np.asarray(tensor).astype(self.dtype) for name, tensor in tensors.items()}

    def __call__(self, token_ids: list[int] | np.ndarray) -> Forward:
        """Runs the whole sequence token_ids [S] from position 0."""
        h = self._weights["model.embed_tokens.weight"][np.asarray(token_ids)]
        hidden, selections, router_ids, router_weights = [h], {}, {}, {}
        index_margin, expert_margin = np.full(len(h), np.inf), np.full(len(h), np.inf)
        for i in range(self.config["num_hidden_layers"]):
            x = self._norm(h, f"model.layers.{i}.input_layernorm")
            query_latent = self._query_latent(i, x)
            if i in self.full_layers:
                selected, gap = self._select(i, x, query_latent)
                selections[i] = columns(selected, self.config["index_topk"])
                index_margin = np.minimum(index_margin, gap)
            h = h + self._attend(i, x, query_latent, selected)
            x = self._norm(h, f"model.layers.{i}.post_attention_layernorm")
            if i in self.sparse_layers:
                router_ids[i], router_weights[i], gap = self._route(i, x)
                expert_margin = np.minimum(expert_margin, gap)
                h = h + self._mixture(i, x, router_ids[i], router_weights[i])
            else:
                h = h + self._mlp(f"model.layers.{i}.mlp", x)
            hidden.append(h)
        final = self._norm(h, "model.norm")
        logits = self._project(final, "lm_head")
        best = np.partition(logits, -2, axis=-1)[:, -2:]
        return Forward(
            logits=logits,
            hidden=np.stack(hidden),
            final_hidden=final,
            selections=selections,
            router_ids=router_ids,
            router_weights=router_weights,
            index_margin=index_margin,
            expert_margin=expert_margin,
            logit_margin=best[:, 1] - best[:, 0],
        )

    def greedy(self, token_ids: list[int], count: int) -> list[int]:
        """The next `count` most likely tokens, each from a recomputation of the whole sequence."""
        ids = [int(token) for token in token_ids]
        for _ in range(count):
            ids.append(int(np.argmax(self(ids).logits[-1])))
        return ids[len(token_ids) :]

    def _project(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._weights[f"{name}.weight"].T

    def _norm(self, x: np.ndarray, name: str, eps: float | None = None) -> np.ndarray:
        return rms_norm(x, self._weights[f"{name}.weight"], self.rms_norm_eps if eps is None else eps)

    def _rotate(self, x: np.ndarray, interleaved: bool) -> np.ndarray:
        rope = setting(self.config, "rope_parameters", {})
        theta = rope["rope_theta"] if "rope_theta" in rope else self.config["rope_theta"]
        return rotate(x, theta, interleaved)

    def _query_latent(self, i: int, x: np.ndarray) -> np.ndarray:
        """The normed query latent [S, q_lora_rank]: both attention and indexer make their queries of it."""
        name = f"model.layers.{i}.self_attn"
        return self._norm(self._project(x, f"{name}.q_a_proj"), f"{name}.q_a_layernorm", self.latent_norm_eps)

    def _select(self, i: int, x: np.ndarray, query_latent: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A full layer's selection: mask [S, S] of the keys each query attends to, and the margin [S]."""
        name, config, tokens = f"model.layers.{i}.self_attn.indexer", self.config, len(x)
        heads, dim, rope_dim = config["index_n_heads"], config["index_head_dim"], config["qk_rope_head_dim"]
        q = self._project(query_latent, f"{name}.wq_b").reshape(tokens, heads, dim)
        norm_weight, norm_bias = self._weights[f"{name}.k_norm.weight"], self._weights[f"{name}.k_norm.bias"]
        k = layer_norm(self._project(x, f"{name}.wk"), norm_weight, norm_bias, INDEX_KEY_NORM_EPS)[:, None]
        interleaved = bool(setting(config, "indexer_rope_interleave", True))
        q, k = (
            np.concatenate([self._rotate(part[..., :rope_dim], interleaved), part[..., rope_dim:]], axis=-1)
            for part in (q, k)
        )
        head_weights = self._project(x, f"{name}.weights_proj") * self.dtype.type(heads**-0.5)
        similarity = np.maximum(np.einsum("shd,td->sht", q, k[:, 0]) * self.dtype.type(dim**-0.5), 0)
        scores = np.einsum("sh,sht->st", head_weights, similarity)
        scores[~np.tri(tokens, dtype=bool)] = -np.inf
        return choose_top(scores, config["index_topk"])

    def _attend(self, i: int, x: np.ndarray, query_latent: np.ndarray, selected: np.ndarray) -> np.ndarray:
        """Multi-head latent attention over the selected keys (mask [S, S]), through o_proj: [S, H]."""
        name, config, tokens = f"model.layers.{i}.self_attn", self.config, len(x)
        heads, rank = config["num_attention_heads"], config["kv_lora_rank"]
        nope, rope_dim, value_dim = (config[f"{part}_head_dim"] for part in ("qk_nope", "qk_rope", "v"))
        interleaved = bool(setting(config, "rope_interleave", True))
        q = self._project(query_latent, f"{name}.q_b_proj").reshape(tokens, heads, nope + rope_dim)
        record = self._project(x, f"{name}.kv_a_proj_with_mqa")
        latent = self._norm(record[:, :rank], f"{name}.kv_a_layernorm", self.latent_norm_eps)
        key_rope = self._rotate(record[:, None, rank:], interleaved)[:, 0]
        kv = self._project(latent, f"{name}.kv_b_proj").reshape(tokens, heads, nope + value_dim)
        scores = np.einsum("shd,thd->hst", q[..., :nope], kv[..., :nope])
        scores += np.einsum("shd,td->hst", self._rotate(q[..., nope:], interleaved), key_rope)
        scores *= self.dtype.type((nope + rope_dim) ** -0.5)
        scores[:, ~selected] = -np.inf
        probabilities = np.exp(scores - scores.max(axis=-1, keepdims=True))
        probabilities /= probabilities.sum(axis=-1, keepdims=True)
        out = np.einsum("hst,thd->shd", probabilities, kv[..., nope:])
        return self._project(out.reshape(tokens, heads * value_dim), f"{name}.o_proj")

    def _mlp(self, name: str, x: np.ndarray) -> np.ndarray:
        gated = silu(self._project(x, f"{name}.gate_proj")) * self._project(x, f"{name}.up_proj")
        return self._project(gated, f"{name}.down_proj")

    def _route(self, i: int, x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Experts [S, k] ascending, weights [S, k], margin [S]. The bias only decides who is chosen."""
        name, config, tokens = f"model.layers.{i}.mlp.gate", self.config, len(x)
        groups, kept = setting(config, "n_group", 1), setting(config, "topk_group", 1)
        score = sigmoid(self._project(x, name))
        choice = score + self._weights[f"{name}.e_score_correction_bias"]
        group_gap = np.full(tokens, np.inf)
        if groups > 1:
            grouped = choice.reshape(tokens, groups, -1)
            group_score = np.sort(grouped, axis=-1)[..., -2:].sum(axis=-1)
            allowed, group_gap = choose_top(group_score, kept)
            choice = np.where(allowed[..., None], grouped, -np.inf).reshape(choice.shape)
        chosen, gap = choose_top(choice, config["num_experts_per_tok"])
        ids = columns(chosen, config["num_experts_per_tok"])
        weights = np.take_along_axis(score, ids, axis=-1)
        if setting(config, "norm_topk_prob", True):
            weights = weights / (weights.sum(axis=-1, keepdims=True) + self.dtype.type(WEIGHT_SUM_EPS))
        scale = self.dtype.type(setting(config, "routed_scaling_factor", 2.5))
        return ids, weights * scale, np.minimum(gap, group_gap)

    def _mixture(
        self, i: int, x: np.ndarray, router_ids: np.ndarray, router_weights: np.ndarray
    ) -> np.ndarray:
        """The weighted routed experts plus the shared one (as wide as all shared ones together): [S, H]."""
        name = f"model.layers.{i}.mlp"
        out = np.zeros_like(x)
        if setting(self.config, "n_shared_experts", 1):
            out += self._mlp(f"{name}.shared_experts", x)
        for expert in np.unique(router_ids):
            rows, slots = np.nonzero(router_ids == expert)
            out[rows] += router_weights[rows, slots, None] * self._mlp(f"{name}.experts.{expert}", x[rows])
        return out
