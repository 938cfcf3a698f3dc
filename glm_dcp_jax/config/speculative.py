"""Speculative decoding: what drafts tokens, and how many of them, in vLLM's words."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from glm_dcp_jax.config.errors import ConfigError

if TYPE_CHECKING:
    from glm_dcp_jax.config.model import ModelConfig

METHODS = ("mtp", "deepseek_mtp")
"""Two names for one method: vLLM's general one, and what it calls the MTP layers of this family."""
MOST_DRAFTS = 7
"""With the token before them, drafts make a block of at most 8 rows a request, which decode paths are made for."""


@dataclass(frozen=True)
class SpeculativeConfig:
    """num_speculative_tokens: drafts per request and step, by the checkpoint's MTP layer."""

    num_speculative_tokens: int
    method: str = METHODS[0]

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"speculative_config: method {self.method!r} is unknown; use one of {', '.join(METHODS)}"
            )
        count = self.num_speculative_tokens
        if type(count) is not int or not 1 <= count <= MOST_DRAFTS:
            raise ConfigError(
                "speculative_config: num_speculative_tokens must be an integer from 1 to "
                f"{MOST_DRAFTS}, but is {count!r}"
            )

    @staticmethod
    def from_object(given: Mapping[str, Any]) -> "SpeculativeConfig":
        """From a flag's JSON object. Raises ConfigError for keys that are missing or unknown, and for their values."""
        known = [field.name for field in fields(SpeculativeConfig)]
        unknown = [key for key in given if key not in known]
        if unknown:
            raise ConfigError(f"speculative_config has no key {unknown[0]!r}; it takes {' and '.join(known)}")
        if "num_speculative_tokens" not in given:
            raise ConfigError(
                f"speculative_config lacks num_speculative_tokens; give an integer from 1 to {MOST_DRAFTS}"
            )
        return SpeculativeConfig(**given)

    def check_model(self, model: "ModelConfig") -> None:
        """Raise ConfigError for a model whose MTP layers cannot draft."""
        layers = model.num_nextn_predict_layers
        if layers != 1:
            raise ConfigError(
                "speculative decoding drafts with exactly one MTP layer, but config.json says "
                f"num_nextn_predict_layers {layers}; leave --speculative-config out"
            )
        if not any(model.sparse):
            raise ConfigError(
                "speculative decoding needs an MTP layer with experts, but the model has no layer with experts; leave "
                "--speculative-config out"
            )
