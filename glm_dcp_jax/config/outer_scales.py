"""Calibrated outer scales of nvfp4_ds_mla records: one per layer, from a JSON file that others' tools write too."""

from pathlib import Path

from glm_dcp_jax.config.errors import ConfigError
from glm_dcp_jax.config.json_file import read_json_object

FORMAT = "nvfp4_ds_mla_outer_scale_v1"
DENOMINATOR = 6.0 * 448.0
"""A layer's scale is its largest latent magnitude over this: E2M1's largest value times E4M3's."""


def load_outer_scales(path: Path, num_layers: int, latent_width: int) -> tuple[float, ...]:
    """What each layer's latents are divided by before they are quantised.

    The file: {"format": FORMAT, "num_layers", "latent_dim", "denominator": 2688, "scales": [num_layers numbers]}; other
    keys (such as max_abs) are for readers. Raises ConfigError for another format, another model's sizes, and scales
    that are not finite and positive.
    """
    if not path.is_file():
        raise ConfigError(
            f"--nvfp4-scales {path} is not a file; scripts/calibrate_nvfp4_scales.py makes one for a model"
        )
    content = read_json_object(path)
    for key, wanted, why in (
        ("format", FORMAT, "no other format is known"),
        ("denominator", DENOMINATOR, "the format divides by 6 * 448 whatever the model"),
        ("num_layers", num_layers, "as many as the model has"),
        ("latent_dim", latent_width, "the model's kv_lora_rank"),
    ):
        if content.get(key) != wanted:
            raise ConfigError(f"{path}: {key} must be {wanted!r} ({why}), but is {content.get(key)!r}")
    scales = content.get("scales")
    if not isinstance(scales, list) or len(scales) != num_layers:
        raise ConfigError(f"{path}: scales must be a list of {num_layers} numbers, one per layer")
    for layer, scale in enumerate(scales):
        if isinstance(scale, bool) or not isinstance(scale, int | float) or not _usable(scale):
            raise ConfigError(
                f"{path}: the scale of layer {layer} must be a number of 2**-126 to 2**126, but is {_short(scale)}"
            )
    return tuple(map(float, scales))


def _usable(scale: float) -> bool:
    """Whether division by it keeps a float32 what it is."""
    return 2.0**-126 <= scale <= 2.0**126


def _short(value: object) -> str:
    """A value as it is written, as far as a message needs it: integers in JSON have no end."""
    try:
        return repr(value)[:60]
    except ValueError:
        return "an integer of thousands of digits"
