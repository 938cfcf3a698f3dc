"""GLM-5.2 as its publishers store it, without the files: which weights are quantised, and how.

Which of them a real checkpoint quantises is read off its tensors (model/stored_weights.py); these are the published
forms, for plans made before anything was downloaded.
"""

import re
from collections.abc import Hashable
from dataclasses import dataclass
from functools import cache

from glm_dcp_jax.config import ConfigError, ModelConfig
from glm_dcp_jax.config.quantisation import FP8_BLOCK
from glm_dcp_jax.kernels.weights import NVFP4_GROUP
from glm_dcp_jax.model.stored_weights import ALL_PLAIN, NVFP4, PLAIN, StoredFormat, WeightFormats
from glm_dcp_jax.plan import glm52

ONE_SCALE = (1 << 30, 1 << 30)
"""A block that holds any weight whole."""
_LAYER = "model.layers."
_EXPERTS = r"mlp\.(?:experts\.\d+|shared_experts)\.(?:gate|up|down)_proj"
_ROUTED = r"mlp\.experts\.\d+\.(?:gate|up|down)_proj"
_FP8 = (
    r"(?:self_attn\.(?:q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|o_proj|indexer\.wq_b|indexer\.wk)"
    rf"|mlp\.(?:gate|up|down)_proj|{_EXPERTS})"
)


@cache
def _pattern(names: str) -> re.Pattern[str]:
    return re.compile(rf"{names}\.weight\Z")


@dataclass(frozen=True)
class RuleFormats:
    """Weights whose names, behind `model.layers.N.`, match `names` are `stored`; all others are plain.

    below: the first layer of which none is. It makes no difference between layers before that, so that equal layers can
    be stacked.
    """

    stored: StoredFormat
    names: str
    below: int

    @property
    def quantised(self) -> bool:
        """Some always are."""
        return True

    def of(self, name: str) -> StoredFormat:
        """The format of one weight."""
        # Asked for each of tens of thousands of experts' names: hence no pattern over all of it.
        if not name.startswith(_LAYER):
            return PLAIN
        layer, _, rest = name[len(_LAYER) :].partition(".")
        return self.stored if int(layer) < self.below and _pattern(self.names).match(rest) else PLAIN

    def layer_kinds(self, layers: int) -> tuple[Hashable, ...]:
        """Layers before `below` and the others."""
        return tuple(layer < self.below for layer in range(layers))


def fp8_formats(model: ModelConfig, block: tuple[int, int] = FP8_BLOCK) -> WeightFormats:
    """Z.ai's FP8 form: all of attention but its norms, the indexer but its head weights, and every feed-forward."""
    return RuleFormats(StoredFormat("fp8", block), _FP8, model.num_hidden_layers + 1)


def nvfp4_formats(model: ModelConfig, shared: bool = True) -> WeightFormats:
    """ModelOpt's NVFP4 form: routed experts, and `shared` ones, but for the MTP layer's."""
    return RuleFormats(NVFP4, _EXPERTS if shared else _ROUTED, model.num_hidden_layers)


def split_group(model: ModelConfig) -> str | None:
    """A size of the experts' inputs that is no whole number of NVFP4's groups, in words; None where all are."""
    sizes = {"hidden_size": model.hidden_size, "moe_intermediate_size": model.moe_intermediate_size}
    odd = (f"{name} {size}" for name, size in sizes.items() if size % NVFP4_GROUP)
    return next((f"{size} is no multiple of {NVFP4_GROUP}" for size in odd), None)


@dataclass(frozen=True)
class Preset:
    """A built-in checkpoint. quantization: how the flag of this name calls it; None for one that is not quantised."""

    name: str
    quantization: str | None
    model: ModelConfig
    weights: WeightFormats


_FORMS = {None: "glm-5.2-bf16", "fp8": "glm-5.2-fp8", "modelopt": "glm-5.2-nvfp4"}
PRESETS = ("glm-5.2", *_FORMS.values())
"""What --model takes besides a directory; the first is the plain form, or the one that --quantization names."""


def preset(name: str, quantization: str | None = None) -> Preset:
    """The built-in checkpoint of a name, such as "glm-5.2-fp8". quantization: of the flag, for "glm-5.2".

    Raises ConfigError for a form that there is not, and for one that contradicts the name.
    """
    method = "modelopt" if quantization == "modelopt_fp4" else quantization
    if method not in _FORMS:
        raise ConfigError(
            f"quantization {quantization} has no built-in form of {PRESETS[0]}; use fp8 or modelopt, or --model with "
            "the directory of a checkpoint (its config.json and files of weights)"
        )
    full = _FORMS[method] if name == PRESETS[0] else name
    form = next(form for form, called in _FORMS.items() if called == full)
    if method not in (None, form):
        raise ConfigError(
            f"quantization {quantization} contradicts the model {name}; leave it out, or use {_FORMS[method]}"
        )
    model = glm52.glm52()
    made = {None: ALL_PLAIN, "fp8": fp8_formats(model), "modelopt": nvfp4_formats(model)}
    return Preset(full, form, model, made[form])
