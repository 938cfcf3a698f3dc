"""What the processes of one mesh agree on before they serve. With one process, everything here is at once agreed.

All processes must call these functions in the same order: each is a collective over the mesh's devices.
"""

import logging

import jax
import numpy as np
from jax.experimental import multihost_utils

from glm_dcp_jax.config import ConfigError, ProcessConfig

_log = logging.getLogger(__name__)
_START_SECONDS = 300
"""How long a process waits for the others to come up."""


def start(config: ProcessConfig) -> None:
    """Join the other processes; before jax's backend starts. A process that has joined already stays as it is.

    Raises ConfigError if they do not all come, or jax has started alone.
    """
    if config.num_processes == 1:
        return
    if jax.distributed.is_initialized():
        if (jax.process_count(), jax.process_index()) != (config.num_processes, config.process_id):
            raise ConfigError(
                f"this process is {jax.process_index()} of {jax.process_count()} already; --process-id "
                f"{config.process_id} of --num-processes {config.num_processes} needs a process of its own"
            )
        return
    _log.info(
        "process %d of %d, coordinator %s",
        config.process_id,
        config.num_processes,
        config.coordinator_address,
    )
    try:
        jax.distributed.initialize(
            config.coordinator_address,
            config.num_processes,
            config.process_id,
            initialization_timeout=_START_SECONDS,
        )
    except RuntimeError as error:
        raise ConfigError(
            f"the {config.num_processes} processes did not come together at --coordinator-address "
            f"{config.coordinator_address} within {_START_SECONDS} s, or jax had started before: {error}"
        ) from error


def least(value: int) -> int:
    """The smallest of all processes' values; below 2**31."""
    return value if jax.process_count() == 1 else int(_of_all(np.array(value, np.int32)).min())


def of_first(values: np.ndarray) -> np.ndarray:
    """Process 0's values; of one shape and dtype everywhere, of at most 32 bits each."""
    return values if jax.process_count() == 1 else np.asarray(multihost_utils.broadcast_one_to_all(values))


def differs(digest: bytes) -> list[int]:
    """The processes whose digest is not process 0's; all digests are of one length."""
    if jax.process_count() == 1:
        return []
    digests = _of_all(np.frombuffer(digest, np.uint8).astype(np.int32))
    return np.flatnonzero((digests != digests[0]).any(axis=1)).tolist()


def wait_for_all(name: str) -> None:
    """Return when every process has come to this point. name: of the point, for messages."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)


def _of_all(value: np.ndarray) -> np.ndarray:
    """[processes, ...]"""
    return np.asarray(multihost_utils.process_allgather(value)).reshape(-1, *value.shape)
