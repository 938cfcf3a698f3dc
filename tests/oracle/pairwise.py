"""Few combinations of many settings, such that every pair of two settings' values occurs together."""

import itertools
from collections.abc import Mapping, Sequence

Case = dict[str, object]


def pairs_of(case: Mapping[str, object]) -> set[tuple]:
    """All pairs of (setting, value) in one case."""
    return set(itertools.combinations(sorted(case.items()), 2))


def pairwise(factors: Mapping[str, Sequence[object]]) -> list[Case]:
    """A short list of cases that covers every pair; greedy and deterministic."""
    cases = [dict(zip(factors, values, strict=True)) for values in itertools.product(*factors.values())]
    pairs = [pairs_of(case) for case in cases]
    missing = set().union(*pairs)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda at: len(pairs[at] & missing))
        chosen.append(cases[best])
        missing -= pairs[best]
    return chosen
