"""The model that a plan is made for: built in, or a checkpoint's directory, of which only descriptions are read."""

from dataclasses import dataclass, replace
from pathlib import Path

from glm_dcp_jax.config import ConfigError, EngineConfig, ModelConfig
from glm_dcp_jax.config.quantisation import Quantisation, in_words
from glm_dcp_jax.engine.runner import stored_weights
from glm_dcp_jax.model.converted import ConvertedCheckpoint, open_checkpoint
from glm_dcp_jax.model.locate import ModelNotFound, locate_model
from glm_dcp_jax.model.manifest import MANIFEST
from glm_dcp_jax.model.safetensors_reader import INDEX_NAME, CheckpointError
from glm_dcp_jax.model.stored_weights import PLAIN, WeightFormats
from glm_dcp_jax.plan.assumed import assumed_formats
from glm_dcp_jax.plan.presets import PRESETS, RuleFormats, preset

_WEIGHTS = (MANIFEST, INDEX_NAME, "*.safetensors", "*.bin", "*.pt", "*.pth")
"""With any of these in it, a directory is opened as the engine does, which says what is wrong with it."""


@dataclass(frozen=True)
class PlannedModel:
    """name: as it was asked for. note: what its formats rest on. form: of a built-in model, else None.

    has_mtp: whether there is an MTP layer's weights, whether or not it drafts.
    """

    name: str
    config: ModelConfig
    weights: WeightFormats
    note: str
    form: str | None = None
    has_mtp: bool = True


def planned_model(config: EngineConfig) -> PlannedModel:
    """What `--model` names: a built-in one, else the directory of a checkpoint, of which no weight is read.

    Raises ConfigError if it is neither, and for files that cannot be read or contradict each other or the flags.
    """
    if config.model.lower() in PRESETS:
        return _built_in(config)
    try:
        directory = locate_model(config.model)
        overrides = dict(config.hf_overrides)
        model = ModelConfig.load(directory, overrides, config.latent_norm_eps)
        return _stored(config, model, directory)
    except ModelNotFound as error:
        raise ConfigError(f"{error}; built in are {', '.join(PRESETS)}") from error
    except (CheckpointError, OSError) as error:
        raise ConfigError(str(error)) from error


def _built_in(config: EngineConfig) -> PlannedModel:
    if config.hf_overrides:
        raise ConfigError(
            "hf_overrides is for a checkpoint's config.json, which a built-in model has not; leave it out, or use "
            "--model with a directory that holds a config.json"
        )
    found = preset(config.model.lower(), config.quantization)
    stored = "bfloat16" if found.quantization is None else f"quantised as {found.quantization}"
    return PlannedModel(found.name, found.model, found.weights, f"built in: {stored}", found.name)


def _stored(config: EngineConfig, model: ModelConfig, directory: Path) -> PlannedModel:
    has_mtp = model.num_nextn_predict_layers == 1 and any(model.sparse)
    if not any(any(directory.glob(pattern)) for pattern in _WEIGHTS):
        Quantisation.check(config.quantization, model.quantisation)
        weights, how = assumed_formats(model, directory, dict(config.hf_overrides))
        kinds = {weights.stored.kind} if isinstance(weights, RuleFormats) else {PLAIN.kind}
        Quantisation.check(config.quantization, model.quantisation, kinds)
        note = f"there are no files of weights beside config.json: assumed {how}"
        return PlannedModel(config.model, model, weights, note, has_mtp=has_mtp)
    # As the engine takes them, but for sums, for which all weights would be read.
    stored = stored_weights(open_checkpoint(directory), model, replace(config, verify_checksums=False))
    if isinstance(stored, ConvertedCheckpoint):
        has_mtp = has_mtp and stored.manifest.mtp_layer == model.num_hidden_layers
        return PlannedModel(
            config.model, model, stored, f"{in_words(stored.kinds)}, as its {MANIFEST} says", has_mtp=has_mtp
        )
    prefix = f"model.layers.{model.num_hidden_layers}."
    has_mtp = has_mtp and any(tensor.startswith(prefix) for tensor in stored.names())
    return PlannedModel(
        config.model,
        model,
        stored,
        f"{in_words(stored.kinds)}, as the headers of its files say",
        has_mtp=has_mtp,
    )
