"""Where a token's record lives: position -> owner, page and offset, and back.

Pure integer arithmetic. Ownership is stored nowhere, so every rank (and every host) uses the same page table,
and a transfer between two layouts needs nothing but the two `Layout`s.

With W ranks, interleave I and block size B, positions are dealt out I at a time, one rank after the other:

    position       0 1 2 3 4 5 6 7 | 8 9 ...     W = 2, I = 2, B = 4: a page is 8 tokens
    owner          0 0 1 1 0 0 1 1 | 0 0 ...     position // I % W
    local          0 1 0 1 2 3 2 3 | 4 5 ...     position // (W*I) * I + position % I
    page index     0 0 0 0 0 0 0 0 | 1 1 ...     local // B = position // (B*W), since I divides B
    offset         0 1 0 1 2 3 2 3 | 0 1 ...     local % B
"""

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from glm_dcp_jax.config import ConfigError

# Python ints, signed numpy arrays and signed jax arrays (traced too) alike: only operators touch them.
Integers: TypeAlias = Any


@dataclass(frozen=True)
class Layout:
    """How one request's records are spread over ranks and pages.

    block_size: B, records of one page on each rank. world: W, the ranks that share a sequence (the DCP size).
    interleave: I, neighbouring tokens on one rank before it is the next rank's turn; divides B.
    index_shards: S, the parts that index keys are split into; divides W, 1 being full replication.
    Raises ConfigError unless all four are positive ints, I divides B and S divides W.

    Every method takes ints or arrays of any (broadcastable) shape and returns the same kind, shape and dtype.
    A negative position, owner, local index or page means "nothing" (padding) and gives -1. As an array index
    -1 would wrap around to the last element: whoever scatters must first map it past the end.
    """

    block_size: int
    world: int = 1
    interleave: int = 1
    index_shards: int = 1

    def __post_init__(self) -> None:
        for name in ("block_size", "world", "interleave", "index_shards"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ConfigError(f"cache layout: {name} is {value!r}; it must be an int of at least 1")
        if self.block_size % self.interleave:
            raise ConfigError(
                f"cache layout: interleave {self.interleave} does not divide block_size {self.block_size}; "
                f"use one of {_divisors(self.block_size)}, or another block_size"
            )
        if self.world % self.index_shards:
            raise ConfigError(
                f"cache layout: index_shards {self.index_shards} does not divide world {self.world}, the DCP size; "
                f"use one of {_divisors(self.world)}"
            )

    @property
    def virtual_block(self) -> int:
        """Tokens of one page over all ranks: B * W, the unit of allocation and of prefix hits."""
        return self.block_size * self.world

    def owner(self, position: Integers) -> Integers:
        """The rank that holds the record of `position`: position // I % W."""
        return _where_valid(position // self.interleave % self.world, position >= 0)

    def local(self, position: Integers) -> Integers:
        """The index of `position` among its owner's records: position // (W*I) * I + position % I."""
        return _where_valid(self._local(position), position >= 0)

    def page_index(self, position: Integers) -> Integers:
        """The index into the request's page table: position // (B*W), the same on every rank."""
        return _where_valid(position // self.virtual_block, position >= 0)

    def offset(self, position: Integers) -> Integers:
        """The record within the owner's page: local(position) % B."""
        return _where_valid(self._local(position) % self.block_size, position >= 0)

    def slot(self, position: Integers, page: Integers) -> Integers:
        """The record's index in the owner's pool, counted over all pages: page * B + offset(position).

        `page` is what the request's page table holds at page_index(position).
        """
        slot = page * self.block_size + self._local(position) % self.block_size
        return _where_valid(slot, (position >= 0) * (page >= 0))

    def position(self, owner: Integers, local: Integers) -> Integers:
        """The inverse of (owner, local), owner < W: local // I * (W*I) + owner * I + local % I."""
        stripe = local // self.interleave * (self.world * self.interleave)
        position = stripe + owner * self.interleave + local % self.interleave
        return _where_valid(position, (owner >= 0) * (local >= 0))

    def local_length(self, length: Integers, rank: Integers) -> Integers:
        """How many of a sequence's first `length` tokens `rank` holds; 0 where `length` is negative.

        Each whole stripe of W*I tokens gives I records, the partial one clip(length % (W*I) - rank*I, 0, I).
        Over all ranks the local lengths sum to `length`.
        """
        length = length * (length > 0)
        stripe = self.world * self.interleave
        rest = length % stripe - rank * self.interleave
        # clip(rest, 0, I) by operators alone: what lies above 0, less what lies above I.
        above = (rest - self.interleave) * (rest > self.interleave)
        return length // stripe * self.interleave + rest * (rest > 0) - above

    def pages_for(self, length: Integers) -> Integers:
        """Pages that `length` tokens need: ceil(length / (B*W)); 0 where `length` is negative."""
        return -(-(length * (length > 0)) // self.virtual_block)

    @property
    def index_layout(self) -> "Layout":
        """The layout of index keys in the same pages: the same arithmetic with W := S and B := B*W/S.

        A page spans the same tokens, so one page table serves both pools. Its owners are parts: rank r of W holds
        part r % S. With S = 1 the offset of a key is its position within the page.
        """
        return Layout(self.virtual_block // self.index_shards, self.index_shards, self.interleave)

    @property
    def mtp_layout(self) -> "Layout":
        """The layout of the MTP layer's caches in the same pages: its index keys are in W parts, as its records."""
        return replace(self, index_shards=self.world)

    def _local(self, position: Integers) -> Integers:
        stripe = position // (self.world * self.interleave)
        return stripe * self.interleave + position % self.interleave


def _where_valid(value: Integers, valid: Integers) -> Integers:
    """`value` where `valid`, else -1, without any array library's `where`.

    An int times a bool keeps the int's dtype in numpy and jax, and is an int in Python.
    """
    return (value + 1) * valid - 1


def _divisors(number: int) -> str:
    return ", ".join(str(divisor) for divisor in range(1, number + 1) if number % divisor == 0)
