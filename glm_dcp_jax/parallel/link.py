"""How fast GPUs exchange, as two numbers: what a collective costs before its first byte, and bytes per second."""

import math
from typing import NamedTuple


class Link(NamedTuple):
    """latency: seconds that a collective takes however little it moves. bandwidth: bytes/s into one device.

    source: where the numbers are from, for whoever reads what rests on them.
    """

    latency: float
    bandwidth: float
    source: str

    def seconds(self, received: float) -> float:
        """How long a collective takes that brings each device so many bytes from the others."""
        return self.latency + received / self.bandwidth


PCIE5 = Link(10e-6, 50e9, "assumed for PCIe 5 x16")
NVLINK = Link(5e-6, 400e9, "assumed for NVLink")
HOST = Link(100e-6, 5e9, "assumed for virtual devices on a CPU")

_NVLINK_KINDS = ("A100", "H100", "H200", "B200", "B300", "GB200", "GB300")
_MEMORY = {"H200": 4.8e12, "B200": 8e12, "RTX PRO 6000": 1.79e12}
_MEMORY_REACHED = 0.85
"""What kernels get of the data sheet's memory bandwidth."""


def has_nvlink(device_kind: str) -> bool:
    """Whether GPUs of this kind are linked by more than PCIe."""
    return any(name in device_kind for name in _NVLINK_KINDS)


def assumed_link(platform: str, device_kind: str) -> Link:
    """The link of a device kind that nothing was measured on."""
    if platform == "cpu":
        return HOST
    return NVLINK if has_nvlink(device_kind) else PCIE5


def memory_bandwidth(platform: str, device_kind: str) -> float:
    """Bytes/s that kernels read at: from data sheets. Infinite on CPUs, where nothing hides behind memory accesses."""
    if platform == "cpu":
        return math.inf
    known = (speed for name, speed in _MEMORY.items() if name in device_kind)
    return _MEMORY_REACHED * next(known, min(_MEMORY.values()))
