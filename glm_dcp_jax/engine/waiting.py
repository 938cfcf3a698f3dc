"""The line of sequences that wait for their turn."""

import bisect
from collections.abc import Callable, Iterator

from glm_dcp_jax.config import ConfigError
from glm_dcp_jax.engine.sequence import Sequence

Rank = Callable[[Sequence], tuple[int, int]]
"""What decides who is first: the smaller."""


def rank_of(policy: str) -> Rank:
    """By arrival (`fcfs`), or by the request's priority and then its arrival (`priority`)."""
    if policy == "fcfs":
        return lambda sequence: (0, sequence.arrival)
    if policy == "priority":
        return lambda sequence: (sequence.priority, sequence.arrival)
    raise ConfigError(f"scheduling_policy {policy!r} is unknown; use one of fcfs, priority")


class Line:
    """Sequences in the order of their rank, which never changes: who lost its pages stands where it stood."""

    def __init__(self, rank: Rank) -> None:
        self._rank = rank
        self._sequences: list[Sequence] = []

    def __len__(self) -> int:
        return len(self._sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._sequences)

    def __contains__(self, sequence: Sequence) -> bool:
        at = bisect.bisect_left(self._sequences, self._rank(sequence), key=self._rank)
        return at < len(self._sequences) and self._sequences[at] is sequence

    def __getitem__(self, at: int) -> Sequence:
        return self._sequences[at]

    def add(self, sequence: Sequence) -> None:
        """Put a sequence in its place. Ranks are unique, since no two sequences arrive as the same number."""
        bisect.insort(self._sequences, sequence, key=self._rank)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out. Raises ValueError if it is not there."""
        if sequence not in self:
            raise ValueError("the sequence is not in this line")
        del self._sequences[bisect.bisect_left(self._sequences, self._rank(sequence), key=self._rank)]
