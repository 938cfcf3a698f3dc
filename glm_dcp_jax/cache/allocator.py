"""The lockstep page allocator: who holds which page, in plain Python.

There is one space of page ids. An id names the same page in the CKV pool, in the index-key pool and in the
MTP caches, on every rank: they are taken and given back together, one page table serves them all, and a
request needs as many ids as its records fill pages, not a share per pool. What is handed out depends on the
calls and their order alone (no clock, no hashing, no device state), so hosts that make the same calls hold
the same ids, and no page table is ever sent.

Not thread-safe: the scheduler's thread owns it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence

from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.config import ConfigError

# Padding rows read and write here, where no request's records are. Never handed out.
NULL_PAGE = 0


class OutOfPages(Exception):
    """Too few free pages: an ordinary event, met by waiting or by preempting a request. Nothing has changed.

    asked, free, total: pages; total leaves out the null page.
    """

    def __init__(self, asked: int, free: int, total: int) -> None:
        super().__init__(
            f"{asked} cache pages asked, {free} free of {total}; wait for or preempt a request, or enlarge "
            "the cache (--kv-cache-memory-bytes, --gpu-memory-utilization or --num-gpu-blocks-override)"
        )
        self.asked, self.free, self.total = asked, free, total


class AllocatorError(RuntimeError):
    """The caller broke a rule (double free, null page, unknown id): a defect there. Nothing has changed."""


class PageAllocator:
    """Hands out the page ids 1 .. num_pages-1 and counts the references to each.

    The free pages stand in line: `allocate` takes from the head, `free` adds at the end. So ids ascend at first,
    and later the page that has been free for the longest goes first. A page leaves the line with one reference,
    `share` adds one, `free` drops one, and with the last one gone the page joins the line again.

    A page with content worth finding again (`keep`) waits in a line of its own, which is used up only after the
    other. Plain LRU over one line would overwrite content that might be asked for while useless pages stand
    behind it: tails of finished requests, and pages that have never been used. Until it is handed out, `share`
    takes such a page out of its line, wherever it stands there, in O(1).

    A call does all it was asked to, or raises and changes nothing. Raises ConfigError if num_pages is below 2.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 2:
            raise ConfigError(
                f"the cache has room for {num_pages} pages; it needs at least 2, since page {NULL_PAGE} is "
                "kept for padding: give it more memory or choose a smaller block_size"
            )
        self.num_pages = num_pages
        self._free = deque(range(NULL_PAGE + 1, num_pages))
        # Kept pages that are free, as the keys: a line that can be left from the middle.
        self._kept_free: OrderedDict[int, None] = OrderedDict()
        # All kept pages, held or free, and whom to tell when one is handed out again.
        self._kept: dict[int, Callable[[int], None]] = {}
        # References by page id; 0 means free. The null page has one that nobody can drop.
        self._references = [0] * num_pages
        self._references[NULL_PAGE] = 1

    @property
    def num_free(self) -> int:
        """Pages that can be allocated now, kept ones among them."""
        return len(self._free) + len(self._kept_free)

    @property
    def num_used(self) -> int:
        """Pages with at least one reference, the null page left out."""
        return self.num_pages - 1 - self.num_free

    @property
    def free_line(self) -> list[int]:
        """The free pages in the order in which `allocate` hands them out. O(num_free), for checks."""
        return [*self._free, *self._kept_free]

    @property
    def kept(self) -> frozenset[int]:
        """The kept pages, held or free. O(num_pages), for checks."""
        return frozenset(self._kept)

    def ref_count(self, page: int) -> int:
        """References to `page`; 0 if free, 1 for the null page. Raises AllocatorError for an unknown id."""
        self._check_id(page)
        return self._references[page]

    def allocate(self, count: int) -> list[int]:
        """Takes `count` pages from the head of the line, in its order, with one reference each.

        What was kept in them is forgotten. Raises OutOfPages if fewer are free, AllocatorError if `count` is negative.
        """
        if count < 0:
            raise AllocatorError(f"cannot allocate {count} pages; the count must be 0 or more")
        if count > self.num_free:
            raise OutOfPages(asked=count, free=self.num_free, total=self.num_pages - 1)
        pages = [self._free.popleft() if self._free else self._evict() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def share(self, pages: Sequence[int]) -> None:
        """Adds a reference to each page for one more holder, who frees it in turn; free pages must be kept ones.

        Raises AllocatorError if one of them is free and not kept, unknown, or the null page.
        """
        self._check_findable(pages)
        for page in pages:
            if not self._references[page]:
                del self._kept_free[page]
            self._references[page] += 1

    def keep(self, page: int, forget: Callable[[int], None]) -> None:
        """Keeps the content of a held page beyond its last reference, until `allocate` hands the page out again.

        forget: called with the page at that moment; it must neither raise nor call the allocator. Raises AllocatorError
        if the page is free, unknown, the null page, or kept already.
        """
        self._check_held([page])
        if page in self._kept:
            raise AllocatorError(
                f"page {page} is kept already; `unkeep` it before it is kept for something else"
            )
        self._kept[page] = forget

    def unkeep(self, page: int) -> None:
        """Keeps the page no longer, and tells nobody; if it is free, it goes to the end of the other line.

        Raises AllocatorError if it is not kept.
        """
        if page not in self._kept:
            raise AllocatorError(f"page {page!r} is not kept; only what `keep` was called for can be unkept")
        del self._kept[page]
        if not self._references[page]:
            del self._kept_free[page]
            self._free.append(page)

    def free(self, pages: Sequence[int]) -> None:
        """Drops one reference to each page; those with none left join the line in the order given.

        Raises AllocatorError if one of them is unknown, the null page, or free already, which includes
        standing in `pages` more often than it has references.
        """
        self._check_held(pages)
        for page, drops in Counter(pages).items():
            if drops > self._references[page]:
                raise AllocatorError(
                    f"double free: page {page} is given back {drops} times at once, "
                    f"its references are {self._references[page]}"
                )
        for page in pages:
            self._references[page] -= 1
            if not self._references[page]:
                if page in self._kept:
                    self._kept_free[page] = None
                else:
                    self._free.append(page)

    def check(self) -> None:
        """Raises AllocatorError unless each page is either in its line, once, or referenced. O(num_pages)."""
        waiting = set(self.free_line)
        if len(waiting) != self.num_free:
            raise AllocatorError("a page stands twice in the line of free pages")
        if not self._kept_free.keys() <= self._kept.keys() or not self._kept.keys().isdisjoint(self._free):
            raise AllocatorError("a free page stands in the wrong line: kept ones have their own")
        if self._references[NULL_PAGE] != 1 or not waiting <= set(range(NULL_PAGE + 1, self.num_pages)):
            raise AllocatorError(f"the null page {NULL_PAGE} or an unknown page has been shared or freed")
        for page, references in enumerate(self._references):
            if references < 0 or (references == 0) != (page in waiting):
                place = "in" if page in waiting else "not in"
                raise AllocatorError(f"page {page}: {references} references, {place} the line of free pages")

    def _evict(self) -> int:
        """Takes the kept page that has been free for the longest; its content is forgotten."""
        page, _ = self._kept_free.popitem(last=False)
        self._kept.pop(page)(page)
        return page

    def _check_id(self, page: int) -> None:
        # A numpy integer is refused too: it would stay in the line and turn up in later page tables.
        if type(page) is not int or not 0 <= page < self.num_pages:
            raise AllocatorError(
                f"{page!r} is no page id; these are Python ints from 0 to {self.num_pages - 1}"
            )

    def _check_held(self, pages: Sequence[int]) -> None:
        self._check_findable(pages)
        for page in pages:
            if not self._references[page]:
                raise AllocatorError(f"page {page} is free already, only its content is kept: a double free")

    def _check_findable(self, pages: Sequence[int]) -> None:
        """Raises AllocatorError unless every page is held, or free and kept."""
        for page in pages:
            self._check_id(page)
            if page == NULL_PAGE:
                raise AllocatorError(f"page {NULL_PAGE} is the null page; it can be neither shared nor freed")
            if not self._references[page] and page not in self._kept:
                raise AllocatorError(
                    f"page {page} is free already: a double free, or used after it was freed"
                )


class PageTable:
    """One request's pages in the order of its tokens: entry i holds the i-th virtual block of positions.

    pages: page ids, for anyone to read; only the methods change them. capacity: tokens that they have room for.
    source_page: what the first page behind a shared front is to be copied from; held too, until `drop_source_page`.
    """

    def __init__(self, allocator: PageAllocator, layout: Layout) -> None:
        self._allocator = allocator
        self._layout = layout
        self.pages: list[int] = []
        self.capacity = 0
        self.source_page: int | None = None

    def begin(self, pages: Sequence[int], source_page: int | None = None) -> None:
        """Fills the empty table with a front that others computed, one more reference to each page.

        pages: full pages, which this request will only read. source_page: the page behind them, of which it needs a
        copy to write on; while the table holds it, nobody overwrites it. Raises AllocatorError if the table is not
        empty, or if a page is neither held nor kept.
        """
        if self.pages or self.source_page is not None:
            raise AllocatorError(
                "a page table begins with shared pages only while it is empty; release it first"
            )
        self._allocator.share([*pages, *([] if source_page is None else [source_page])])
        self.pages, self.source_page = list(pages), source_page
        self.capacity = len(self.pages) * self._layout.virtual_block

    def drop_source_page(self) -> None:
        """Gives back the source of a copy, once the copy is on its way to the device; nothing happens if there is none.

        Later steps may overwrite it then: the device runs them after the copy.
        """
        if self.source_page is not None:
            self._allocator.free([self.source_page])
            self.source_page = None

    def grow(self, length: int) -> list[int]:
        """Takes the pages still missing for `length` tokens and returns them: none if there is room already.

        Raises OutOfPages, and then has kept what it had.
        """
        if length <= self.capacity:
            return []
        taken = self._allocator.allocate(self._layout.pages_for(length) - len(self.pages))
        self.pages.extend(taken)
        self.capacity = len(self.pages) * self._layout.virtual_block
        return taken

    def release(self) -> None:
        """Gives back every page, the last one first. The table is empty then, and may be used again.

        The order decides whose content is overwritten first. A page is of use only together with all pages
        before it, and the front of a prompt is what requests have in common: the front is to stay intact the
        longest.
        """
        self.drop_source_page()
        self._allocator.free(self.pages[::-1])
        self.pages, self.capacity = [], 0
