"""The prefix cache: pages that are found again by the tokens they hold. Plain Python, no jax.

Its unit is the block: the layout.virtual_block tokens that one page holds over all ranks. A full block has a key,

    key[i] = sha256(key[i-1], tokens of block i as int32),    key[-1] = root = sha256(all else that changes bytes),

so a key stands for the whole prefix up to the block's end. A page with a full block is registered under the key and
keeps its content after its last reference has gone, until the allocator hands it out again. So is a page whose block is
not full, with the tokens that it has so far: nobody shares it, since its owner goes on writing there, but it is copied.
One page id names the CKV, the index keys and the MTP caches alike, so one walk along the keys decides a hit for all of
them.

Lookahead: with MTP a row's bytes depend on the token behind it too (the MTP layer is fed the next token), so what one
continuation wrote in the last row of a block is wrong for another. `lookahead` = 1 puts that token into the block's
tokens: a block is registered once the token behind it is known, and a continuation with another token there is a
partial hit, which leaves the row out. Hits are exact then, for every cache, and give up one token instead of a block.

No parent is evicted before its child. Who holds a block's page holds a registered page of each block before it, and
gives them back behind it: `PageTable.release` does, and so must anyone else who shares pages. So when a page joins the
line of free pages, a page of its parent is held, or joins behind it; one that is shared in between joins further back
still. Eviction takes from the head of the line only. Thus what is registered is closed under prefixes, and a walk from
the root finds all of it.

Everything depends on the calls and their order alone, so hosts that make the same calls have the same hits.
Not thread-safe: the scheduler's thread owns it.
"""

from array import array
from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass, field
from hashlib import sha256

from glm_dcp_jax.cache.allocator import AllocatorError, PageAllocator, PageTable
from glm_dcp_jax.cache.placement import Layout

TOKEN_BYTES = 4
"""A token in a key and in a block's tokens: int32."""


class BlockKeys:
    """The keys of a sequence's full blocks, and its tokens so far. keys[i] hashes what has not been hashed before.

    tokens: int32, only such as will not change any more (no drafts). Made by `PrefixCache.keys`. They outlive the
    sequence's page table: a preempted sequence finds its own blocks again.
    """

    def __init__(self, root: bytes, block_tokens: int, lookahead: int) -> None:
        self.tokens = array("i")
        self._block_tokens = block_tokens
        self._lookahead = lookahead
        self._chain = [root]

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends the tokens behind those it has. Raises OverflowError if one is no int32, and then appends none."""
        self.tokens.extend(array("i", tokens))

    def __len__(self) -> int:
        """Blocks of which all tokens are known, the lookahead too."""
        return max(len(self.tokens) - self._lookahead, 0) // self._block_tokens

    def __getitem__(self, block: int) -> bytes:
        if not 0 <= block < len(self):
            raise IndexError(f"block {block} has no key; {len(self)} blocks, from 0 on, are full")
        while len(self._chain) < block + 2:
            content = self.block_tokens(len(self._chain) - 1)
            self._chain.append(sha256(self._chain[-1] + content).digest())
        return self._chain[block + 1]

    def parent(self, block: int) -> bytes:
        """The key that the block's own builds on: of the block before it, which is full; of the first one the root."""
        return self[block - 1] if block else self._chain[0]

    def block_tokens(self, block: int, end: int | None = None) -> bytes:
        """The tokens of a block and its lookahead, as int32; fewer where they are not known yet, or are at `end`."""
        start = block * self._block_tokens
        stop = start + self._block_tokens + self._lookahead
        return self.tokens[start : stop if end is None else min(stop, end)].tobytes()


@dataclass(frozen=True)
class Match:
    """What the cache holds of a sequence's first `queried` tokens. Good until the next `allocate` or `reset`.

    length: tokens that need not be computed. pages: of whole blocks, to be shared. source_page: a page whose first
    `partial_tokens` tokens (over all ranks) are those of the block behind them, None if there is none: to be copied,
    since the sequence goes on writing there. keys: of the pages, then of the source page.
    """

    queried: int = 0
    length: int = 0
    pages: tuple[int, ...] = ()
    keys: tuple[bytes, ...] = ()
    source_page: int | None = None
    partial_tokens: int = 0

    @property
    def held_pages(self) -> tuple[int, ...]:
        """The pages, then the source page: one for each key."""
        return self.pages if self.source_page is None else (*self.pages, self.source_page)

    @property
    def without_source(self) -> "Match":
        """The whole blocks alone."""
        length = self.length - self.partial_tokens
        return Match(self.queried, length, self.pages, self.keys[: len(self.pages)])


@dataclass
class PrefixCacheStats:
    """Counts since the start. queries, hits: tokens that `acquire` was asked for and had; evictions: pages."""

    queries: int = 0
    hits: int = 0
    evictions: int = 0


@dataclass(eq=False, slots=True)
class _Block:
    """A registered block. pages: all that hold it, the earliest first; several if it was computed more than once.

    tokens: with the lookahead; fewer in a block that is not full.
    """

    key: bytes
    parent: bytes
    index: int
    tokens: bytes
    pages: list[int] = field(default_factory=list)


class PrefixCache:
    """Finds, hands out and registers the pages of one allocator by their tokens.

    layout: says how many tokens a block has. context: names all else that decides a record's bytes and is the same for
    every request: the model, its record format, whether MTP caches are written. lookahead: tokens behind a row that its
    bytes depend on, 1 with MTP. enabled: False registers nothing, so nothing is found.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        layout: Layout,
        context: str = "",
        lookahead: int = 0,
        enabled: bool = True,
    ) -> None:
        self.enabled = enabled
        self.stats = PrefixCacheStats()
        self._allocator = allocator
        self._layout = layout
        self._context = context
        self._lookahead = lookahead
        self._by_key: dict[bytes, _Block] = {}
        self._by_page: dict[int, _Block] = {}
        # Blocks by parent key, sorted by their tokens: the longest common prefix is with a neighbour of the place where
        # a sequence's own tokens would stand.
        self._children: dict[bytes, list[_Block]] = {}

    def keys(self, tokens: Iterable[int] = (), salt: str = "") -> BlockKeys:
        """A new sequence's keys. salt: the request's `cache_salt`; requests with different ones share nothing."""
        root = sha256(repr((self._layout, self._lookahead, self._context, salt)).encode()).digest()
        keys = BlockKeys(root, self._layout.virtual_block, self._lookahead)
        keys.extend(tokens)
        return keys

    def match(self, keys: BlockKeys, limit: int) -> Match:
        """What is cached of the sequence's first `limit` tokens; changes nothing.

        Whole blocks as far as they reach, then the longest part of one more: of any block that follows the last of
        them, compared token by token, whether it ends at other tokens or at the limit. For a sequence whose last row
        is to be computed (there are no logits otherwise) the limit is its length less 1.
        """
        if not self.enabled:
            return Match()
        limit = max(min(limit, len(keys.tokens)), 0)
        whole = self._whole_blocks(keys, limit // self._layout.virtual_block)
        reached = len(whole) * self._layout.virtual_block
        pages, matched = tuple(block.pages[0] for block in whole), tuple(block.key for block in whole)
        source, common = self._closest_child(keys, len(whole))
        partial = min(common - self._lookahead, limit - reached)
        if source is None or partial <= 0:
            return Match(limit, reached, pages, matched)
        return Match(limit, reached + partial, pages, (*matched, source.key), source.pages[0], partial)

    def pages_needed(self, match: Match, length: int) -> int:
        """Free pages taken by acquiring the match and then growing to `length` tokens: matched ones may be free too."""
        fresh = max(self._layout.pages_for(length) - len(match.pages), 0)
        return fresh + sum(self._allocator.ref_count(page) == 0 for page in match.held_pages)

    def acquire(self, match: Match) -> PageTable:
        """A page table that begins with the matched pages and holds the source page, one reference to each.

        The caller lets it grow, has `table.source_page` copied to `table.pages[len(match.pages)]`, and then calls
        `table.drop_source_page()`. The whole page may be copied: what is behind the partial tokens is written anew
        before it is read. Counts the query. Raises AllocatorError if the match is out of date.
        """
        for page, key in zip(match.held_pages, match.keys, strict=True):
            block = self._by_page.get(page)
            if block is None or block.key != key:
                raise AllocatorError(
                    f"page {page} no longer holds what was matched; match again after an allocation"
                )
        table = PageTable(self._allocator, self._layout)
        table.begin(match.pages, match.source_page)
        self.stats.queries += match.queried
        self.stats.hits += match.length
        return table

    def register(self, table: PageTable, keys: BlockKeys, computed: int, rest: bool = False) -> None:
        """Registers the table's blocks that are full and are not registered yet; O(1) while there are none.

        computed: tokens from the front whose records are final, in all caches of the table's pages. rest: also the
        block behind the full ones, unless another has its tokens. A block that another page holds already stays that
        page's; this one stands in for it once that one is evicted. Raises AllocatorError if the table's last registered
        page is of other tokens than the keys.
        """
        if not self.enabled:
            return
        full = min(computed // self._layout.virtual_block, len(keys), len(table.pages))
        first = full
        while first > 0 and not self._has_full_block(table.pages[first - 1]):
            first -= 1
        if 0 < first < full and self._by_page[table.pages[first - 1]].key != keys[first - 1]:
            raise AllocatorError(
                f"page {table.pages[first - 1]} is registered for other tokens than this sequence's"
            )
        for index in range(first, full):
            self._register_block(table.pages[index], keys, index, keys.block_tokens(index))
        if rest and full < len(table.pages):
            self._register_rest(table.pages[full], keys, full, computed)

    def reset(self) -> bool:
        """Forgets the content of every free page. True if nothing computed before can be found from now on.

        False if requests hold pages: what these registered, or will, is found as before. To be rid of it too, preempt
        or end them, then call this again.
        """
        for page in list(self._by_page):
            if not self._allocator.ref_count(page):
                self._allocator.unkeep(page)
                self._forget(page)
        return not self._allocator.num_used

    def forget(self) -> None:
        """Forgets the content of every page, held or not: it is gone."""
        for page in list(self._by_page):
            self._allocator.unkeep(page)
            self._forget(page)

    def check(self) -> None:
        """Raises AllocatorError unless allocator, pages, blocks and their order agree. O(num_pages)."""
        self._allocator.check()
        self._check_pages()
        self._check_children()
        self._check_order()

    def _whole_blocks(self, keys: BlockKeys, most: int) -> list[_Block]:
        """The registered blocks from the first one on, up to `most`."""
        found: list[_Block] = []
        for index in range(min(most, len(keys))):
            block = self._by_key.get(keys[index])
            if block is None:
                break
            found.append(block)
        return found

    def _closest_child(self, keys: BlockKeys, index: int) -> tuple[_Block | None, int]:
        """The registered child of block index-1 with the longest common prefix with block `index`, and its tokens.

        Among equals the one that is first in the order of token bytes, so that the choice depends on what is
        registered only.
        """
        siblings = self._children.get(keys.parent(index))
        if not siblings:
            return None, 0
        tokens = keys.block_tokens(index)
        place = bisect_left(siblings, tokens, key=_tokens)
        neighbours = siblings[max(place - 1, 0) : place + 1]
        closest = max(neighbours, key=lambda block: _common_tokens(block.tokens, tokens))
        return closest, _common_tokens(closest.tokens, tokens)

    def _has_full_block(self, page: int) -> bool:
        block = self._by_page.get(page)
        return block is not None and len(block.tokens) == self._full_bytes

    @property
    def _full_bytes(self) -> int:
        return TOKEN_BYTES * (self._layout.virtual_block + self._lookahead)

    def _register_rest(self, page: int, keys: BlockKeys, index: int, computed: int) -> None:
        tokens = keys.block_tokens(index, computed + self._lookahead)
        count = len(tokens) // TOKEN_BYTES
        if count <= self._lookahead or self._closest_child(keys, index)[1] >= count:
            return
        self._register_block(page, keys, index, tokens)

    def _register_block(self, page: int, keys: BlockKeys, index: int, tokens: bytes) -> None:
        """In place of what the page had when its block was shorter."""
        if page in self._by_page:
            self._allocator.unkeep(page)
            self._forget(page)
        self._allocator.keep(page, self._evicted)
        parent = keys.parent(index)
        key = sha256(parent + tokens).digest()
        block = self._by_key.get(key)
        if block is None:
            block = _Block(key, parent, index, tokens)
            self._by_key[key] = block
            insort(self._children.setdefault(block.parent, []), block, key=_tokens)
        block.pages.append(page)
        self._by_page[page] = block

    def _evicted(self, page: int) -> None:
        self.stats.evictions += 1
        self._forget(page)

    def _forget(self, page: int) -> None:
        block = self._by_page.pop(page)
        block.pages.remove(page)
        if block.pages:
            return
        del self._by_key[block.key]
        siblings = self._children[block.parent]
        del siblings[bisect_left(siblings, block.tokens, key=_tokens)]
        if not siblings:
            del self._children[block.parent]

    def _check_pages(self) -> None:
        """Kept pages, pages with a block, and the pages of all blocks are the same, each once."""
        held = [page for block in self._by_key.values() for page in block.pages]
        if (
            not len(held) == len(set(held)) == len(self._by_page)
            or self._allocator.kept != self._by_page.keys()
        ):
            raise AllocatorError("pages that are kept, pages that have a block, and pages of blocks differ")
        for page, block in self._by_page.items():
            if page not in block.pages or self._by_key.get(block.key) is not block:
                raise AllocatorError(f"page {page} has a block that is not registered for it")
        for key, block in self._by_key.items():
            if not block.pages or key != block.key or key != sha256(block.parent + block.tokens).digest():
                raise AllocatorError(f"block {key.hex()} has no page, or its key is not that of its tokens")

    def _check_children(self) -> None:
        """Each block is under its parent, once and in order; each parent is registered, or a root."""
        for parent, siblings in self._children.items():
            tokens = [block.tokens for block in siblings]
            if not siblings or any(low >= high for low, high in zip(tokens, tokens[1:], strict=False)):
                raise AllocatorError(f"the children of {parent.hex()} are none, out of order, or twice there")
            for block in siblings:
                if block.parent != parent or self._by_key.get(block.key) is not block:
                    raise AllocatorError(
                        f"block {block.key.hex()} is registered no more, or another parent's child"
                    )
                if block.index and parent not in self._by_key:
                    raise AllocatorError(f"block {block.key.hex()} has outlived its parent")
        if sum(map(len, self._children.values())) != len(self._by_key):
            raise AllocatorError("a block is not among the children of its parent")

    def _check_order(self) -> None:
        """A free page has a page of its parent behind it in the line, or in use."""
        place = {page: number for number, page in enumerate(self._allocator.free_line)}
        last = self._allocator.num_pages
        for page, block in self._by_page.items():
            parent = self._by_key.get(block.parent)
            if parent and max(place.get(each, last) for each in parent.pages) < place.get(page, last):
                raise AllocatorError(f"page {page} would be evicted after every page of its parent")


def _tokens(block: _Block) -> bytes:
    return block.tokens


def _common_tokens(one: bytes, other: bytes) -> int:
    """Length of the common prefix of two arrays of int32 bytes, in tokens, by bisection: a comparison is a memcmp."""
    low, high = 0, min(len(one), len(other)) // TOKEN_BYTES
    while low < high:
        middle = (low + high + 1) // 2
        if one[: middle * TOKEN_BYTES] == other[: middle * TOKEN_BYTES]:
            low = middle
        else:
            high = middle - 1
    return low
