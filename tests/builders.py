"""Builders for tests of tree, cache and requests: a small world, and requests as plain data."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from alloc import (
    BaseTokenToKVPoolAllocator,
    PagedTokenToKVPoolAllocator,
    PageIds,
    PageInterleavePoolAllocator,
    PageState,
    ReqToTokenPool,
    TokenToKVPoolAllocator,
    ceil_div,
)
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    InsertResult,
    LockReceipt,
    MatchHandle,
    MatchPrefixParams,
    MatchResult,
    NodeId,
    RadixKey,
    TreeNode,
    UnifiedRadixCache,
)


@dataclass
class BareKv:
    """The KV fields that the ``Req`` protocol demands, and no more."""

    req_pool_idx: int | None = None
    cache_protected_len: int = 0


@dataclass
class FakeKv(BareKv):
    """KV fields with the optional ``allocated_len``."""

    allocated_len: int = 0


@dataclass(eq=False)
class FakeReq:
    """A request: the ``Req`` protocol as plain data. ``fill_len`` tokens have KV."""

    origin_input_ids: Sequence[int]
    output_ids: list[int] = field(default_factory=list)
    kv: BareKv = field(default_factory=FakeKv)
    extra_key: Any = None
    cache_salt: Any = None
    prefix_indices: Any = None
    last_node: NodeId | None = None
    lock_receipt: LockReceipt | None = None
    priority: int = 0
    kv_rotation_base: int | None = None
    fill_len: int = 0

    def tokens(self) -> list[int]:
        return [*self.origin_input_ids, *self.output_ids]

    def get_fill_ids(self) -> list[int]:
        return self.tokens()[: self.fill_len]


@dataclass
class World:
    """An allocator, request rows and a cache over them, with short calls for tests."""

    allocator: BaseTokenToKVPoolAllocator
    pool: ReqToTokenPool
    cache: UnifiedRadixCache
    num_pages: int
    shard_size: int = 1

    @property
    def page_size(self) -> int:
        return self.cache.page_size

    @property
    def core(self) -> Any:
        return self.cache.tree_core

    # Keys and pages

    def key(self, tokens: Any, extra_key: Hashable = None, cache_salt: Hashable = None) -> RadixKey:
        return RadixKey(tokens, extra_key, cache_salt, self.cache.is_bigram)

    def draw(self, num_pages: int, base: int | None = None, start: int = 0) -> PageIds:
        """Take pages as a request would; on a sharded pool cyclically from ``base``."""
        if isinstance(self.allocator, PageInterleavePoolAllocator):
            first = ((base or 0) + start) % self.shard_size
            pages = self.allocator.alloc_cyclic_pages(first, num_pages)
        else:
            pages = self.allocator.alloc_pages(num_pages)
        assert pages is not None, "the test's pool is too small"
        return pages

    def slots(self, pages: Iterable[int]) -> list[int]:
        ps = self.page_size
        return [page * ps + i for page in pages for i in range(ps)]

    def free_pages(self) -> int:
        """Pages that are free or staged."""
        census = self.allocator.page_census()
        return census[PageState.FREE] + census[PageState.STAGED]

    # The cache's calls

    def insert(
        self,
        tokens: Any,
        pages: Any = None,
        *,
        base: int | None = None,
        stamp: bool = True,
        priority: int = 0,
        handle: MatchHandle | None = None,
        extra_key: Hashable = None,
        cache_salt: Hashable = None,
    ) -> InsertResult:
        """Insert tokens; draws fresh pages for them when none are given.

        ``stamp=False`` places the pages by ``base`` and passes no base to the insert.
        """
        key = self.key(tokens, extra_key, cache_salt)
        if pages is None:
            pages = self.draw(len(key) // self.page_size, base)
        return self.cache.insert(
            InsertParams(
                key,
                pages=np.asarray(pages, dtype=np.int64),
                rotation_base=base if stamp else None,
                priority=priority,
                handle=handle,
            )
        )

    def match(
        self, tokens: Any, extra_key: Hashable = None, cache_salt: Hashable = None, **options: bool
    ) -> MatchResult:
        key = self.key(tokens, extra_key, cache_salt)
        return self.cache.match_prefix(MatchPrefixParams(key, **options))

    def peek_len(self, tokens: Any, extra_key: Hashable = None, cache_salt: Hashable = None) -> int:
        return self.match(tokens, extra_key, cache_salt, peek=True).device_prefix_len

    def lock(self, tokens: Any) -> LockReceipt:
        """Match all of ``tokens`` and lock where that ends."""
        return self.cache.inc_lock_ref(self.match(tokens, count_hit=False).last_device_node)

    def evict(self, num_tokens: int) -> int:
        return self.cache.evict(EvictParams(num_tokens)).num_tokens_evicted

    def node(self, tokens: Any, **space: Hashable) -> TreeNode:
        """Return the deepest node that ``tokens`` reach, without touching anything."""
        return self.core.node_by_id(self.match(tokens, peek=True, **space).last_device_node)

    # Requests

    def start(self, req: FakeReq, num_tokens: int | None = None, **options: bool) -> int:
        """Match, lock and give a row, as a scheduler does when it plans a request.

        Args:
            req: a request without a row.
            num_tokens: cap of the matched prefix; default all tokens but the last.
            options: of the match.

        Returns:
            The tokens that were cached.
        """
        cap = len(req.tokens()) - 1 if num_tokens is None else num_tokens
        key = self.key(req.tokens()[:cap], req.extra_key, req.cache_salt)
        match = self.cache.match_and_lock(MatchPrefixParams(key, **options))
        rows = self.pool.alloc(1)
        assert rows is not None, "the test's request pool is too small"
        req.kv.req_pool_idx = rows[0]
        req.kv.cache_protected_len = match.device_prefix_len
        req.prefix_indices = match.device_indices
        req.last_node, req.lock_receipt = match.last_device_node, match.receipt
        req.kv_rotation_base = self.cache.rotation_base_of(match.last_device_node)
        req.fill_len = match.device_prefix_len
        self.pool.write(rows[0], 0, pages=match.pages)
        if isinstance(req.kv, FakeKv):
            req.kv.allocated_len = match.device_prefix_len
        return match.device_prefix_len

    def pages_needed(self, req: FakeReq, num_tokens: int) -> int:
        ps = self.page_size
        return ceil_div(req.fill_len + num_tokens, ps) - ceil_div(req.fill_len, ps)

    def extend(self, req: FakeReq, num_tokens: int) -> bool:
        """Give a request the KV of its next tokens; False, with nothing changed, when short."""
        ps, old = self.page_size, req.fill_len
        have = ceil_div(old, ps)
        pages = self._draw_for(req, have, self.pages_needed(req, num_tokens))
        if pages is None:
            return False
        row = req.kv.req_pool_idx
        assert row is not None, "start the request first"
        known = self.pool.pages(row, 0, have * ps)
        slots = np.asarray(self.slots(np.concatenate([known, pages]).tolist()), dtype=np.int64)
        new = slots[old : old + num_tokens]
        self.pool.write(row, old, self.pool.io.from_host(new))
        req.fill_len = old + num_tokens
        if isinstance(req.kv, FakeKv):
            req.kv.allocated_len = req.fill_len
        return True

    def _draw_for(self, req: FakeReq, have: int, count: int) -> PageIds | None:
        if not isinstance(self.allocator, PageInterleavePoolAllocator):
            return self.allocator.alloc_pages(count)
        base = req.kv_rotation_base
        if base is None:
            base = (self.allocator.least_full_class() - have) % self.shard_size
        pages = self.allocator.alloc_cyclic_pages((base + have) % self.shard_size, count)
        if pages is not None:
            req.kv_rotation_base = base
        return pages

    def run(self, req: FakeReq, chunk: int | None = None) -> int:
        """Start a request and prefill it, caching after each chunk; returns the cached tokens."""
        cached = self.start(req)
        while req.fill_len < len(req.tokens()):
            step = min(chunk or len(req.tokens()), len(req.tokens()) - req.fill_len)
            assert self.extend(req, step), "the test's pool is too small"
            if req.fill_len < len(req.tokens()):
                self.cache.cache_unfinished_req(req)
        return cached

    def finish(self, req: FakeReq, **options: Any) -> None:
        """Finish a request and give its row back."""
        self.cache.cache_finished_req(req, **options)
        if req.kv.req_pool_idx is not None:
            self.pool.free(req.kv.req_pool_idx)
            req.kv.req_pool_idx = None

    def row(self, req: FakeReq) -> list[int]:
        """Return the page ids of the tokens that have KV."""
        assert req.kv.req_pool_idx is not None, "the request has no row"
        return self.pool.pages(req.kv.req_pool_idx, 0, req.fill_len).tolist()

    # Checks

    def check(self, *reqs: FakeReq) -> None:
        """Check all invariants; ``reqs`` are all live requests."""
        self.cache.check_invariants(list(reqs))

    def sizes(self) -> tuple[int, int]:
        """Return (evictable, protected) tokens."""
        return self.cache.evictable_size(), self.cache.protected_size()

    def cached_pages(self) -> list[int]:
        return self.allocator.pages_in(PageState.CACHED).tolist()

    def held_pages(self) -> list[int]:
        return self.allocator.pages_in(PageState.HELD).tolist()


def make_allocator(
    page_size: int = 1,
    num_pages: int = 64,
    *,
    shard_size: int = 1,
    device: Any = None,
    need_sort: bool = False,
    debug: bool = True,
) -> BaseTokenToKVPoolAllocator:
    """Make the allocator that fits: token, paged or page-interleave (``num_pages`` a rank)."""
    size = num_pages * page_size
    if shard_size > 1:
        return PageInterleavePoolAllocator(
            size, page_size, shard_size, None, device, None, need_sort, debug=debug
        )
    if page_size == 1:
        return TokenToKVPoolAllocator(size, None, device, None, need_sort, debug=debug)
    return PagedTokenToKVPoolAllocator(size, page_size, None, device, None, need_sort, debug=debug)


def make_world(
    page_size: int = 1,
    num_pages: int = 64,
    policy: str = "lru",
    *,
    shard_size: int = 1,
    device: Any = None,
    need_sort: bool = False,
    disable: bool = False,
    is_bigram: bool = False,
    rotation: str = "chain",
    rows: int = 8,
    context: int = 1024,
) -> World:
    """Make a fresh world; ``num_pages`` are usable pages, of one rank when sharded."""
    allocator = make_allocator(
        page_size, num_pages, shard_size=shard_size, device=device, need_sort=need_sort
    )
    pool = ReqToTokenPool(rows, context, device, page_size=page_size, debug=True)
    cache = UnifiedRadixCache(
        CacheInitParams(
            disable,
            pool,
            allocator,
            page_size,
            eviction_policy=policy,
            is_bigram=is_bigram,
            rotation=rotation,
        )
    )
    return World(allocator, pool, cache, num_pages * shard_size, shard_size)


def make_req(tokens: Sequence[int], **fields: Any) -> FakeReq:
    """Make a request over ``tokens``; ``fields`` are those of ``FakeReq``."""
    return FakeReq(list(tokens), **fields)
