"""A stated model of the links between GPUs: what a collective puts on one GPU's link, and how long that takes.

A link is two numbers (`parallel.link.Link`), a latency that every collective takes and a bandwidth, and no more:
neither the algorithm (ring, tree, one-shot) nor who else is sending. Every figure that comes of it is modelled.

Bytes that each of n GPUs sends, and receives, are those of the best algorithm, as nccl-tests counts "bus bandwidth"
(doc/PERFORMANCE.md there), of one GPU's operand or result:

    all-gather          (n - 1) / n of the result
    reduce-scatter      (n - 1) / n of the operand
    all-reduce      2 * (n - 1) / n of the operand: a reduce-scatter, then an all-gather
    all-to-all          (n - 1) / n of the operand
    collective-permute  the operand
"""

from dataclasses import dataclass, field

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.parallel.link import NVLINK, PCIE5, Link, assumed_link
from glm_dcp_jax.plan.schedule import Collective

LINKS = {"pcie5": PCIE5, "nvlink": NVLINK}
_SLOWEST, _FASTEST, _LONGEST = 1e3, 1e15, 10.0
"""Bytes/s and seconds beyond which a figure is no link's, and what comes of it no number any more."""
_ALLOWED = f"{', '.join(LINKS)}, or BANDWIDTH,LATENCY in bytes/s and seconds, as 50e9,10e-6"


def default_link(gpu: str) -> Link:
    """The link that GPUs of this name, `Target.gpu`, have among one another."""
    return assumed_link("gpu", gpu)


def parse_link(text: str) -> Link:
    """A link by its name, or of two numbers: "50e9,10e-6" is 50 GB/s and 10 us.

    Raises ConfigError for anything else.
    """
    if text in LINKS:
        return LINKS[text]
    try:
        bandwidth, latency = (float(number) for number in text.split(","))
    except ValueError:
        raise ConfigError(f"there is no link {text!r}; use {_ALLOWED}") from None
    if not _SLOWEST <= bandwidth <= _FASTEST or not 0 <= latency <= _LONGEST:
        raise ConfigError(
            f"a link's bandwidth is from {_SLOWEST:g} to {_FASTEST:g} bytes/s and its latency from 0 to "
            f"{_LONGEST:g} s, unlike {text!r}; use {_ALLOWED}"
        )
    return Link(latency, bandwidth, "given")


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


@dataclass
class _Transfer:
    """A collective under way. sends_from: when its latency is over. left: bytes."""

    sends_from: float
    left: float


@dataclass
class Wire:
    """A link in use: at most `at_once` collectives are under way, first come first served, the others wait.

    Each takes the link's latency, and then shares its bandwidth equally with whatever else is sending. Times are in
    seconds, and never go back.
    """

    link: Link
    at_once: int = 1
    _now: float = 0.0
    _waiting: list[tuple[int, float]] = field(default_factory=list)
    _under_way: dict[int, _Transfer] = field(default_factory=dict)
    _ends: list[float | None] = field(default_factory=list)

    def start(self, at: float, nbytes: float) -> int:
        """Hand a collective to the link at a time; returns its number."""
        while self._now < at:
            self._proceed(at)
        number = len(self._ends)
        self._ends.append(None)
        self._waiting.append((number, nbytes))
        self._admit()
        return number

    def end(self, number: int) -> float:
        """When a collective is over, if no other is started before that."""
        while (end := self._ends[number]) is None:
            self._proceed(float("inf"))
        return end

    def _admit(self) -> None:
        while self._waiting and len(self._under_way) < self.at_once:
            number, nbytes = self._waiting.pop(0)
            self._under_way[number] = _Transfer(self._now + self.link.latency, nbytes)

    def _proceed(self, until: float) -> None:
        """To the next moment at which a collective begins to send or is over, but not beyond `until`."""
        sending = {number: each for number, each in self._under_way.items() if each.sends_from <= self._now}
        coming = [each.sends_from for each in self._under_way.values() if each.sends_from > self._now]
        rate = self.link.bandwidth / max(len(sending), 1)
        least = min((each.left for each in sending.values()), default=float("inf"))
        finish = self._now + least / rate
        moment = min(until, finish, *coming)
        for number, each in sending.items():
            if moment == finish and each.left == least:
                del self._under_way[number]
                self._ends[number] = moment
            else:
                each.left = max(each.left - rate * (moment - self._now), 0.0)
        self._now = moment
        self._admit()
