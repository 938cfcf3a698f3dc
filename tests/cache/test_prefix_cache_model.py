"""The prefix cache under random requests, against a dict of prefixes and a pool of what each row depends on."""

from dataclasses import dataclass
from os.path import commonprefix

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from glm_dcp_jax.cache.allocator import OutOfPages, PageAllocator, PageTable
from glm_dcp_jax.cache.placement import Layout
from glm_dcp_jax.cache.prefix_cache import BlockKeys, PrefixCache


@dataclass(eq=False)
class Request:
    """A request that runs. Rows below `computed` are in its pages, those of `target` once the copy was issued."""

    salt: str
    tokens: list[int]
    keys: BlockKeys
    table: PageTable
    computed: int
    target: int | None


class Requests(RuleBasedStateMachine):
    """Requests that share prefixes, grow and end, against a dict of prefixes and a pool that holds what rows depend on.

    A row's content is its salt and all tokens up to itself, and with lookahead the one behind it: so a hit that gives
    a row with any content but its own is seen.
    """

    @initialize(
        layout=st.sampled_from([Layout(3), Layout(1, 2), Layout(2, 2), Layout(1, 4), Layout(1, 8)]),
        lookahead=st.integers(0, 1),
        num_pages=st.integers(3, 24),
    )
    def start(self, layout: Layout, lookahead: int, num_pages: int) -> None:
        self.block, self.lookahead = layout.virtual_block, lookahead
        self.allocator = PageAllocator(num_pages)
        self.cache = PrefixCache(self.allocator, layout, lookahead=lookahead)
        self.pool: dict[tuple[int, int], object] = {}
        self.registered: dict[tuple, set[int]] = {}
        self.running: list[Request] = []
        self.seen: list[list[int]] = [[]]
        self.queries = self.hits = self.evictions = 0

    def row(self, request: Request, position: int) -> tuple:
        return request.salt, tuple(request.tokens[: position + 1 + self.lookahead])

    def taken(self, pages: list[int]) -> None:
        """The allocator has handed out these pages: what was registered for them is lost."""
        for prefix, holders in list(self.registered.items()):
            self.evictions += len(holders.intersection(pages))
            holders.difference_update(pages)
            if not holders:
                del self.registered[prefix]

    def known(self, salt: str, tokens: list[int]) -> int:
        """The longest prefix of these tokens, the lookahead among them, that anything registered begins with."""
        shared = [
            len(commonprefix([known, tuple(tokens)])) for of_salt, known in self.registered if of_salt == salt
        ]
        return max(shared, default=0)

    def expected_hit(self, salt: str, tokens: list[int], limit: int) -> int:
        return max(0, min(limit, self.known(salt, tokens) - self.lookahead))

    @rule(data=st.data(), salt=st.sampled_from(["", "", "other"]))
    def arrive(self, data: st.DataObject, salt: str) -> None:
        like = data.draw(st.sampled_from(self.seen))
        tail = data.draw(st.lists(st.integers(0, 1), min_size=1, max_size=2 * self.block + 1))
        tokens = like[: data.draw(st.integers(0, len(like)))] + tail
        limit = data.draw(st.sampled_from([len(tokens) - 1, len(tokens) // 2]))
        self.seen.append(tokens)
        keys = self.cache.keys(tokens, salt)
        match = self.cache.match(keys, limit)
        assert match == self.cache.match(keys, limit)
        assert match.length == self.expected_hit(salt, tokens, limit)
        whole = match.length // self.block
        for page, block in zip(match.pages, range(whole), strict=True):
            assert page in self.registered[salt, tuple(tokens[: (block + 1) * self.block + self.lookahead])]

        needed, free = self.cache.pages_needed(match, len(tokens)), self.allocator.num_free
        table = self.cache.acquire(match)
        self.queries, self.hits = self.queries + limit, self.hits + match.length
        try:
            self.taken(table.grow(len(tokens)))
        except OutOfPages:
            assert needed > free
            table.release()
            return
        assert needed == free - self.allocator.num_free
        target = None if match.source_page is None else table.pages[whole]
        self.running.append(Request(salt, tokens, keys, table, match.length, target))

    def draw_running(self, data: st.DataObject) -> Request:
        return data.draw(st.sampled_from(self.running))

    def copy(self, request: Request) -> None:
        """What the device does before the request's first step; others may have come and gone since its admission."""
        if request.target is not None:
            for offset in range(self.block):
                self.pool[request.target, offset] = self.pool.get((request.table.source_page, offset))
            request.table.drop_source_page()
            request.target = None

    @precondition(lambda self: self.running)
    @rule(data=st.data(), count=st.integers(1, 12), rest=st.booleans())
    def compute(self, data: st.DataObject, count: int, rest: bool) -> None:
        request = self.draw_running(data)
        self.copy(request)
        shared = {page for each in self.running if each is not request for page in each.table.pages}
        end = min(request.computed + count, len(request.tokens) - self.lookahead)
        for position in range(request.computed, end):
            page = request.table.pages[position // self.block]
            assert page not in shared, "others may read it"
            assert all(
                position >= len(known) - self.lookahead
                for (_, known), holders in self.registered.items()
                if page in holders
            ), "others may copy it"
            self.pool[page, position % self.block] = self.row(request, position)
        request.computed = max(request.computed, end)
        self.register(request, rest)

    def register(self, request: Request, rest: bool) -> None:
        """What the cache is told of a request, and what is to be found from then on."""
        self.cache.register(request.table, request.keys, request.computed, rest)
        known = max(len(request.tokens) - self.lookahead, 0)
        full = min(request.computed, known) // self.block
        for block in range(full):
            self.holds(request.table.pages[block], self.row(request, (block + 1) * self.block - 1))
        end = min(request.computed + self.lookahead, len(request.tokens))
        start, prefix = full * self.block, request.tokens[:end]
        if rest and end - start > self.lookahead and self.known(request.salt, prefix) < end:
            self.holds(request.table.pages[full], (request.salt, tuple(prefix)))

    def holds(self, page: int, prefix: tuple) -> None:
        """The page is registered for a prefix, and for none that is shorter."""
        for other, holders in list(self.registered.items()):
            if other != prefix and page in holders:
                holders.remove(page)
                if not holders:
                    del self.registered[other]
        self.registered.setdefault(prefix, set()).add(page)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5))
    def generate(self, data: st.DataObject, tokens: list[int]) -> None:
        request = self.draw_running(data)
        try:
            self.taken(request.table.grow(len(request.tokens) + len(tokens)))
        except OutOfPages:
            return
        request.tokens += tokens
        request.keys.extend(tokens)

    @precondition(lambda self: self.running)
    @rule(data=st.data(), rest=st.booleans())
    def end(self, data: st.DataObject, rest: bool) -> None:
        """Finished, aborted or preempted, perhaps before its copy was issued."""
        request = self.draw_running(data)
        self.running.remove(request)
        if rest and request.target is None:
            self.register(request, rest)
        request.table.release()

    @rule(chance=st.integers(0, 5))
    def reset(self, chance: int) -> None:
        if chance:
            return
        assert self.cache.reset() == (not self.running)
        free = [page for page in range(1, self.allocator.num_pages) if not self.allocator.ref_count(page)]
        evictions = self.evictions
        self.taken(free)
        self.evictions = evictions  # forgotten, but not evicted

    @invariant()
    def every_request_reads_what_it_would_have_written(self) -> None:
        for request in self.running:
            pages = list(request.table.pages)
            if request.target is not None:
                pages[request.computed // self.block] = request.table.source_page
            for position in range(request.computed):
                held = self.pool[pages[position // self.block], position % self.block]
                assert held == self.row(request, position)

    @invariant()
    def agrees_with_the_model(self) -> None:
        self.cache.check()
        held = {page for each in self.running for page in each.table.pages}
        held |= {each.table.source_page for each in self.running if each.target is not None}
        assert self.allocator.num_used == len(held)
        assert self.allocator.kept == {page for holders in self.registered.values() for page in holders}
        for salt, tokens in self.registered:
            parent = (len(tokens) - self.lookahead - 1) // self.block * self.block
            assert not parent or (salt, tokens[: parent + self.lookahead]) in self.registered
        stats = self.cache.stats
        assert (stats.queries, stats.hits, stats.evictions) == (self.queries, self.hits, self.evictions)


Requests.TestCase.settings = settings(max_examples=250, stateful_step_count=40, deadline=None)
TestRequests = Requests.TestCase
