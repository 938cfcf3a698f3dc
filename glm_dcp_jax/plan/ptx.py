"""What a kernel's PTX says: how wide it touches memory, whether it uses tensor cores, what it keeps in local memory.

All counts are of instructions in the text, not of executions. PTX has unlimited registers: whether a kernel spills,
only ptxas knows (ptxas.py).
"""

import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

VECTOR_BYTES = 16
"""The width of a global access that moves as much as one thread can on all three targets."""

_ENTRY = re.compile(r"^\.visible \.entry ([\w$.]+)\(", re.MULTILINE)
_GLOBAL = re.compile(r"\b(ld|st)\.global((?:[.:]+\w+)*)")
_VECTOR, _ELEMENT = re.compile(r"\.v(\d)\b"), re.compile(r"\.[busf](\d+)\b")
_ASYNC_COPY = re.compile(r"\bcp\.async\.c[ag]\.shared\.global[\w.:]*\s+\[[^\]]+\],\s*\[[^\]]+\],\s*(\w+)")
_TENSOR_CORE = re.compile(r"\b(wgmma\.mma_async|tcgen05\.mma|mma)\.[a-z]")
_DEPOT = re.compile(r"\.local \.align \d+ \.b8\s+\w+\[(\d+)\]")
_LOCAL = re.compile(r"\b(?:ld|st)\.local\b")


class Launch(NamedTuple):
    """How a kernel is started: blocks, threads of a block, and the dynamic shared memory of a block in bytes."""

    grid: tuple[int, int, int]
    threads: int
    shared_memory_bytes: int


@dataclass(frozen=True)
class PtxKernel:
    """One kernel: a Pallas-Triton kernel by the name its pallas_call was given, or an XLA fusion.

    name: the entry's. XLA turns dots of instruction names into `_`, and gives a second, different kernel of a name the
    suffix `__1`. text: the PTX module it is in, which ptxas can assemble. launch: None if XLA did not say.
    """

    name: str
    text: str
    launch: Launch | None = None

    @cached_property
    def body(self) -> str:
        """The entry's own instructions."""
        start = next(found.start() for found in _ENTRY.finditer(self.text) if found[1] == self.name)
        following = _ENTRY.search(self.text, start + 1)
        return self.text[start : following.start() if following else None]

    @property
    def architecture(self) -> str:
        """What it was compiled for, as in sm_90a."""
        found = re.search(r"^\.target (\w+)", self.text, re.MULTILINE)
        assert found, f"the PTX of {self.name} names no target"
        return found[1]

    @cached_property
    def global_loads(self) -> Counter[int]:
        """Load instructions from global memory by the bytes that one moves per thread; asynchronous copies included."""
        loads = self._global("ld")
        loads.update(int(size, 0) for size in _ASYNC_COPY.findall(self.body))
        return loads

    @cached_property
    def global_stores(self) -> Counter[int]:
        """Store instructions to global memory by the bytes that one moves per thread."""
        return self._global("st")

    def _global(self, direction: str) -> Counter[int]:
        return Counter(
            int(vector[1] if (vector := _VECTOR.search(form)) else 1) * int(element[1]) // 8
            for found, form in _GLOBAL.findall(self.body)
            if found == direction and (element := _ELEMENT.search(form))
        )

    @property
    def vector_loads(self) -> int:
        """Loads from global memory of 16 bytes or more."""
        return sum(count for width, count in self.global_loads.items() if width >= VECTOR_BYTES)

    @property
    def vector_stores(self) -> int:
        """Stores to global memory of 16 bytes or more."""
        return sum(count for width, count in self.global_stores.items() if width >= VECTOR_BYTES)

    @cached_property
    def tensor_core_instructions(self) -> Counter[str]:
        """Matrix products by instruction: mma (any GPU), wgmma (sm_90a), tcgen05 (sm_100)."""
        return Counter(found.split(".")[0] for found in _TENSOR_CORE.findall(self.body))

    @property
    def local_memory_bytes(self) -> int:
        """Arrays per thread that the code indexes and that therefore cannot be registers."""
        return sum(map(int, _DEPOT.findall(self.body)))

    @property
    def local_accesses(self) -> int:
        """Loads from and stores to these arrays. 0 does not mean that nothing spills: see KernelResources."""
        return len(_LOCAL.findall(self.body))


def kernels_of(texts: Iterable[str], launches: dict[str, Launch]) -> dict[str, PtxKernel]:
    """The kernels of PTX modules, sorted by name: XLA compiles them in parallel and numbers them as they come."""
    found = {entry[1]: text for text in texts for entry in _ENTRY.finditer(text)}
    return {name: PtxKernel(name, found[name], launches.get(name)) for name in sorted(found)}


def launches_of(thunks: str) -> dict[str, Launch]:
    """How each kernel is started, by name, from the text of XLA's thunk sequence."""
    pattern = r"kCustomKernel .*\] (\S+) grid: \[(.*?)\] threads: \[(.*?)\]\s+shared_memory: (\d+) bytes"
    launches = {}
    for name, grid, threads, shared in re.findall(pattern, thunks):
        x, y, z = map(int, grid.split(","))
        tx, ty, tz = map(int, threads.split(","))
        launches[name] = Launch((x, y, z), tx * ty * tz, int(shared))
    return launches
