"""Regions of one piece of host memory that is registered once and lives as long as the process."""

import bisect
import mmap
import threading
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from glm_dcp_jax.transfer.transports.interface import TransportError, check_time

ALIGNMENT = 64
_PATIENCE_SECONDS = 0.05


def aligned(size: int) -> int:
    """The smallest multiple of ALIGNMENT that is at least `size`."""
    return -(-size // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True)
class Region:
    """Bytes [start, start + size) of a slab, exclusively its holder's."""

    start: int
    size: int


class Slab:
    """`bytes`: the memory, [size] uint8. Never unmapped: a peer's late read or write must not meet foreign memory."""

    def __init__(self, size: int) -> None:
        self.bytes = np.frombuffer(mmap.mmap(-1, size), np.uint8)
        self.address: int = self.bytes.ctypes.data
        self._free = [Region(0, size)]  # by start; neighbours are always merged
        self._changed = threading.Condition()

    @property
    def used(self) -> int:
        """Bytes in regions that are taken."""
        with self._changed:
            return self.bytes.size - sum(region.size for region in self._free)

    def take(self, size: int, deadline: float, cancelled: Callable[[], bool], name: str) -> Region:
        """A region of at least `size` bytes; waits for others to be given back.

        Raises TransportError "unsupported" if the slab is too small even when empty, "timeout" and "cancelled".
        """
        size = aligned(max(size, 1))
        if size > self.bytes.size:
            raise TransportError(
                "unsupported",
                f"{name}: {size} bytes do not fit into a slab of {self.bytes.size}; raise option slab_bytes",
            )
        with self._changed:
            while True:
                for index, region in enumerate(self._free):
                    if region.size >= size:
                        rest = Region(region.start + size, region.size - size)
                        self._free[index : index + 1] = [rest] if rest.size else []
                        return Region(region.start, size)
                check_time(deadline, cancelled, f"{name}: room for {size} bytes in the slab")
                self._changed.wait(_PATIENCE_SECONDS)

    def give(self, region: Region) -> None:
        """Take a region back, once, when nothing reads or writes it any more."""
        with self._changed:
            index = bisect.bisect(self._free, region.start, key=lambda free: free.start)
            start, end = region.start, region.start + region.size
            first, last = index, index
            if index and self._free[index - 1].start + self._free[index - 1].size == start:
                first, start = index - 1, self._free[index - 1].start
            if index < len(self._free) and self._free[index].start == end:
                last, end = index + 1, end + self._free[index].size
            self._free[first:last] = [Region(start, end - start)]
            self._changed.notify_all()
