"""What a checkpoint's quantisation section says of its weights.

Only the method's name and the size of FP8 blocks are taken from it: which weights are quantised, and how, is read off
the tensors (model/stored_weights.py), since lists of excluded modules are known to name modules that do not exist.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from glm_dcp_jax.config.cache_scheme import is_only_about_the_cache, says_something
from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.fields import MOST

FP8_BLOCK = (128, 128)
METHODS = ("fp8", "modelopt", "compressed-tensors")
"""Values of quant_method."""
_ALIASES = {"modelopt_fp4": "modelopt", "modelopt_fp8": "modelopt"}
_KINDS = {
    "fp8": ("fp8",),
    "modelopt": ("fp8", "nvfp4"),
    "compressed-tensors": ("fp8", "nvfp4"),
    "modelopt_fp4": ("nvfp4",),
    "modelopt_fp8": ("fp8",),
}
"""For each name that --quantization takes, what weights are stored as that it may mean (StoredFormat.kind)."""
QUANTIZATIONS = tuple(_KINDS)
_SAID = {"plain": "BF16, F16 or F32", "fp8": "FP8", "nvfp4": "NVFP4"}


@dataclass(frozen=True)
class Quantisation:
    """method: one of METHODS. block: rows and columns of a weight that share an fp8 scale."""

    method: str
    block: tuple[int, int] = FP8_BLOCK

    @staticmethod
    def of(section: Mapping[str, Any]) -> "Quantisation | None":
        """Read a quantisation section; None where it says nothing of weights. Raises ConfigError for other methods."""
        if not says_something(section) or is_only_about_the_cache(section):
            return None
        given = section.get("quant_method") or _by_producer(section)
        method = _ALIASES.get(given, given) if isinstance(given, str) else given
        if method not in METHODS:
            raise ConfigError(
                f"the checkpoint is quantised by method {given!r}; weights of {', '.join(METHODS)} can be loaded"
            )
        return Quantisation(method, _block(section))

    @staticmethod
    def check(asked: str | None, found: "Quantisation | None", kinds: Collection[str] | None = None) -> None:
        """Raise ConfigError unless the checkpoint is quantised by the method that was asked for, if one was.

        found: what its section says. kinds: what its weights are stored as, which counts where both speak; None where
        there are no files to tell.
        """
        if asked is None:
            return
        if kinds is not None and set(kinds) <= {"plain"} or kinds is None and found is None:
            said = "" if found is None else f", though config.json says {found.method}"
            raise ConfigError(
                f"quantization {asked} was asked for, but the checkpoint is not quantised{said}: weights are used as "
                "they are stored, never quantised on the way; use a quantised checkpoint, or leave it out"
            )
        if found is not None and _ALIASES.get(asked, asked) != found.method:
            raise ConfigError(
                f"quantization {asked} was asked for, but the checkpoint's method is {found.method}; leave it out, "
                "since how weights are stored is read off the checkpoint"
            )
        if kinds is not None and not set(kinds) & set(_KINDS[asked]):
            raise ConfigError(
                f"quantization {asked} was asked for, but the weights are stored as {in_words(kinds)}; "
                "leave it out, since how weights are stored is read off the checkpoint"
            )


def in_words(kinds: Collection[str]) -> str:
    """What weights are stored as."""
    return " and ".join(_SAID[kind] for kind in sorted(kinds))


def _by_producer(section: Mapping[str, Any]) -> str:
    """ModelOpt's hf_quant_config.json names no method, but an algorithm."""
    return "modelopt" if section.get("quant_algo") else "unknown"


def _block(section: Mapping[str, Any]) -> tuple[int, int]:
    """FP8_BLOCK unless fp8's weight_block_size says another, or block_structure in compressed-tensors' groups."""
    given = {"weight_block_size": section.get("weight_block_size")}
    groups = section.get("config_groups")
    for name, group in groups.items() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        if isinstance(weights, Mapping):
            given[f"block_structure of config_groups' {name}"] = weights.get("block_structure")
    blocks: dict[tuple[int, int], str] = {}
    for field, block in given.items():
        if block is None:
            continue
        if not (
            isinstance(block, list | tuple)
            and len(block) == 2
            and all(type(n) is int and 0 < n <= MOST for n in block)
        ):
            raise ConfigError(f"{field} must be two positive integers of at most {MOST}, but is {block!r}")
        blocks.setdefault((block[0], block[1]), field)
    if len(blocks) > 1:
        said = " and ".join(f"{field} is {list(block)}" for block, field in blocks.items())
        raise ConfigError(f"{said}, but FP8 weights in blocks of one size only can be loaded")
    return next(iter(blocks), FP8_BLOCK)
