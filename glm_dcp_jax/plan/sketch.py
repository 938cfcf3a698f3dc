"""An engine on GPUs that need neither be here nor be compiled for: what arithmetic says of it."""

import re
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np
from jax.sharding import Mesh

from glm_dcp_jax.config import EngineConfig, SpeculativeConfig
from glm_dcp_jax.engine.blueprint import Blueprint
from glm_dcp_jax.parallel.mesh import TENSOR_AXES
from glm_dcp_jax.plan.gpus import Target
from glm_dcp_jax.plan.planned_model import PlannedModel
from glm_dcp_jax.plan.weights import Leaf, leaves


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


def all_leaves(blueprint: Blueprint, has_mtp: bool) -> tuple[Leaf, ...]:
    """The parameters' arrays on one GPU, the MTP layer's among them where there are any, whether or not it drafts."""
    config = blueprint.config
    if has_mtp and config.speculative is None:
        config = replace(config, speculative=SpeculativeConfig(1))
    whole = replace(blueprint, config=config)
    sizes = dict(zip(TENSOR_AXES, blueprint.mesh.devices.shape, strict=True))
    return leaves(whole.shape, sizes)
