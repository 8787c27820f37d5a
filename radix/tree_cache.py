"""The prefix tree over one allocator's pages: the file that moves pages between owners.

The tree core decides and returns data; this file checks it against the allocator and applies it
once. Every page has one owner: a request holds it, or the cache does. An insert adopts the pages of
its tail from the caller and frees the caller's duplicates of what was cached already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from alloc import (
    PageIds,
    ReqToTokenPool,
    Slots,
    page_interleave_shard_size,
    pages_of_runs,
)
from alloc.spaces import as_count, as_int64
from radix import invariants
from radix.components import make_component
from radix.detached import DroppedRun, drop_pages
from radix.key import RadixKey
from radix.leases import LeaseTable
from radix.node import NodeId
from radix.params import (
    CacheInitParams,
    EvictParams,
    EvictResult,
    InsertParams,
    InsertResult,
    LockReceipt,
    MatchHandle,
    MatchPrefixParams,
    MatchResult,
    Req,
)
from radix.rotation import rotation_policy, stamp
from radix.tree_core import UnifiedTreeCore


class TreeCache:
    """A radix tree over one allocator's pages: match, insert, lock, evict by key.

    Not thread-safe: one scheduler thread owns tree and allocator.

    Args:
        params: see ``CacheInitParams``.

    Raises:
        ValueError: the page sizes differ, a policy or component is unknown, or the allocator is
            sharded and the core class does not support rotation bases.

    Attributes:
        tree_core: the tree; read-only use is fine.
        allocator: where pages come from and go back to.
    """

    def __init__(self, params: CacheInitParams) -> None:
        allocator = params.token_to_kv_pool_allocator
        page_size = as_count(params.page_size, "page_size")
        if page_size != allocator.page_size:
            raise ValueError(
                f"page_size={page_size} differs from the allocator's "
                f"page_size={allocator.page_size}"
            )
        self.is_sharded = page_interleave_shard_size(allocator) > 1
        if self.is_sharded and not UnifiedTreeCore.supports_rotation_base:
            raise ValueError(
                "a sharded allocator needs a tree core with rotation bases, and "
                f"{UnifiedTreeCore.__name__}.supports_rotation_base is False"
            )
        self.disable = params.disable
        self.page_size = page_size
        self.allocator = allocator
        self._generation = allocator.generation
        self.req_to_token_pool = params.req_to_token_pool
        self.is_bigram = params.is_bigram
        self.rotation = rotation_policy(params.rotation)
        self.use_leases = params.use_leases
        self.aimed_eviction = params.aimed_eviction
        self.leases = LeaseTable()
        self.tree_core = UnifiedTreeCore(
            self.page_size,
            make_component(params.tree_components, allocator.layout),
            params.eviction_policy,
            self.rotation,
        )
        if self.req_to_token_pool is not None:
            self.req_to_token_pool.check_slots(allocator.layout.num_pages * self.page_size)
            self.req_to_token_pool.bind_page_size(self.page_size)  # last: it changes the rows

    # Match

    def match_prefix(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest cached prefix of a key, in whole pages.

        Stamps and counts the use, and splits the edge in which the match ends; with ``peek``
        nothing changes. The pages stay cached only until the next evict: lock the node to keep
        them (``match_and_lock`` does both).

        Returns:
            The match; 0 at the root for an unknown key or one shorter than a page.
        """
        return self._match(params, lock=False)

    def match_and_lock(self, params: MatchPrefixParams) -> MatchResult:
        """Find the longest cached prefix and lock it in one operation; see ``receipt``.

        Raises:
            ValueError: ``peek`` is set, since a lock is a change.
        """
        if params.peek:
            raise ValueError("peek=True changes nothing, so it can't lock; use match_prefix")
        return self._match(params, lock=True)

    def _match(self, params: MatchPrefixParams, *, lock: bool) -> MatchResult:
        core, key = self.tree_core, params.key
        if not isinstance(key, RadixKey):
            raise ValueError(f"key is a {type(key).__name__}; pass a RadixKey")
        if self.disable:
            handle = MatchHandle(core.root_node_handle(), 0, key, [])
            receipt = core.inc_lock_ref(handle.node_id) if lock else None
            return MatchResult(handle, self.page_size, self._expand, receipt)
        if params.peek:
            return MatchResult(core.peek(key), self.page_size, self._expand)
        handle, receipt = core.match(key, count_hit=params.count_hit, lock=lock)
        return MatchResult(handle, self.page_size, self._expand, receipt)

    # Insert

    def insert(self, params: InsertParams) -> InsertResult:
        """Cache a key's whole pages.

        The tree adopts the pages past what it has, and the caller's duplicates of what it has are
        freed before the call returns. An insert whose base the chain refuses is declined as a
        whole: nothing is adopted, freed, split or stamped. A disabled cache takes nothing: all
        pages stay the caller's, to free.

        Raises:
            ValueError: not exactly one of value and pages, a value shorter than its key or not
                whole consecutive pages, a page that the caller does not hold, or (sharded) pages
                that don't lie where ``rotation_base`` says. Nothing changed.
        """
        pages = self._value_pages(params)
        core = self.tree_core
        if self.disable:
            return InsertResult(0, core.root_node_handle(), False, pages[:0], pages)
        plan = core.plan_insert(
            params.key,
            pages.tobytes(),
            rotation_base=params.rotation_base,
            priority=params.priority,
            handle=params.handle,
        )
        prefix_len = plan.walk.num_pages * self.page_size
        if plan.declined:
            deepest = plan.walk.deepest()
            node_id = core.root_node_handle() if deepest is None else deepest.id
            return InsertResult(prefix_len, node_id, True, pages[:0], pages[: plan.num_pages])
        stamp(plan, self.allocator.layout, self.rotation, derive=self.is_sharded)
        new, duplicates = pages[plan.walk.num_pages : plan.num_pages], plan.duplicate_pages
        if len(duplicates):
            self.allocator.check_held(np.concatenate([new, duplicates]))
        self._check_allocator()
        self.allocator.adopt_pages(new)
        node_id = core.commit_insert(plan)
        if len(duplicates):
            self.allocator.free_pages(duplicates)
        canonical = np.frombuffer(plan.pages, dtype=np.int64)
        return InsertResult(prefix_len, node_id, False, duplicates, canonical)

    def _value_pages(self, params: InsertParams) -> PageIds:
        if (params.value is None) == (params.pages is None):
            raise ValueError("pass exactly one of value (slots) and pages (page ids)")
        if not isinstance(params.key, RadixKey):
            raise ValueError(f"key is a {type(params.key).__name__}; pass a RadixKey")
        if not isinstance(params.handle, MatchHandle | None):
            raise ValueError(f"handle={params.handle!r} is no MatchHandle")
        num_pages = len(params.key) // self.page_size
        if params.pages is not None:
            return as_int64(params.pages, "pages")[:num_pages]
        locs = self.allocator.io.to_host(params.value)
        if len(locs) < len(params.key):
            raise ValueError(
                f"the value has {len(locs)} slots for a key of {len(params.key)}; "
                f"pass a value as long as the key"
            )
        return pages_of_runs(locs[: num_pages * self.page_size], self.page_size)

    # Locks

    def inc_lock_ref(self, node: NodeId) -> LockReceipt:
        """Lock a node and its path against eviction; see ``UnifiedTreeCore.inc_lock_ref``."""
        return self.tree_core.inc_lock_ref(node)

    def dec_lock_ref(self, receipt: LockReceipt) -> None:
        """Release a lock; see ``UnifiedTreeCore.dec_lock_ref``."""
        self.tree_core.dec_lock_ref(receipt)

    @contextmanager
    def locked(self, node: NodeId) -> Iterator[LockReceipt]:
        """Hold a lock for a ``with`` block; every way out releases it."""
        receipt = self.inc_lock_ref(node)
        try:
            yield receipt
        except BaseException:
            with suppress(ValueError):  # stale after a reset: the caller's error matters
                self.dec_lock_ref(receipt)
            raise
        self.dec_lock_ref(receipt)

    # Evict

    def evict(self, params: EvictParams) -> EvictResult:
        """Free ``ceil(num_tokens / page_size)`` pages, or as many as are unlocked.

        The least valuable unlocked leaf by the policy loses pages from its tail first. With
        ``class_deficits`` the eviction aims: see ``UnifiedTreeCore.evict_classes``.

        Raises:
            ValueError: num_tokens or a deficit is negative, or there is not one deficit a class.
            RuntimeError: the allocator was cleared since the cache was built or reset.
        """
        self._check_allocator()
        return self._release(drop_pages(self.tree_core, self.allocator.layout, params))

    def detach(self, params: EvictParams) -> list[DroppedRun]:
        """Evict from the tree alone; the caller copies the pages, then calls ``release_runs``."""
        self._check_allocator()
        runs: list[DroppedRun] = []
        drop_pages(self.tree_core, self.allocator.layout, params, runs)
        return runs

    def release_runs(self, runs: Iterable[DroppedRun]) -> EvictResult:
        """Free the pages of detached runs."""
        dropped = [run.dropped() for run in runs]
        return self._release(np.concatenate(dropped)) if dropped else EvictResult()

    def _release(self, pages: PageIds) -> EvictResult:
        if len(pages):
            self.allocator.release_cached(pages)
        return EvictResult(len(pages) * self.page_size)

    def key_of(self, req: Req, tokens: Sequence[int]) -> RadixKey:
        """Return the key of a request's tokens in its namespace."""
        return RadixKey(tokens, req.extra_key, req.cache_salt, self.is_bigram)

    def pool(self) -> ReqToTokenPool:
        """Return the request rows. Raises RuntimeError when the cache was built without."""
        if self.req_to_token_pool is None:
            raise RuntimeError(
                "this call needs request rows; build the cache with a ReqToTokenPool"
            )
        return self.req_to_token_pool

    # Sizes and reset

    def rotation_base_of(self, node: NodeId | None) -> int | None:
        """Return a node's rotation base; None for None and for the root. Host data only."""
        return None if node is None else self.tree_core.node_by_id(node).rotation_base

    def evictable_size(self) -> int:
        """Return the cached tokens that no lock protects."""
        return self.tree_core.component.evictable_pages() * self.page_size

    def protected_size(self) -> int:
        """Return the cached tokens under a lock."""
        return self.tree_core.component.protected_pages() * self.page_size

    def total_size(self) -> int:
        """Return the cached tokens."""
        return self.evictable_size() + self.protected_size()

    def reset(self) -> None:
        """Drop the whole tree and release its pages; locks and handles from before are stale.

        Pages that requests hold stay theirs. After ``allocator.clear()`` there is nothing to
        release, and the cache works again.
        """
        pages = self.tree_core.reset()
        self.leases.clear()
        if len(pages) and self._generation == self.allocator.generation:
            self.allocator.release_cached(pages)
        self._generation = self.allocator.generation

    def _check_allocator(self) -> None:
        if self._generation != self.allocator.generation:
            raise RuntimeError(
                "the allocator was cleared under the cache, whose pages are nobody's now; call "
                "reset() on the cache"
            )

    # Checks

    def check_invariants(self, reqs: Iterable[Req] | None = None) -> None:
        """Raise RuntimeError that lists every broken rule of tree, allocator and requests.

        Args:
            reqs: all live requests, when every held page is known to be one of theirs; their
                rows and locks are checked too. Works while locks are held. Cost: O(pool + tree).
        """
        found = invariants.cache_violations(self, None if reqs is None else list(reqs))
        if found:
            raise RuntimeError("; ".join(found))

    def state_digest(self) -> str:
        """Return a hash of tree, allocator and rows; equal on replicas fed the same calls."""
        return invariants.cache_digest(self)

    def pretty_print(self) -> str:
        """Return the tree as text, one line a node, children indented below their parent."""
        return invariants.tree_text(self.tree_core)

    def _expand(self, pages: PageIds) -> Slots:
        out = self.allocator.io.empty(len(pages) * self.page_size)
        self.allocator.io.fill_pages(out, pages, self.page_size)
        return out
