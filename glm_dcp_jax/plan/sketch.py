"""An engine on GPUs that need neither be here nor be compiled for: what arithmetic says of it."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh

from glm_dcp_jax.config import ConfigError, EngineConfig, SpeculativeConfig
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.model.converted import ConvertedCheckpoint
from glm_dcp_jax.model.load import check_tensors, leaves_on
from glm_dcp_jax.model.restore import check_parts
from glm_dcp_jax.model.safetensors_reader import CheckpointError
from glm_dcp_jax.model.stored_weights import StoredWeights, WeightFormats
from glm_dcp_jax.parallel.mesh import TENSOR_AXES
from glm_dcp_jax.plan.gpus import Target
from glm_dcp_jax.plan.planned_model import PlannedModel
from glm_dcp_jax.plan.weights import Leaf
from glm_dcp_jax.plan.weights import leaves as shares


@dataclass(frozen=True)
class SketchedGpu:
    """As much of a jax device as an engine asks of it before it has one."""

    id: int
    device_kind: str
    platform: str = "gpu"
    process_index: int = 0


def sketch(config: EngineConfig, planned: PlannedModel, target: Target) -> Blueprint:
    """The engine as shapes, without the CUDA compiler. Raises ConfigError for flags that do not fit the model."""
    parallel = config.parallel
    found = re.search(r'device_description_str: "([^"]*)"', target.description)
    kind = found[1] if found else target.gpu
    gpus = np.empty(parallel.tensor_parallel_size, object)
    gpus[:] = [SketchedGpu(number, kind) for number in range(parallel.tensor_parallel_size)]
    grid = gpus.reshape(parallel.replicas, parallel.decode_context_parallel_size)
    mesh = Mesh(cast(np.ndarray[Any, np.dtype[Any]], grid), TENSOR_AXES)
    return Blueprint(config, planned.config, mesh, weights=planned.weights)


def check_weights(blueprint: Blueprint) -> None:
    """Raise ConfigError for weights that the engine would refuse before it reads them, with what it would say."""
    weights = blueprint.weights
    if not isinstance(weights, StoredWeights | ConvertedCheckpoint):
        return
    shape, leaves = blueprint.shape, leaves_on(blueprint.mesh, blueprint.shape)
    try:
        if isinstance(weights, StoredWeights):
            check_tensors(weights, blueprint.model, shape, leaves)
        else:
            check_parts(weights, shape, leaves)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error


def all_leaves(blueprint: Blueprint, has_mtp: bool) -> tuple[Leaf, ...]:
    """The parameters' arrays on one GPU; the MTP layer's too, drafting or not, unless it could not be loaded."""
    sizes = dict(zip(TENSOR_AXES, blueprint.mesh.devices.shape, strict=True))
    if not has_mtp or blueprint.config.speculative is not None:
        return shares(blueprint.shape, sizes)
    drafting = replace(blueprint.config, speculative=SpeculativeConfig(1))
    found = shares(replace(blueprint, config=drafting).shape, sizes)
    if _can_be_loaded(blueprint.weights, [leaf for leaf in found if leaf.part == "mtp"]):
        return found
    return shares(blueprint.shape, sizes)


def _can_be_loaded(weights: WeightFormats, leaves: Iterable[Leaf]) -> bool:
    """Whether a checkpoint has all of these; of one that is not there, or was converted, all is assumed."""
    if not isinstance(weights, StoredWeights):
        return True
    expected = {name: leaf.source.shape for leaf in leaves for name in leaf.tensors}
    try:
        weights.check(expected)
    except CheckpointError:
        return False
    present = set(weights.names())
    return all(name in present and weights.shape(name) == shape for name, shape in expected.items())
