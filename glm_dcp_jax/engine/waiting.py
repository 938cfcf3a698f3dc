"""The line of sequences that wait for their turn, and who may join it."""

import bisect
from collections.abc import Callable, Collection, Iterator
from numbers import Integral

from glm_dcp_jax.config import ConfigError, SchedulerConfig
from glm_dcp_jax.config.flags import option_of
from glm_dcp_jax.engine.sampling_params import ParameterError
from glm_dcp_jax.engine.sequence import Request, Sequence

Rank = Callable[[Sequence], tuple[int, int]]
"""What decides who is first: the smaller."""


def rank_of(policy: str) -> Rank:
    """By arrival (`fcfs`), or by the request's priority and then its arrival (`priority`)."""
    if policy == "fcfs":
        return lambda sequence: (0, sequence.arrival)
    if policy == "priority":
        return lambda sequence: (sequence.priority, sequence.arrival)
    raise ConfigError(f"scheduling_policy {policy!r} is unknown; use one of fcfs, priority")


def check_priority(priority: object, policy: str) -> None:
    """Raise ParameterError for what is no priority, and for one that this scheduling policy would not look at."""
    if isinstance(priority, bool) or not isinstance(priority, Integral):
        raise ParameterError("priority", f"priority must be an integer, but is {priority!r}")
    if priority and policy != "priority":
        raise ParameterError(
            "priority",
            f"Priority scheduling is not enabled, so priority must be 0, but is {priority}; leave it out, or start "
            "the engine with --scheduling-policy priority",
        )


class QueueFull(Exception):
    """More waits than may; a later try can succeed. limit: the setting that says how much may wait."""

    def __init__(self, limit: str, message: str) -> None:
        super().__init__(message)
        self.limit = limit


def require_room(config: SchedulerConfig, waiting: Collection[Request], prompt_tokens: int) -> None:
    """Raise QueueFull if one more request, with a prompt of so many tokens, is more than may wait.

    waiting: the requests that do. Where there is none, any request may: a long one could never run otherwise.
    """
    held = sum(len(request.prompt_token_ids) for request in waiting)
    checks = (
        ("max_num_queued_reqs", config.max_num_queued_reqs, "requests", len(waiting), 1),
        ("max_num_queued_tokens", config.max_num_queued_tokens, "prompt tokens", held, prompt_tokens),
    )
    for name, most, what, wait, more in checks:
        if waiting and most is not None and wait + more > most:
            raise QueueFull(
                name,
                f"the queue is full: {wait} {what} wait, this request adds {more}, and {option_of(name)} allows "
                f"{most}; try again later",
            )


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
