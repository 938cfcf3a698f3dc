"""The device mesh: axes ("replica", "dcp"); tensor parallelism runs over both together."""

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, Int

from glm_dcp_jax.config import ConfigError, ParallelConfig

REPLICA, DCP = "replica", "dcp"
TENSOR_AXES = (REPLICA, DCP)
"""The axes that heads, feed-forward widths and the vocabulary are split over."""


def rank() -> Int[Array, ""]:
    """This device's number among all tensor-parallel ranks; inside `shard_map`."""
    return jax.lax.axis_index(TENSOR_AXES)


def make_mesh(parallel: ParallelConfig, devices: list[jax.Device] | None = None) -> Mesh:
    """The first tensor_parallel_size devices as [replicas, dcp]: neighbouring devices form a DCP group.

    Of several processes each gives as many. Raises ConfigError if there are not enough devices.
    """
    need = parallel.tensor_parallel_size
    devices = _of_all_processes(need) if devices is None else devices
    if len(devices) < need:
        raise ConfigError(
            f"tensor_parallel_size {need} needs {need} devices, but {jax.default_backend()} has {len(devices)}"
        )
    grid = np.array(devices[:need]).reshape(parallel.replicas, parallel.decode_context_parallel_size)
    return Mesh(grid, TENSOR_AXES)


def _of_all_processes(need: int) -> list[jax.Device]:
    """An equal share of `need` devices from each process, in the order of processes; fewer where there are fewer."""
    share = need // jax.process_count()
    return [
        device
        for process in range(jax.process_count())
        for device in jax.local_devices(process_index=process)[:share]
    ]
