"""Any series of serves, evictions, loads and late transfers: every page shows its own prefix.

Pages hold tags instead of bytes: the path whose rows they would be. In worlds of one class a plain
model of two page dictionaries also says exactly what each tier holds.
"""

import pickle
from collections import deque
from typing import ClassVar

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from alloc import ceil_div
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
)
from tests.models.naive_tree import NaiveTree
from tests.tiers.tier_worlds import make_allocator
from tiers import (
    GroupTier,
    HostTier,
    MemoryStore,
    TieredCache,
    TransferError,
    WritePolicy,
    host_layout,
)

LETTERS = st.lists(st.integers(0, 1), min_size=1, max_size=5)


class Tags:
    """One rank's transfer of tags, in order, when it is told to or has to be waited for."""

    def __init__(self, layout, rank):
        self.layout, self.rank = layout, rank
        self.device, self.host = {}, {}
        self.queue = deque()
        self.refuse = False

    def _start(self, source, sources, target, targets):
        if self.refuse:
            raise TransferError("refused")
        assert (self.layout.class_of(sources) == self.layout.class_of(targets)).all()
        self.queue.append(Ticket(source, self.mine(sources), target, self.mine(targets)))
        return self.queue[-1]

    def mine(self, pages):
        return pages[self.layout.class_of(pages) == self.rank].tolist()

    def store(self, device_pages, host_pages):
        return self._start(self.device, device_pages, self.host, host_pages)

    def load(self, host_pages, device_pages):
        return self._start(self.host, host_pages, self.device, device_pages)

    def advance(self):
        self.queue.popleft().arrive()

    def drain(self):
        while self.queue:
            self.advance()

    def wait_layer(self, layer_id):
        self.drain()

    # The rows of the blobs below

    def describe(self):
        return "tags"

    def read(self, pages):
        return pickle.dumps([self.host[page] for page in self.mine(pages)])

    def write(self, pages, payload, skip_pages=0):
        for page, tag in zip(self.mine(pages), pickle.loads(payload)[skip_pages:], strict=True):
            self.host[page] = tag
        return True


class Ticket:
    """One transfer. A fence lets later writes to the source wait, and the caller go on."""

    def __init__(self, source, sources, target, targets):
        self.source, self.sources = source, sources
        self.target, self.targets = target, targets
        self.taken = None
        self.done = False

    def is_done(self):
        return self.done

    def fence(self):
        self.taken = [self.source[page] for page in self.sources]

    def arrive(self):
        if self.taken is None:
            self.fence()
        self.target.update(zip(self.targets, self.taken, strict=True))
        self.done = True


class NaiveTiers:
    """What each tier of one class holds, from two page dictionaries."""

    def __init__(self, device_pages, host_pages):
        self.device, self.host = NaiveTree(), NaiveTree()
        self.device_pages, self.host_pages = device_pages, host_pages
        self.refuse = False

    def free(self):
        return self.device_pages - len(self.device.cached)

    def evict(self, count):
        """Drop device pages; copy what goes. Returns how many have a copy in the end."""
        dropped, runs = [], []
        while len(dropped) < count and (gone := self._victim()):
            path, run = gone
            if not runs or runs[-1][1] != run or runs[-1][2] != len(path):
                runs.append([path, run, len(path)])
            runs[-1][2] -= 1
            dropped.append(path)
        for path, *_ in runs:
            self._keep(path)
        return sum(path in self.host.cached for path in dropped)

    def _victim(self):
        before = dict(self.device.cached)
        self.device.victims(1)
        for path, page in before.items():
            if path not in self.device.cached:
                return path, page.run
        return None

    def _keep(self, path):
        held = len(self.host.match(path, 0))
        self.host.lock(path[: held + 1])
        missing = len(path) - 1 - held
        free = self.host_pages - len(self.host.cached)
        fits = min(missing, free + self.host.sizes()[0])
        if fits:
            self.host.victims(fits - free)
            if not self.refuse:
                self.host.insert(path[: held + fits + 1], [0] * (held + fits))
        self.host.unlock(path[: held + 1])

    def load(self, path):
        """Load back; returns the paths that stay locked until confirmed, or None."""
        had = len(self.device.match(path, 0))
        self.device.lock(path[: had + 1])
        below = len(self.host.match(path, 0))
        source = path[: below + 1]
        self.host.lock(source)
        wanted = below - had
        loaded = None
        if wanted > 0 and wanted <= self.free() + self.device.sizes()[0]:
            self.evict(wanted - self.free())
            if not self.refuse:
                self.device.insert(source, [0] * below)
                loaded = (source, source)
                self.device.match(path, 0)
                self.device.lock(source)
        if loaded is None:
            self.host.unlock(source)
        self.device.unlock(path[: had + 1])
        if loaded:
            self.device.match(path, 0)
        return loaded


class TierMachine(RuleBasedStateMachine):
    """One cache in tiers; subclasses choose the world."""

    ranks: ClassVar[int] = 1
    layout: ClassVar[str] = "interleave"
    rotation: ClassVar[str] = "chain"
    write: ClassVar[str] = "write_back"
    pages: ClassVar[int] = 6
    host_pages: ClassVar[int] = 5
    blobs: ClassVar[int] = 0
    ps: ClassVar[int] = 2

    def __init__(self):
        super().__init__()
        allocator = make_allocator(self.layout, self.ranks, self.pages, self.ps)
        below = host_layout(allocator.layout, self.host_pages)
        self.tags = Tags(allocator.layout, self.ranks - 1)
        groups = None
        if self.blobs:
            groups = GroupTier(
                MemoryStore(self.blobs),
                self.tags,
                below,
                model_id="m",
                rank=self.ranks - 1,
                group_pages=2,
            )
        params = CacheInitParams(False, None, allocator, self.ps, rotation=self.rotation)
        self.cache = TieredCache(
            UnifiedRadixCache(params),
            HostTier(below, self.tags, groups),
            write=WritePolicy(self.write, 2),
        )
        self.allocator = allocator
        self.held = []
        self.exact = self.ranks == 1 and self.write == "write_back" and not self.blobs
        self.model = NaiveTiers(self.pages, self.host_pages)
        self.flights = deque()

    # Helpers

    def tokens(self, letters):
        return [letter for letter in letters for _ in range(self.ps)]

    def path(self, letters):
        return NaiveTree.path(self.tokens(letters), self.ps)

    def key(self, letters):
        return RadixKey(self.tokens(letters))

    def classes(self, start, count, pick):
        lanes = self.allocator.layout.num_classes
        if self.layout == "lanes":
            return np.array([(pick >> i) % lanes for i in range(count)], dtype=np.int64)
        return self.allocator.layout.cyclic_classes(pick, start, count)

    # Rules

    @rule(letters=LETTERS, pick=st.integers(0, 31))
    def serve(self, letters, pick):
        """Match, make room, compute and insert; declined or full, give back."""
        device = self.cache.device
        found = self.cache.match(self.key(letters))
        path = self.path(letters)
        match, start = found.device, found.device.handle.end
        if self.exact:
            assert start == len(self.model.device.match(path))
            if start < len(letters):
                self.model.host.match(path)
            self.model.device.lock(path[: start + 1])
        classes = self.classes(start, len(letters) - start, pick)
        if start and device.is_sharded and self.rotation == "chain":
            base = device.rotation_base_of(match.last_device_node)
            classes = self.classes(start, len(letters) - start, base)
        required = np.bincount(classes, minlength=self.ranks)
        deficits = self.allocator.class_deficits(required)
        room = device.tree_core.component.evictable_by_class()
        pages = None
        if not (deficits > room).any():
            if deficits.any():
                self.evict_for(deficits)
            pages = self.allocator.free_list.draw(classes)
        if pages is not None and len(pages):
            for i, page in enumerate(pages.tolist()):
                self.tags.device[page] = path[: start + i + 2]
            whole = np.concatenate([match.pages, pages])
            result = device.insert(InsertParams(found.key, pages=whole, handle=match.handle))
            assert not result.rotation_tail_declined
            if self.exact:
                self.model.device.insert(path, [0] * len(letters))
        device.dec_lock_ref(match.receipt)
        if self.exact:
            self.model.device.unlock(path[: start + 1])

    def evict_for(self, deficits):
        aim = tuple(deficits.tolist()) if self.ranks > 1 else None
        num_tokens = int(deficits.sum()) * self.ps
        result = self.cache.evict(EvictParams(num_tokens, aim))
        assert result.num_tokens_kept + result.num_tokens_dropped == result.num_tokens_evicted
        if self.exact:
            kept = self.model.evict(ceil_div(num_tokens, self.ps))
            assert result.num_tokens_kept == kept * self.ps
        return result

    @rule(count=st.integers(0, 8))
    def evict(self, count):
        evictable = self.cache.device.evictable_size()
        if self.ranks == 1:
            result = self.evict_for(np.array([count]))
            assert result.num_tokens_evicted == min(count * self.ps, evictable)
        else:
            self.evict_for(np.arange(self.ranks) % (count + 1))

    @rule(letters=LETTERS, hold=st.booleans())
    def load(self, letters, hold):
        """Load back what the host has; perhaps keep the lock."""
        key, path = self.key(letters), self.path(letters)
        match = self.cache.match(key)
        had = match.device.handle.end
        if self.exact:
            assert had == len(self.model.device.match(path))
            self.model.device.lock(path[: had + 1])
            if had < len(letters):
                below = len(self.model.host.match(path))
                assert match.host_hit_length == max(0, below - had) * self.ps
        loaded = self.cache.load_back(match)
        if self.exact:
            flight = self.model.load(path)
            assert (flight is None) == (loaded is None)
            if flight is not None:
                self.flights.append(flight)
                self.model.device.unlock(path[: had + 1])
                had = len(flight[0]) - 1
                assert loaded.device.handle.end == had
                self.model.device.lock(path[: had + 1])
        if loaded is not None:
            gained = loaded.device.device_prefix_len - match.device.device_prefix_len
            assert gained == match.host_hit_length
        match = loaded or match
        assert match.device.handle.end >= had
        self.held.append((match.device.receipt, path[: had + 1]))
        if not hold:
            self.release(len(self.held) - 1)

    @precondition(lambda self: self.held)
    @rule(pick=st.integers(0, 7))
    def let_go(self, pick):
        self.release(pick % len(self.held))

    def release(self, index):
        receipt, path = self.held.pop(index)
        self.cache.device.dec_lock_ref(receipt)
        if self.exact:
            self.model.device.unlock(path)

    @precondition(lambda self: self.tags.queue)
    @rule()
    def advance(self):
        self.tags.advance()

    @rule()
    def poll(self):
        done = self.cache.poll()
        if self.exact:
            for _ in range(done):
                on_device, on_host = self.flights.popleft()
                self.model.device.unlock(on_device)
                self.model.host.unlock(on_host)

    @rule(refuse=st.booleans())
    def refuse(self, refuse):
        self.tags.refuse = self.model.refuse = refuse

    @rule(letters=LETTERS)
    def peek_costs_nothing(self, letters):
        before = self.cache.state_digest()
        self.cache.host.held_pages(self.key(letters))
        self.cache.device.match_prefix(MatchPrefixParams(self.key(letters), peek=True))
        assert self.cache.state_digest() == before

    @precondition(lambda self: not self.held)
    @rule(really=st.integers(0, 9))
    def reset(self, really):
        if really == 0:
            self.cache.reset()
            self.model = NaiveTiers(self.pages, self.host_pages)
            self.model.refuse = self.tags.refuse
            self.flights.clear()

    # What holds after every step

    @invariant()
    def both_tiers_are_sound(self):
        self.cache.check_invariants()

    @invariant()
    def every_page_shows_its_own_prefix(self):
        """Device pages do, once their loads are done; host pages, once their stores are."""
        late = {id(target): set() for target in (self.tags.device, self.tags.host)}
        for ticket in self.tags.queue:
            late[id(ticket.target)] |= set(ticket.targets)
        for cache, tags in (
            (self.cache.device, self.tags.device),
            (self.cache.host.cache, self.tags.host),
        ):
            for path, pages in paths(cache, self.ps):
                for i, page in enumerate(pages):
                    mine = self.allocator.layout.class_of(page) == self.ranks - 1
                    if mine and page not in late[id(tags)]:
                        assert tags[page] == path[: i + 2]

    @invariant()
    def each_tier_holds_what_the_model_says(self):
        if not self.exact:
            return
        for cache, model in (
            (self.cache.device, self.model.device),
            (self.cache.host.cache, self.model.host),
        ):
            held = {
                path[: i + 2] for path, pages in paths(cache, self.ps) for i in range(len(pages))
            }
            assert held == set(model.cached)

    def teardown(self):
        self.cache.drain()
        self.cache.check_invariants()
        self.every_page_shows_its_own_prefix()
        for receipt, _ in self.held:
            self.cache.device.dec_lock_ref(receipt)
        assert self.cache.device.protected_size() == 0
        assert self.cache.host.cache.protected_size() == 0


def paths(cache, ps):
    """Yield the path and the page ids of every node."""
    for node in cache.tree_core.nodes():
        if node.children:
            continue
        pages = cache.tree_core.path_pages(node.id).tolist()
        units, above = [], node
        while above.parent is not None:
            width = above.num_pages * ps
            units = np.frombuffer(above.key, np.int64, width).tolist() + units
            above = above.parent
        yield NaiveTree.path(units, ps), pages


class SmallHost(TierMachine):
    host_pages = 3


class LargeHost(TierMachine):
    host_pages = 20


class WriteThrough(TierMachine):
    write = "write_through"


class Interleave(TierMachine):
    ranks, pages, host_pages = 2, 4, 4


class InterleaveSeams(TierMachine):
    ranks, pages, host_pages, rotation = 2, 4, 3, "seam"


class Lanes(TierMachine):
    ranks, pages, host_pages, layout = 2, 4, 3, "lanes"


class LanesWriteThroughBlobs(TierMachine):
    ranks, pages, host_pages, layout, write, blobs = 2, 4, 3, "lanes", "write_through", 5


class InterleaveBlobs(TierMachine):
    ranks, pages, host_pages, blobs = 2, 3, 2, 6


class Blobs(TierMachine):
    host_pages, blobs = 3, 4


LIMITS = settings(max_examples=50, stateful_step_count=30)


def case(machine):
    test = machine.TestCase
    test.settings = LIMITS
    return test


TestExact = case(TierMachine)
TestSmallHost = case(SmallHost)
TestLargeHost = case(LargeHost)
TestWriteThrough = case(WriteThrough)
TestInterleave = case(Interleave)
TestInterleaveSeams = case(InterleaveSeams)
TestLanes = case(Lanes)
TestLanesWriteThroughBlobs = case(LanesWriteThroughBlobs)
TestInterleaveBlobs = case(InterleaveBlobs)
TestBlobs = case(Blobs)
