"""Overlapping requests on sharded pools, placed in batches, against a plain dictionary of pages.

Requests are matched, placed chunk by chunk, cached, finished, aborted and retracted in any order,
so many are placed and not inserted yet. Which pages an eviction takes is the tree's business here;
that none of them was locked or had anything below it is checked.

One rule draws the kind of each move, so that no run goes without a part of a request's life.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from alloc import PageInterleavePoolAllocator, PageState, ReqToTokenPool
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    InsertResult,
    UnifiedRadixCache,
    alloc_for_extend,
    preview_extend,
)
from tests.builders import BareKv, FakeKv, FakeReq, World, make_allocator
from tests.models.naive_tree import NaiveTree, Path

WAITING, MATCHED, PLACED, CACHED = "waiting", "matched", "placed", "cached"

MOVES = [
    *["arrive", "cache_chunk", "finish"] * 2,
    *["place"] * 4,
    *["match", "give_up", "place_inside_a_page", "evict", "evict_for_classes", "insert_by_hand"],
]


@dataclass(frozen=True)
class Move:
    """What happens next; every move reads the fields that it needs.

    Attributes:
        kind: the method to call.
        index: chooses among the requests that can take part.
        sizes: pages of a batch's chunks, or pages wanted of each class.
        letters: pages of a new key; two letters, so that keys collide.
        flags: two choices.
    """

    kind: str
    index: int
    sizes: list[int]
    letters: list[int]
    flags: tuple[bool, bool]


moves = st.builds(
    Move,
    kind=st.sampled_from(MOVES),
    index=st.integers(0, 5),
    sizes=st.lists(st.integers(0, 3), min_size=1, max_size=4),
    letters=st.lists(st.integers(0, 1), min_size=1, max_size=5),
    flags=st.tuples(st.booleans(), st.booleans()),
)


class WatchedCache(UnifiedRadixCache):
    """The cache, remembering what the last insert said."""

    last_insert: InsertResult | None = None

    def insert(self, params: InsertParams) -> InsertResult:
        self.last_insert = super().insert(params)
        return self.last_insert


@dataclass(eq=False)
class Flight:
    """A request, how far it is, the path that it has locked and the pages of its row."""

    req: FakeReq
    stage: str = WAITING
    path: Path | None = None
    row: Sequence[int] = ()


class ShardedMachine(RuleBasedStateMachine):
    """One scheduler over one sharded cache; subclasses choose the world."""

    shard_size: ClassVar[int] = 2
    page_size: ClassVar[int] = 1
    rotation: ClassVar[str] = "chain"
    use_leases: ClassVar[bool] = True
    need_sort: ClassVar[bool] = False
    is_bigram: ClassVar[bool] = False
    by_hand: ClassVar[bool] = False
    pages_per_rank: ClassVar[int] = 5

    def __init__(self) -> None:
        super().__init__()
        ps, num_pages = self.page_size, self.pages_per_rank
        allocator = make_allocator(
            ps, num_pages, shard_size=self.shard_size, need_sort=self.need_sort
        )
        assert isinstance(allocator, PageInterleavePoolAllocator)
        self.allocator = allocator
        self.pool = ReqToTokenPool(3, 16 * ps, None, page_size=ps, debug=True)
        params = CacheInitParams(
            False,
            self.pool,
            allocator,
            ps,
            is_bigram=self.is_bigram,
            rotation=self.rotation,
            use_leases=self.use_leases,
        )
        self.cache = WatchedCache(params)
        self.world = World(allocator, self.pool, self.cache, num_pages * self.shard_size)
        self.model = NaiveTree()
        self.flights: list[Flight] = []

    # Helpers

    def expand(self, letters: Sequence[int], rest: int) -> list[int]:
        """Make tokens: a page a letter, then ``rest`` tokens of one more page."""
        ps = self.page_size
        tokens = [letter * 10 + min(i, 1) for letter in letters for i in range(ps)]
        return tokens + [7] * min(rest, ps - 1) + ([9] if self.is_bigram else [])

    def path(self, tokens: Sequence[int], extra_key: Any) -> Path:
        units: list[Any] = list(pairwise(tokens)) if self.is_bigram else list(tokens)
        return NaiveTree.path(units, self.page_size, extra_key)

    def path_of(self, req: FakeReq, num_tokens: int) -> Path:
        return self.path(req.tokens()[:num_tokens], req.extra_key)

    def at(self, *stages: str) -> list[Flight]:
        return [flight for flight in self.flights if flight.stage in stages]

    def growing(self) -> list[Flight]:
        """Return the requests that a batch may place: some of their tokens have no pages."""
        return [
            flight
            for flight in self.at(MATCHED, CACHED)
            if len(flight.req.prefix_indices) < len(flight.req.tokens())
        ]

    def pick(self, flights: list[Flight], move: Move) -> Flight:
        return flights[move.index % len(flights)]

    def relock(self, flight: Flight, path: Path | None) -> None:
        """Move the lock of a request in the model."""
        if path is not None:
            self.model.lock(path)
        if flight.path is not None:
            self.model.unlock(flight.path)
        flight.path = path

    def land(self, flight: Flight) -> None:
        self.relock(flight, None)
        self.flights.remove(flight)

    def by_class(self, pages: Any) -> list[int]:
        owners = np.asarray(pages, dtype=np.int64) % self.shard_size
        counts: list[int] = np.bincount(owners, minlength=self.shard_size).tolist()
        return counts

    def unlocked_by_class(self) -> list[int]:
        unlocked = [p.page for path, p in self.model.cached.items() if not self.model.locked(path)]
        return self.by_class(unlocked)

    def forget_evicted(self, num_tokens: int) -> list[int]:
        """Drop from the model what an eviction took, after checking that it might."""
        left = set(self.world.cached_pages())
        gone = [path for path, page in self.model.cached.items() if page.page not in left]
        pages = [self.model.cached.pop(path).page for path in gone]
        assert num_tokens == len(gone) * self.page_size
        for path in gone:
            assert not self.model.locked(path), "a locked page was evicted"
        for path in self.model.cached:
            assert len(path) == 2 or path[:-1] in self.model.cached, "a page lost its parent"
        return pages

    def stamp(self, path: Path, pages: Sequence[int], base: int | None) -> int | None:
        """Return the base that new pages get: their own, or the one that they show."""
        count, n = self.model.matched(path), self.shard_size
        new = pages[count : len(path) - 1]
        if base is not None or not new:
            return base
        if any((b - a) % n != 1 % n for a, b in pairwise(new)):
            return None
        derived = (new[0] - count) % n
        foreign = self.rotation == "chain" and count and self.model.base(path) != derived
        return None if foreign else derived

    def expect_insert(self, path: Path, pages: Sequence[int], base: int | None) -> bool:
        """Insert into the model and compare; says whether the insert was declined."""
        result = self.cache.last_insert
        assert result is not None
        declined = self.rotation == "chain" and self.model.declines(path, base)
        assert declined == result.rotation_tail_declined
        if declined:
            assert self.by_hand or not self.use_leases, "leased requests were declined"
            assert self.model.matched(path) * self.page_size == result.prefix_len
            return True
        stamp = self.stamp(path, pages, base)
        count, superfluous = self.model.insert(path, pages, base=stamp)
        assert count * self.page_size == result.prefix_len
        assert superfluous == result.duplicate_pages.tolist()
        assert self.model.pages(path) == result.pages.tolist()
        return False

    # Moves

    @rule(move=moves)
    def step(self, move: Move) -> None:
        getattr(self, move.kind)(move)

    def arrive(self, move: Move) -> None:
        """Take a request in; most are matched at once."""
        if len(self.flights) >= 5:
            return
        kv = BareKv() if move.flags[0] else FakeKv()
        tokens = self.expand(move.letters, move.sizes[0])
        req = FakeReq(tokens, kv=kv, extra_key="a" if move.index == 0 else None)
        self.flights.append(Flight(req))
        if move.flags[1] or move.index > 2:
            self.match_flight(self.flights[-1])

    def match(self, move: Move) -> None:
        """Match a request that waits; one that waits on is matched again."""
        flights = self.at(WAITING, MATCHED)
        if flights:
            self.match_flight(self.pick(flights, move))

    def match_flight(self, flight: Flight) -> None:
        req = flight.req
        req.fill_len = len(req.tokens())
        path = self.path_of(req, req.fill_len - 1)
        expected = self.model.match(path)
        assert len(expected) * self.page_size == self.cache.match_req(req)
        assert self.world.slots(expected) == list(req.prefix_indices)
        self.relock(flight, path[: len(expected) + 1])
        flight.stage, flight.row = MATCHED, expected

    def place(self, move: Move) -> None:
        """Place a batch of chunks, whole pages but the last of a request."""
        growing = self.growing()
        if not growing:
            self.arrive(move)
            return
        batch = [growing[(move.index + i) % len(growing)] for i in range(len(growing))]
        batch = batch[: len(move.sizes)]
        filled = [flight.req.fill_len for flight in batch]
        for flight, num_pages in zip(batch, move.sizes, strict=False):
            stop = len(flight.req.prefix_indices) + (num_pages + 1) * self.page_size
            flight.req.fill_len = min(stop, len(flight.req.tokens()))
        before = self.cache.state_digest()
        fits = self.preview([flight.req for flight in batch])
        assert before == self.cache.state_digest(), "a preview changed something"
        placed = alloc_for_extend(self.cache, [flight.req for flight in batch])
        assert fits == (placed is not None)
        if placed is None:
            assert before == self.cache.state_digest(), "a batch without room changed something"
            for flight, fill_len in zip(batch, filled, strict=True):
                flight.req.fill_len = fill_len
            return
        self.forget_evicted(placed.num_tokens_evicted)
        self.expect_placed(batch, placed.pages.tolist(), placed.rotation_bases)

    def preview(self, reqs: list[FakeReq]) -> bool:
        """Say whether a batch fits; the model's own counts must agree."""
        preview = preview_extend(self.cache, reqs)
        room = np.array(self.allocator.class_free_page_counts()) + self.unlocked_by_class()
        rows = sum(req.kv.req_pool_idx is None for req in reqs)
        fits = rows <= self.pool.available_size() and not (preview.pages_by_class > room).any()
        assert bool(fits) == preview.fits
        return preview.fits

    def expect_placed(self, batch: list[Flight], pages: list[int], bases: list[Any]) -> None:
        """Check that each row grew by its pages, and that these run over the ranks in turn."""
        for flight, base in zip(batch, bases, strict=True):
            req, have = flight.req, len(flight.row)
            total = -(-req.fill_len // self.page_size)
            new, pages = pages[: total - have], pages[total - have :]
            flight.row = [*flight.row, *new]
            flight.stage = PLACED
            owners = [page % self.shard_size for page in new]
            first = owners[0] if base is None and owners else (base or 0) + have
            assert owners == [(first + i) % self.shard_size for i in range(len(new))]
            assert base == req.kv_rotation_base
        assert not pages

    def cache_chunk(self, move: Move) -> None:
        flights = self.at(PLACED)
        if not flights:
            return
        flight = self.pick(flights, move)
        req = flight.req
        path = self.path_of(req, req.fill_len)
        whole = len(path) - 1
        covered = whole * self.page_size >= req.kv.cache_protected_len
        self.cache.cache_unfinished_req(req)
        flight.stage = CACHED
        if covered and not self.expect_insert(path, flight.row[:whole], req.kv_rotation_base):
            self.relock(flight, path)
            flight.row = self.model.pages(path) + list(flight.row[whole:])
            assert whole * self.page_size == req.kv.cache_protected_len
        assert self.world.slots(flight.row)[: req.fill_len] == list(req.prefix_indices)

    def finish(self, move: Move) -> None:
        """Finish with all that has been computed; or give up before there is a row."""
        flights = self.at(MATCHED, PLACED, CACHED)
        if not flights:
            return
        flight, insert = self.pick(flights, move), any(move.flags)
        req = flight.req
        has_row = req.kv.req_pool_idx is not None
        inserts = has_row and insert and req.fill_len > req.kv.cache_protected_len
        path, row, base = self.path_of(req, req.fill_len), flight.row, req.kv_rotation_base
        handled = req.fill_len if has_row else None
        self.cache.cache_finished_req(req, kv_len_to_handle=handled, is_insert=insert)
        if inserts:
            self.expect_insert(path, row[: len(path) - 1], base)
        digest = self.cache.state_digest()
        self.cache.cache_finished_req(req, kv_len_to_handle=handled, is_insert=insert)
        assert digest == self.cache.state_digest(), "a second finish did something"
        if has_row:
            self.pool.free(req.kv.req_pool_idx)
            req.kv.req_pool_idx = None
        self.land(flight)

    def give_up(self, move: Move) -> None:
        """Abort at any stage, or retract and queue again."""
        if not self.flights:
            return
        flight = self.pick(self.flights, move)
        leave = self.cache.retract if move.flags[0] else self.cache.abort
        leave(flight.req)
        digest = self.cache.state_digest()
        leave(flight.req)
        assert digest == self.cache.state_digest(), "leaving twice did something"
        assert flight.req.kv_rotation_base is None
        self.land(flight)
        if move.flags[0]:
            self.flights.append(Flight(flight.req))

    def place_inside_a_page(self, move: Move) -> None:
        """Only a request's last chunk may end inside a page."""
        flights, num_tokens = self.growing(), move.sizes[0]
        if not flights or not 0 < num_tokens < self.page_size:
            return
        req = self.pick(flights, move).req
        filled, stop = req.fill_len, len(req.prefix_indices) + num_tokens
        if stop >= len(req.tokens()):
            return
        before = self.cache.state_digest()
        req.fill_len = stop
        with pytest.raises(ValueError, match="must start and end on pages"):
            alloc_for_extend(self.cache, [req])
        req.fill_len = filled
        assert before == self.cache.state_digest()

    def insert_by_hand(self, move: Move) -> None:
        """Insert pages of nobody's, placed without asking for the chain's base."""
        if not self.by_hand or len(self.model.cached) > self.world.num_pages // 2:
            return
        tokens, n, step = self.expand(move.letters, 0), self.shard_size, 1 + move.flags[0]
        path = self.path(tokens, None)
        pages: list[int] = []
        for i in range(len(path) - 1):
            drawn = self.allocator.alloc_cyclic_pages((move.index + step * i) % n, 1)
            if drawn is None:
                self.allocator.free_pages(np.array(pages, dtype=np.int64))
                return
            pages += drawn.tolist()
        own = move.index % n if move.flags[1] and step == 1 else None
        params = InsertParams(self.world.key(tokens), pages=np.array(pages), rotation_base=own)
        self.cache.insert(params)
        if self.expect_insert(path, pages, own):
            self.allocator.free_pages(np.array(pages))

    def evict(self, move: Move) -> None:
        num_tokens = sum(move.sizes) * 2 - 1 if sum(move.sizes) else 0
        freed = self.cache.evict(EvictParams(num_tokens)).num_tokens_evicted
        assert len(self.forget_evicted(freed)) <= -(-num_tokens // self.page_size)

    def evict_for_classes(self, move: Move) -> None:
        """Each class gives what is wanted of it, as far as it has that unlocked."""
        wanted = [*move.sizes, 0, 0, 0, 0][: self.shard_size]
        had = self.unlocked_by_class()
        freed = self.cache.evict(EvictParams(0, tuple(wanted))).num_tokens_evicted
        got = self.by_class(self.forget_evicted(freed))
        assert all(g >= min(w, h) for g, w, h in zip(got, wanted, had, strict=True))
        assert sum(wanted) or not sum(got)

    # After every step

    @invariant()
    def cache_is_sound(self) -> None:
        self.world.check(*(flight.req for flight in self.flights))

    @invariant()
    def owners_are_cyclic_along_every_path(self) -> None:
        n, core = self.shard_size, self.cache.tree_core
        for node in core.nodes():
            base, parent = node.rotation_base, node.parent
            if base is not None:
                owners = [page % n for page in node.page_ids().tolist()]
                assert owners == [(base + P) % n for P in range(node.start, node.end)]
            if self.rotation == "chain" and parent is not core.root():
                assert base in (None, parent.rotation_base)

    @invariant()
    def every_class_is_whole(self) -> None:
        """Free, staged, held and cached pages of a class are its pages."""
        held = [p for f in self.flights for p in f.row[self.protected_pages(f) :]]
        cached = [page.page for page in self.model.cached.values()]
        counts = np.array(self.by_class(held)) + self.by_class(cached)
        counts += self.allocator.class_free_page_counts()
        assert counts.tolist() == [self.pages_per_rank] * self.shard_size
        assert sorted(cached) == self.world.cached_pages()
        assert sorted(held) == self.world.held_pages()

    def protected_pages(self, flight: Flight) -> int:
        return flight.req.kv.cache_protected_len // self.page_size

    @invariant()
    def rows_are_the_models(self) -> None:
        for flight in self.at(PLACED, CACHED):
            assert list(flight.row) == self.world.row(flight.req)

    @invariant()
    def leases_are_of_requests_in_flight(self) -> None:
        leases = len(self.cache.leases)
        assert leases <= len(self.at(PLACED, CACHED))
        assert not leases or (self.use_leases and self.rotation == "chain")

    def teardown(self) -> None:
        """Give everything back: no lease, no lock, and the pool is whole again."""
        for flight in list(self.flights):
            self.cache.abort(flight.req)
            self.land(flight)
        assert len(self.cache.leases) == 0
        assert self.cache.protected_size() == 0
        self.cache.evict(EvictParams(self.world.num_pages * self.page_size))
        assert self.allocator.page_census()[PageState.CACHED] == 0
        full = self.pages_per_rank * self.shard_size * self.page_size
        assert full == self.allocator.available_size()
        assert self.pool.size == self.pool.available_size()


SETTINGS = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def make_case(name: str, **world: Any) -> type:
    """Make the test case of one world."""
    case: Any = type(f"Machine{name}", (ShardedMachine,), world).TestCase
    case.settings = SETTINGS
    case.__name__ = case.__qualname__ = f"TestSharded{name}"
    case.__module__ = __name__
    return case


POLICIES: dict[str, dict[str, Any]] = {
    "Leases": {},
    "NoLeases": {"use_leases": False, "by_hand": True},
    "Seam": {"rotation": "seam", "by_hand": True},
}

for _name, _policy in POLICIES.items():
    for _n, _pages in ((2, 6), (3, 4), (4, 3)):
        for _ps in (1, 4):
            _case = make_case(
                f"{_name}Ranks{_n}Page{_ps}",
                shard_size=_n,
                page_size=_ps,
                pages_per_rank=_pages,
                **_policy,
            )
            globals()[_case.__name__] = _case

TestShardedNeedSort = make_case("NeedSort", page_size=4, need_sort=True)
TestShardedMixed = make_case("Mixed", shard_size=4, page_size=2, by_hand=True)
TestShardedBigram = make_case("Bigram", page_size=2, is_bigram=True)
del _case
