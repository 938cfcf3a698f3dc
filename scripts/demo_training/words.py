"""Words of the built-in model's world, and which of them it never sees in training."""

import random
import zlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

Choice = TypeVar("Choice")

BEGINNINGS = "Mi Ta Ro Le Ka Be No Sa Da Lu Pe Vi Jo El Ar Fi Ge Ha Om Ri".split()
ENDINGS = "ra lo na mi ko da vin len ris to sha bel go wen ta zo ley dan mon ka".split()

NAMES = tuple(beginning + ending for beginning in BEGINNINGS for ending in ENDINGS)
ITEMS = tuple(
    "apples pears plums lemons cherries nuts eggs cakes pens books cards coins stamps shells stones beads buttons keys "
    "cups plates spoons bottles balls ribbons".split()
)
CITIES = tuple("Paris Rome Oslo Tokyo Cairo Lima Delhi Madrid Athens Vienna".split())

_HELD_OUT_NAMES = 0.2
_HELD_OUT_SUMS = 0.1


class Sum(NamedTuple):
    """`a sign b = result`; all numbers are from 1 to 99."""

    a: int
    sign: str
    b: int
    result: int

    def __str__(self) -> str:
        return f"{self.a} {self.sign} {self.b} = {self.result}"


def name_is_held_out(name: str) -> bool:
    """Whether a name is in no text of the training."""
    return _share(f"name {name}") < _HELD_OUT_NAMES


def sum_is_held_out(a: int, sign: str, b: int) -> bool:
    """Whether `a + b` (in either order) or `a - b` is in no text of the training."""
    if sign == "+":
        a, b = sorted((a, b))
    return _share(f"{a} {sign} {b}") < _HELD_OUT_SUMS


@dataclass(frozen=True)
class World:
    """Where texts draw words from. held_out: only names and sums that the training never sees, or none of these."""

    rng: random.Random
    held_out: bool = False

    def names(self, count: int) -> list[str]:
        """Different names."""
        return self.rng.sample(_NAMES[self.held_out], count)

    def items(self, count: int) -> list[str]:
        """Different things that can be counted."""
        return self.rng.sample(ITEMS, count)

    def numbers(self, count: int) -> list[int]:
        """Different numbers of two digits."""
        return self.rng.sample(range(10, 100), count)

    def one(self, among: Sequence[Choice]) -> Choice:
        """Any of these."""
        return self.rng.choice(among)

    def sums(self, steps: int) -> list[Sum]:
        """A chain: each sum starts with the result of the one before."""
        while True:
            chain = [self.one(_SUMS[self.held_out])]
            while len(chain) < steps and (following := _SUMS_FROM[self.held_out].get(chain[-1].result)):
                chain.append(self.one(following))
            if len(chain) == steps:
                return chain


def _share(text: str) -> float:
    """A number in [0, 1) that a text always gets."""
    return zlib.crc32(text.encode()) / 2**32


def _all_sums() -> list[Sum]:
    return [Sum(a, "+", b, a + b) for a in range(1, 99) for b in range(1, 100 - a)] + [
        Sum(a, "-", b, a - b) for a in range(2, 100) for b in range(1, a)
    ]


_NAMES = {held: [name for name in NAMES if name_is_held_out(name) == held] for held in (False, True)}
_SUMS = {held: [one for one in _all_sums() if sum_is_held_out(*one[:3]) == held] for held in (False, True)}
_SUMS_FROM: dict[bool, dict[int, list[Sum]]] = {False: defaultdict(list), True: defaultdict(list)}
for _held, _those in _SUMS.items():
    for _one in _those:
        _SUMS_FROM[_held][_one.a].append(_one)
