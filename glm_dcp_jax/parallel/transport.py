"""How records travel between GPUs: `ce`, by their copy engines, or `direct`, by kernels on their multiprocessors.

The choice decides which collectives an exchange is made of (parallel/exchange.py) and which options XLA compiles a step
with. It is strict: what was asked for is what runs, or the engine does not start.
"""

import ctypes
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.parallel.exchange import Transport
from glm_dcp_jax.parallel.link import has_nvlink

_HIDE = {
    "xla_gpu_enable_latency_hiding_scheduler": True,
    # Combined, the Full layer's exchange would wait for the Shared layers', and these would hide behind nothing.
    "xla_gpu_all_gather_combine_threshold_bytes": 0,
}
_COPY_ENGINES = {"xla_gpu_use_memcpy_local_p2p": True}


class Choice(NamedTuple):
    """What an engine uses, and why, for its log."""

    transport: Transport
    reason: str


def choose_transport(wanted: str, devices: Sequence[jax.Device]) -> Choice:
    """`direct` or `ce` for exchanges between these devices. wanted: auto, ce or direct.

    Raises ConfigError if `ce` is asked for and cannot be had: on CPUs, between hosts, or where a GPU cannot address
    another's memory.
    """
    if wanted == "direct":
        return Choice("direct", "asked for")
    obstacle = _obstacle(devices)
    if wanted == "ce":
        if obstacle:
            raise ConfigError(f"--dcp-transport ce cannot be had: {obstacle}; use direct or auto")
        return Choice("ce", "asked for")
    if obstacle:
        return Choice("direct", obstacle)
    kind = devices[0].device_kind
    if has_nvlink(kind):
        return Choice("direct", f"{kind} has NVLink: kernels start a transfer sooner than copy engines")
    return Choice("ce", f"{kind} exchanges over PCIe: copy engines leave its multiprocessors to the step")


def compiler_options(transport: Transport, devices: Sequence[jax.Device]) -> dict[str, Any]:
    """XLA's options for a step on these devices; none on CPUs. Names are those of jax 0.10 to 0.12."""
    if devices[0].platform == "cpu":
        return {}
    return _HIDE | _COPY_ENGINES if transport == "ce" else dict(_HIDE)


def _obstacle(devices: Sequence[jax.Device]) -> str | None:
    """Why copy engines cannot carry an exchange between these devices; None if they can."""
    if devices[0].platform == "cpu":
        return "copy engines belong to GPUs, and this mesh is made of CPU devices"
    if len({device.process_index for device in devices}) > 1:
        return "copy engines reach the GPUs of one host only, and this mesh spans several processes"
    if devices[0] not in jax.local_devices():
        return None  # compiling for GPUs that are not here: nothing to ask
    return _without_peer_access([device.local_hardware_id for device in devices])


def _without_peer_access(ordinals: Sequence[int | None]) -> str | None:
    """The first pair of GPUs that cannot address each other's memory, in words; None if all can."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return "the CUDA driver's library, which knows which GPUs can address one another, was not found"
    cuda.cuInit(0)
    for one, other in itertools.permutations(ordinals, 2):
        can = ctypes.c_int(0)
        status = cuda.cuDeviceCanAccessPeer(
            ctypes.byref(can), ctypes.c_int(one or 0), ctypes.c_int(other or 0)
        )
        if status != 0 or not can.value:
            return f"GPU {one} cannot address the memory of GPU {other}"
    return None
