"""The device mesh: axes ("replica", "dcp"); tensor parallelism runs over both together."""

import jax
import numpy as np
from jax.sharding import Mesh

from glm_dcp_jax.config import ConfigError, ParallelConfig

REPLICA, DCP = "replica", "dcp"
TENSOR_AXES = (REPLICA, DCP)
"""The axes that heads, feed-forward widths and the vocabulary are split over."""


def make_mesh(parallel: ParallelConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The first tensor_parallel_size devices as [replicas, dcp]: neighbouring devices form a DCP group.

    Raises ConfigError if there are not enough devices.
    """
    devices = jax.devices() if devices is None else devices
    need = parallel.tensor_parallel_size
    if len(devices) < need:
        raise ConfigError(
            f"tensor_parallel_size {need} needs {need} devices, but {jax.default_backend()} has {len(devices)}"
        )
    grid = np.array(devices[:need]).reshape(parallel.replicas, parallel.decode_context_parallel_size)
    return Mesh(grid, TENSOR_AXES)
