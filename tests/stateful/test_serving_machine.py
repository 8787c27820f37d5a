"""Requests in every order of calls, against a plain dictionary of cached pages.

Tiny worlds make collisions, splits, exhaustion and evictions common. After each step the cache's
own invariants hold, and sizes, rows and matches are the model's; every victim is the model's.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from alloc import PageState
from radix import EvictParams, InsertParams, LockReceipt, MatchHandle, MatchPrefixParams, RadixKey
from tests.builders import BareKv, FakeKv, FakeReq, World, make_world
from tests.models.naive_tree import NAIVE_POLICIES, NaiveTree, Path

SPACES = [(None, None), ("a", None), (None, "a")]


@dataclass
class Held:
    """A lock outside any request."""

    receipt: LockReceipt
    path: Path


class ServingMachine(RuleBasedStateMachine):
    """One scheduler over one cache; subclasses choose the world."""

    page_size: ClassVar[int] = 1
    num_pages: ClassVar[int] = 12
    policy: ClassVar[str] = "lru"
    is_bigram: ClassVar[bool] = False
    need_sort: ClassVar[bool] = False

    def __init__(self) -> None:
        super().__init__()
        self.world = self.make_world()
        self.model = NaiveTree(self.policy)
        self.live: list[FakeReq] = []
        self.waiting: list[FakeReq] = []
        self.paths: dict[int, Path] = {}  # what each live request has locked
        self.rows: dict[int, list[int]] = {}  # the pages that each live request's row must show
        self.held: list[Held] = []
        self.used: list[LockReceipt] = []
        self.handles: list[MatchHandle] = []

    def make_world(self) -> World:
        return make_world(
            self.page_size,
            self.num_pages,
            self.policy,
            is_bigram=self.is_bigram,
            need_sort=self.need_sort,
            rows=4,
            context=self.page_size * self.num_pages * 2,
        )

    # Helpers

    def expand(self, letters: list[int], rest: int) -> list[int]:
        """Make tokens: a page a letter, then ``rest`` tokens of one more page."""
        ps = self.page_size
        tokens = [letter * 10 + min(i, 1) for letter in letters for i in range(ps)]
        return tokens + [7] * min(rest, ps - 1) + ([9] if self.is_bigram else [])

    def path(self, tokens: list[int], space: tuple[Any, Any] = (None, None)) -> Path:
        units: list[Any] = list(tokens)
        if self.is_bigram:
            units = list(pairwise(tokens))
        return NaiveTree.path(units, self.page_size, space)

    def path_of(self, req: FakeReq, num_tokens: int) -> Path:
        return self.path(req.tokens()[:num_tokens], (req.extra_key, req.cache_salt))

    def pick(self, items: list[Any], index: int) -> Any:
        return items[index % len(items)]

    def drop(self, req: FakeReq) -> None:
        self.live.remove(req)
        del self.rows[id(req)]
        path = self.paths.pop(id(req))
        self.model.unlock(path)

    def evict_pages(self, count: int) -> int:
        """Evict, and check the victims and their number against the model."""
        before = set(self.world.cached_pages())
        expected = self.model.victims(count)
        freed = self.world.evict(count * self.page_size)
        gone = before - set(self.world.cached_pages())
        assert sorted(expected) == sorted(gone)
        assert len(expected) * self.page_size == freed
        return len(expected)

    # Requests

    @rule(
        letters=st.lists(st.integers(0, 1), min_size=1, max_size=6),
        rest=st.integers(0, 15),
        space=st.sampled_from(SPACES),
        priority=st.integers(0, 2),
        bare=st.booleans(),
    )
    def submit(
        self, letters: list[int], rest: int, space: tuple[Any, Any], priority: int, bare: bool
    ) -> None:
        if len(self.waiting) < 3:
            req = FakeReq(
                self.expand(letters, rest),
                kv=BareKv() if bare else FakeKv(),
                extra_key=space[0],
                cache_salt=space[1],
                priority=priority,
            )
            self.waiting.append(req)

    @precondition(lambda self: self.waiting and len(self.live) < 4)
    @rule(index=st.integers(0, 9), first=st.booleans())
    def start(self, index: int, first: bool) -> None:
        req = self.waiting.pop(index % len(self.waiting))
        path = self.path_of(req, len(req.tokens()) - 1)
        expected = self.model.match(path, hits=1 if first else 0)
        got = self.world.start(req, count_hit=first)
        assert len(expected) * self.page_size == got
        assert self.world.slots(expected) == list(req.prefix_indices)
        self.live.append(req)
        self.paths[id(req)] = path[: len(expected) + 1]
        self.rows[id(req)] = expected
        self.model.lock(self.paths[id(req)])

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9), num_tokens=st.integers(1, 40), evict=st.booleans())
    def extend(self, index: int, num_tokens: int, evict: bool) -> None:
        req = self.pick(self.live, index)
        num_tokens = min(num_tokens, len(req.tokens()) - req.fill_len)
        need = self.world.pages_needed(req, num_tokens)
        if evict:
            self.evict_pages(max(0, need - self.world.free_pages()))
        before = self.world.cache.state_digest()
        fits = need <= self.world.free_pages()
        assert fits == self.world.extend(req, num_tokens)
        if fits:
            row = self.world.row(req)
            assert self.rows[id(req)] == row[: len(self.rows[id(req)])]
            self.rows[id(req)] = row
        else:
            assert before == self.world.cache.state_digest()

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9), letters=st.lists(st.integers(0, 1), min_size=1, max_size=2))
    def generate(self, index: int, letters: list[int]) -> None:
        req = self.pick(self.live, index)
        if len(req.tokens()) < 10 * self.page_size:
            req.output_ids += self.expand(letters, 3)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9))
    def cache_chunk(self, index: int) -> None:
        req = self.pick(self.live, index)
        path = self.path_of(req, req.fill_len)
        before, row = self.world.cache.state_digest(), self.rows[id(req)]
        covered = (len(path) - 1) * self.page_size >= req.kv.cache_protected_len
        self.world.cache.cache_unfinished_req(req)
        if not covered:  # a bigram short of what its own match protects
            assert before == self.world.cache.state_digest()
            return
        self.model.insert(path, row, req.priority)
        self.model.lock(path)
        self.model.unlock(self.paths[id(req)])
        self.paths[id(req)] = path
        whole = len(path) - 1
        self.rows[id(req)] = self.model.pages(path) + row[whole:]
        assert whole * self.page_size == req.kv.cache_protected_len
        assert self.world.slots(self.rows[id(req)])[: req.fill_len] == list(req.prefix_indices)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9), insert=st.booleans(), short=st.integers(0, 3))
    def finish(self, index: int, insert: bool, short: int) -> None:
        req = self.pick(self.live, index)
        if not isinstance(req.kv, FakeKv):
            short = 0  # without allocated_len nobody knows of pages past the handled length
        handled = max(req.kv.cache_protected_len, req.fill_len - short)
        if insert and handled > req.kv.cache_protected_len:
            self.model.insert(self.path_of(req, handled), self.rows[id(req)], req.priority)
        self.world.cache.cache_finished_req(req, kv_len_to_handle=handled, is_insert=insert)
        digest = self.world.cache.state_digest()
        self.world.cache.cache_finished_req(req, kv_len_to_handle=handled, is_insert=insert)
        assert digest == self.world.cache.state_digest(), "a second finish did something"
        self.world.pool.free(req.kv.req_pool_idx)
        req.kv.req_pool_idx = None
        self.drop(req)

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9))
    def abort(self, index: int) -> None:
        req = self.pick(self.live, index)
        self.world.cache.abort(req)
        self.drop(req)
        digest = self.world.cache.state_digest()
        self.world.cache.abort(req)
        assert digest == self.world.cache.state_digest(), "a second abort did something"

    @precondition(lambda self: self.live)
    @rule(index=st.integers(0, 9))
    def retract(self, index: int) -> None:
        req = self.pick(self.live, index)
        self.world.cache.retract(req)
        self.drop(req)
        req.fill_len = 0
        self.waiting.append(req)

    # The tree by itself

    @rule(
        letters=st.lists(st.integers(0, 1), max_size=6),
        rest=st.integers(0, 15),
        space=st.sampled_from(SPACES),
        peek=st.booleans(),
    )
    def look_up(self, letters: list[int], rest: int, space: tuple[Any, Any], peek: bool) -> None:
        tokens = self.expand(letters, rest)
        path = self.path(tokens, space)
        before = self.world.cache.state_digest()
        match = self.world.match(tokens, *space, peek=peek)
        if peek:
            assert before == self.world.cache.state_digest()
            assert self.model.pages(path) == match.pages.tolist()
        else:
            assert self.model.match(path) == match.pages.tolist()
        assert len(self.model.pages(path)) * self.page_size == match.device_prefix_len
        self.handles.append(match.handle)
        del self.handles[:-4]

    @rule(
        letters=st.lists(st.integers(0, 1), max_size=6),
        rest=st.integers(0, 15),
        space=st.sampled_from(SPACES),
        priority=st.integers(0, 2),
        shared=st.integers(0, 6),
        handle=st.integers(0, 9),
    )
    def insert(
        self,
        letters: list[int],
        rest: int,
        space: tuple[Any, Any],
        priority: int,
        shared: int,
        handle: int,
    ) -> None:
        """Insert pages of nobody's; the first ``shared`` are the tree's own, where it has them."""
        tokens = self.expand(letters, rest)
        path = self.path(tokens, space)
        known = self.model.pages(path)[:shared]
        drawn = self.world.allocator.alloc_pages(len(path) - 1 - len(known))
        if drawn is None:
            return
        pages = known + drawn.tolist()
        count, superfluous = self.model.insert(path, pages, priority)
        result = self.world.cache.insert(
            InsertParams(
                RadixKey(tokens, *space, is_bigram=self.is_bigram),
                pages=np.asarray(pages, dtype=np.int64),
                priority=priority,
                handle=self.pick([None, *self.handles], handle),
            )
        )
        assert count * self.page_size == result.prefix_len
        assert superfluous == result.duplicate_pages.tolist()
        assert self.model.pages(path) == result.pages.tolist()
        assert not result.rotation_tail_declined
        if superfluous:
            assert self.world.allocator.free_list.all_in(
                result.duplicate_pages, PageState.STAGED if self.need_sort else PageState.FREE
            )

    @rule(letters=st.lists(st.integers(0, 1), max_size=5), space=st.sampled_from(SPACES))
    def lock(self, letters: list[int], space: tuple[Any, Any]) -> None:
        if len(self.held) >= 3:
            return
        tokens = self.expand(letters, 0)
        path = self.path(tokens, space)
        found = self.model.match(path)
        match = self.world.cache.match_and_lock(
            MatchPrefixParams(RadixKey(tokens, *space, is_bigram=self.is_bigram))
        )
        assert match.receipt is not None
        self.held.append(Held(match.receipt, path[: len(found) + 1]))
        self.model.lock(self.held[-1].path)

    @precondition(lambda self: self.held)
    @rule(index=st.integers(0, 9))
    def unlock(self, index: int) -> None:
        held = self.held.pop(index % len(self.held))
        self.world.cache.dec_lock_ref(held.receipt)
        self.model.unlock(held.path)
        self.used.append(held.receipt)

    @precondition(lambda self: self.used)
    @rule(index=st.integers(0, 9))
    def unlock_again(self, index: int) -> None:
        before = self.world.cache.state_digest()
        with pytest.raises(ValueError, match="used already"):
            self.world.cache.dec_lock_ref(self.pick(self.used, index))
        assert before == self.world.cache.state_digest()

    @rule(num_tokens=st.integers(0, 40))
    def evict(self, num_tokens: int) -> None:
        self.evict_pages(-(-num_tokens // self.page_size))

    @rule()
    def evict_less_than_nothing(self) -> None:
        before = self.world.cache.state_digest()
        with pytest.raises(ValueError, match="negative"):
            self.world.cache.evict(EvictParams(-1))
        assert before == self.world.cache.state_digest()

    @rule(really=st.integers(0, 7))
    def reset(self, really: int) -> None:
        """Flush between requests; locks from before are stale afterwards."""
        if really:
            return
        for req in list(self.live):
            self.world.cache.abort(req)
            self.drop(req)
        self.world.cache.reset()
        self.model.reset()
        self.used += [held.receipt for held in self.held]
        self.held.clear()
        assert self.world.sizes() == (0, 0)

    @initialize()
    def nothing_yet(self) -> None:
        assert self.world.sizes() == (0, 0)

    # After every step

    @invariant()
    def cache_is_sound(self) -> None:
        self.world.check(*self.live)

    @invariant()
    def sizes_and_pages_are_the_models(self) -> None:
        evictable, protected = self.model.sizes()
        ps = self.page_size
        assert (evictable * ps, protected * ps) == self.world.sizes()
        assert sorted(p.page for p in self.model.cached.values()) == self.world.cached_pages()

    @invariant()
    def rows_are_the_models(self) -> None:
        for req in self.live:
            assert self.rows[id(req)] == self.world.row(req)

    def teardown(self) -> None:
        """Give everything back: the pool is whole again."""
        for req in list(self.live):
            self.world.cache.abort(req)
            self.drop(req)
        for held in self.held:
            self.world.cache.dec_lock_ref(held.receipt)
            self.model.unlock(held.path)
        self.evict_pages(self.num_pages)
        self.world.check()
        assert self.num_pages == self.world.free_pages()
        assert self.world.pool.size == self.world.pool.available_size()


SETTINGS = settings(
    max_examples=12,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


def make_case(name: str, **world: Any) -> type:
    """Make the test case of one world."""
    machine = type(f"Machine{name}", (ServingMachine,), world)
    case = machine.TestCase
    case.settings = SETTINGS
    case.__name__ = case.__qualname__ = f"TestServing{name}"
    case.__module__ = __name__
    return case


for _policy in NAIVE_POLICIES:
    for _ps, _pages in ((1, 12), (4, 10), (16, 8)):
        _case = make_case(
            f"{_policy.title()}Page{_ps}", policy=_policy, page_size=_ps, num_pages=_pages
        )
        globals()[_case.__name__] = _case

TestServingBigram = make_case("Bigram", page_size=2, is_bigram=True)
TestServingNeedSort = make_case("NeedSort", page_size=4, need_sort=True)
del _case
