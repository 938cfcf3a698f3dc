"""Few combinations of many settings, such that every pair of two settings' values occurs together."""

import itertools
import random
from collections.abc import Mapping, Sequence

Case = dict[str, object]
Factors = Mapping[str, Sequence[object]]

_TRIES = 60


def pairs_of(case: Mapping[str, object]) -> set[tuple]:
    """All pairs of (setting, value) in one case."""
    return set(itertools.combinations(sorted(case.items()), 2))


def all_pairs(factors: Factors) -> set[tuple]:
    """The pairs that a list of cases has to cover."""
    names = itertools.combinations(sorted(factors), 2)
    return {((one, a), (other, b)) for one, other in names for a in factors[one] for b in factors[other]}


def pairwise(factors: Factors) -> list[Case]:
    """A short list of cases that covers every pair; always the same. Where any value would do, it is the first.

    Each case is the best of some that are made one setting after the other, in random orders, each setting taking the
    value that covers most: to look at every combination would take too long.
    """
    rng = random.Random(0)
    missing = all_pairs(factors)
    chosen = []
    while missing:
        start = min(missing, key=repr)
        candidates = [_filled(dict(start), factors, missing, rng) for _ in range(_TRIES)]
        best = max(candidates, key=lambda case: len(pairs_of(case) & missing))
        chosen.append(best)
        missing -= pairs_of(best)
    return chosen


def _filled(case: Case, factors: Factors, missing: set[tuple], rng: random.Random) -> Case:
    """The case with values for all settings, in the factors' order."""
    open_names = [name for name in factors if name not in case]
    rng.shuffle(open_names)
    for name in open_names:

        def covers(value: object, name: str = name) -> int:
            new = {tuple(sorted([(name, value), other])) for other in case.items()}
            return len(new & missing)

        case[name] = max(factors[name], key=covers)
    return {name: case[name] for name in factors}
