"""The model's configuration, built once from a Hugging Face config.json and validated here.

Field names are config.json's own, so that a reader finds them in both places. `head_dim` is deliberately not read: in
GLM-5.2 it equals qk_nope_head_dim and is not the rotary dimension.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from glm_dcp_jax.config.cache_scheme import cache_scheme, says_something
from glm_dcp_jax.config.engine import FLOAT_DTYPES, one_of
from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.fields import MOST, Fields
from glm_dcp_jax.config.json_file import read_json_object
from glm_dcp_jax.config.quantisation import Quantisation
from glm_dcp_jax.config.schedule import Run, full_layers, runs_of, sparse_layers, stages_of

MODEL_TYPE = "glm_moe_dsa"
LATENT_NORM_EPS = 1e-6
"""eps of q_a_layernorm and kv_a_layernorm. transformers uses 1e-6; vLLM and SGLang use rms_norm_eps."""
INDEX_NORM_EPS = 1e-6
MOST_LAYERS = MOST_EXPERTS = 10_000
"""Far above any model: a larger number is a mistake, and would take memory before anything else notices."""

_SIZES = (
    "vocab_size hidden_size num_hidden_layers num_attention_heads q_lora_rank kv_lora_rank qk_nope_head_dim "
    "qk_rope_head_dim v_head_dim index_topk index_n_heads index_head_dim"
).split()
_FIXED = {
    "hidden_act": "silu",
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "attention_bias": False,
    "mlp_bias": False,
}


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and rules of one `glm_moe_dsa` network: fields as in config.json; `full`, `sparse`, `runs` derived."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_topk: int
    index_n_heads: int
    index_head_dim: int
    intermediate_size: int
    moe_intermediate_size: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    n_group: int
    topk_group: int
    norm_topk_prob: bool
    routed_scaling_factor: float
    rope_theta: float
    rope_interleave: bool
    indexer_rope_interleave: bool
    rms_norm_eps: float
    latent_norm_eps: float
    max_position_embeddings: int
    num_nextn_predict_layers: int
    index_share_for_mtp_iteration: bool
    tie_word_embeddings: bool
    dtype: str
    cache_scheme: str | None
    quantisation: Quantisation | None
    eos_token_ids: tuple[int, ...]
    full: tuple[bool, ...]
    sparse: tuple[bool, ...]
    runs: tuple[Run, ...]

    @property
    def stages(self) -> tuple[Run, ...]:
        """The runs as executed: scans of several groups, and single groups."""
        return stages_of(self.runs)

    def stored_as(self, kinds: Sequence[Hashable]) -> "ModelConfig":
        """The same, with runs of layers that are stored alike. kinds: what each layer's weights are stored as."""
        return replace(self, runs=runs_of(self.full, self.sparse, kinds))

    @property
    def qk_head_dim(self) -> int:
        """Width of one query head: the part without RoPE, then the roped part."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def record_width(self) -> int:
        """Elements of one CKV record: the latent, then the roped key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def num_full_layers(self) -> int:
        """Layers with an indexer, hence with an index-key cache."""
        return sum(self.full)

    @staticmethod
    def from_hf(config: Mapping[str, Any], latent_norm_eps: float = LATENT_NORM_EPS) -> "ModelConfig":
        """Read an HF config dict. Null counts as absent. Raises ConfigError that names the field."""
        fields = Fields(config)
        _refuse_unknown(fields)
        most = {"num_hidden_layers": MOST_LAYERS}
        sizes: dict[str, Any] = {name: fields.integer(name, most=most.get(name, MOST)) for name in _SIZES}
        _require_equal_heads(fields, sizes["num_attention_heads"])
        layers = sizes["num_hidden_layers"]
        dtype = fields.text("dtype", fields.text("torch_dtype", "bfloat16"))
        one_of("config.json's dtype", dtype, FLOAT_DTYPES)
        full, sparse = full_layers(fields, layers), sparse_layers(fields, layers)
        made = ModelConfig(
            **sizes,
            **_feed_forward(fields, sparse),
            **_rope(fields, sizes["qk_rope_head_dim"]),
            rms_norm_eps=fields.number("rms_norm_eps", 1e-5),
            latent_norm_eps=latent_norm_eps,
            max_position_embeddings=fields.integer("max_position_embeddings", 1048576),
            num_nextn_predict_layers=fields.integer("num_nextn_predict_layers", 0, least=0),
            index_share_for_mtp_iteration=fields.switch("index_share_for_mtp_iteration", False),
            tie_word_embeddings=fields.switch("tie_word_embeddings", False),
            dtype=dtype,
            cache_scheme=cache_scheme(fields.section("quantization_config")),
            quantisation=Quantisation.of(fields.section("quantization_config")),
            eos_token_ids=fields.integers("eos_token_id"),
            full=full,
            sparse=sparse,
            runs=runs_of(full, sparse),
        )
        if made.index_head_dim < made.qk_rope_head_dim:
            raise ConfigError(
                f"index_head_dim {made.index_head_dim} is smaller than qk_rope_head_dim {made.qk_rope_head_dim}: "
                "the indexer rotates its first qk_rope_head_dim dimensions"
            )
        return made

    @staticmethod
    def load(
        directory: Path,
        overrides: Mapping[str, Any] | None = None,
        latent_norm_eps: float = LATENT_NORM_EPS,
    ) -> "ModelConfig":
        """Read `directory/config.json`, with `overrides` on top.

        generation_config.json's eos ids win over config.json's. hf_quant_config.json is where ModelOpt says how weights
        and cache are quantised; it counts where config.json has no quantization_config.
        """
        config = read_json_object(directory / "config.json")
        quantised = directory / "hf_quant_config.json"
        if quantised.exists() and not says_something(config.get("quantization_config") or {}):
            said = read_json_object(quantised)
            # Some files say it without the object around it.
            section = said.get(
                "quantization", {key: value for key, value in said.items() if key != "producer"}
            )
            if not isinstance(section, Mapping | None):
                raise ConfigError(f"{quantised}: quantization must be an object, but is {section!r}")
            config["quantization_config"] = section
        generation = directory / "generation_config.json"
        if generation.exists():
            eos = read_json_object(generation).get("eos_token_id")
            config["eos_token_id"] = config.get("eos_token_id") if eos is None else eos
        return ModelConfig.from_hf({**config, **(overrides or {})}, latent_norm_eps)


def _refuse_unknown(fields: Fields) -> None:
    kind = fields.get("model_type")
    if kind != MODEL_TYPE:
        raise ConfigError(
            f"model_type {kind!r} is not supported; this engine serves {MODEL_TYPE!r} (GLM-5, 5.1, 5.2, 5.3)"
        )
    for field, only in _FIXED.items():
        if fields.get(field, only) != only:
            raise ConfigError(f"{field} {fields[field]!r} is not supported; only {only!r} is")


def _require_equal_heads(fields: Fields, heads: int) -> None:
    kv_heads = fields.integer("num_key_value_heads", heads)
    if kv_heads != heads:
        raise ConfigError(
            f"num_key_value_heads {kv_heads} differs from num_attention_heads {heads}; MLA needs them equal"
        )


def _feed_forward(fields: Fields, sparse: tuple[bool, ...]) -> dict[str, Any]:
    names = {"moe_intermediate_size": MOST, "n_routed_experts": MOST_EXPERTS, "num_experts_per_tok": MOST}
    found: dict[str, Any] = {
        name: fields.integer(name, most=most) if any(sparse) else 0 for name, most in names.items()
    }
    found["intermediate_size"] = 0 if all(sparse) else fields.integer("intermediate_size")
    found |= {
        "n_shared_experts": fields.integer("n_shared_experts", 1, least=0),
        "n_group": fields.integer("n_group", 1),
        "topk_group": fields.integer("topk_group", 1),
        "norm_topk_prob": fields.switch("norm_topk_prob", True),
        "routed_scaling_factor": fields.number("routed_scaling_factor", 2.5),
    }
    if any(sparse):
        _check_router(found)
    return found


def _check_router(found: Mapping[str, Any]) -> None:
    experts, groups, kept = found["n_routed_experts"], found["n_group"], found["topk_group"]
    chosen = found["num_experts_per_tok"]
    if experts % groups:
        raise ConfigError(f"n_group {groups} must divide n_routed_experts {experts}")
    if kept > groups:
        raise ConfigError(f"topk_group {kept} must lie between 1 and n_group {groups}")
    if groups > 1 and experts // groups < 2:
        raise ConfigError("a router group needs at least 2 experts: its score is the sum of its two best")
    if chosen > kept * (experts // groups):
        raise ConfigError(
            f"num_experts_per_tok {chosen} exceeds the {kept * (experts // groups)} experts of {kept} kept groups"
        )


def _rope(fields: Fields, rope_dim: int) -> dict[str, Any]:
    sections = [Fields(fields.section(name)) for name in ("rope_parameters", "rope_scaling")]
    for section in sections:
        kind = section.get("rope_type", section.get("type", "default"))
        if kind != "default":
            raise ConfigError(f"rope_type {kind!r} is not supported; {MODEL_TYPE} uses 'default'")
    if rope_dim % 2:
        raise ConfigError(f"qk_rope_head_dim {rope_dim} must be even")
    places = [section for section in (*sections, fields) if "rope_theta" in section]
    if not places:
        raise ConfigError(
            "config.json lacks rope_theta (rope_parameters.rope_theta, or rope_theta in older files)"
        )
    return {
        "rope_theta": places[0].number("rope_theta"),
        "rope_interleave": fields.switch("rope_interleave", True),
        "indexer_rope_interleave": fields.switch("indexer_rope_interleave", True),
    }
