"""A stated model of the links between GPUs: what a collective puts on one GPU's link, and how long that takes.

Two numbers, bandwidth and latency, and no more: neither the algorithm (ring, tree, one-shot) nor who else is sending.
Every figure that comes of it is modelled, and only as good as the two.

Bytes that each of n GPUs sends are those of the best algorithm, as nccl-tests counts "bus bandwidth"
(doc/PERFORMANCE.md there), of one GPU's operand or result:

    all-gather          (n - 1) / n of the result
    reduce-scatter      (n - 1) / n of the operand
    all-reduce      2 * (n - 1) / n of the operand: a reduce-scatter, then an all-gather
    all-to-all          (n - 1) / n of the operand
    collective-permute  the operand
"""

from dataclasses import dataclass

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.plan.schedule import Collective


@dataclass(frozen=True)
class Link:
    """What one GPU sends over. bandwidth: bytes/s in one direction. latency: seconds that any collective takes."""

    name: str
    bandwidth: float
    latency: float

    def wire_seconds(self, collective: Collective) -> float:
        """How long a collective occupies the link, its latency left out."""
        return wire_bytes(collective) / self.bandwidth

    def seconds(self, collective: Collective) -> float:
        """How long a collective takes if it is alone."""
        return self.latency + self.wire_seconds(collective)


PCIE5 = Link("pcie5", 50e9, 10e-6)
NVLINK = Link("nvlink", 400e9, 5e-6)
LINKS = {link.name: link for link in (PCIE5, NVLINK)}
_OF_GPU = {"H200": NVLINK, "B200": NVLINK, "RTX-PRO-6000": PCIE5}


def default_link(gpu: str) -> Link:
    """The link of a GPU that `plan.target` knows, by the target's name for it. Raises ConfigError for any other."""
    if gpu not in _OF_GPU:
        raise ConfigError(f"no link is known for {gpu}; say which with --link: {_ALLOWED}")
    return _OF_GPU[gpu]


_ALLOWED = f"{', '.join(LINKS)}, or BANDWIDTH,LATENCY in bytes/s and seconds, as 50e9,10e-6"


def parse_link(text: str) -> Link:
    """A link by its name, or of two numbers: "50e9,10e-6" is 50 GB/s and 10 us. Raises ConfigError for anything else."""
    if text in LINKS:
        return LINKS[text]
    try:
        bandwidth, latency = (float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"there is no link {text!r}; use {_ALLOWED}") from None
    if not 0 < bandwidth < float("inf") or not 0 <= latency < float("inf"):
        raise ConfigError(f"a link's bandwidth is above 0 and its latency at least 0, unlike {text!r}; use {_ALLOWED}")
    return Link(text, bandwidth, latency)


def wire_bytes(collective: Collective) -> float:
    """Bytes that each GPU of the group sends: see the formulas above.

    Raises ValueError for a collective whose group's size is not in the program's text, and for kinds that have no
    formula.
    """
    kind, ranks = collective.kind, collective.ranks
    if kind == "collective-permute":
        return float(collective.operand_bytes)
    if ranks < 1:
        raise ValueError(f"{collective.name} does not say how many GPUs take part, so its bytes are unknown")
    others = (ranks - 1) / ranks
    if kind == "all-gather":
        return others * collective.result_bytes
    if kind in ("reduce-scatter", "all-to-all", "ragged-all-to-all"):
        return others * collective.operand_bytes
    if kind == "all-reduce":
        return 2 * others * collective.operand_bytes
    raise ValueError(f"the link model has no formula for {kind} ({collective.name})")
