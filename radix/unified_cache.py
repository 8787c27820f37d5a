"""The prefix cache as a scheduler sees it: the only file that moves pages between owners.

The tree core decides and returns data; this file checks it against the allocator and applies it
once. Every page has one owner: a request holds it, or the cache does. An insert adopts the pages of
its tail from the request and frees the request's duplicates of what was cached already:

    positions of a request at an insert

        0 .......... protected | ......... matched | ......... whole pages | .... tail
        the cache's, by lock   | duplicates: freed | adopted by the cache  | the request's
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress

import numpy as np

from alloc import (
    PageIds,
    ReqToTokenPool,
    Slots,
    ceil_div,
    page_interleave_shard_size,
    pages_of_runs,
)
from alloc.spaces import as_int64
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


class UnifiedRadixCache:
    """A radix tree over one allocator's pages, with the calls that a scheduler makes.

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
        if params.page_size != allocator.page_size:
            raise ValueError(
                f"page_size={params.page_size} differs from the allocator's "
                f"page_size={allocator.page_size}"
            )
        self.is_sharded = page_interleave_shard_size(allocator) > 1
        if self.is_sharded and not UnifiedTreeCore.supports_rotation_base:
            raise ValueError(
                "a sharded allocator needs a tree core with rotation bases, and "
                f"{UnifiedTreeCore.__name__}.supports_rotation_base is False"
            )
        self.disable = params.disable
        self.page_size = params.page_size
        self.allocator = allocator
        self.req_to_token_pool = params.req_to_token_pool
        if self.req_to_token_pool is not None:
            self.req_to_token_pool.bind_page_size(params.page_size)
        self.is_bigram = params.is_bigram
        self.rotation = rotation_policy(params.rotation)
        self.use_leases = params.use_leases
        self.aimed_eviction = params.aimed_eviction
        self.leases = LeaseTable()
        self.tree_core = UnifiedTreeCore(
            params.page_size,
            make_component(params.tree_components, allocator.layout),
            params.eviction_policy,
            self.rotation,
        )

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
        whole: nothing is adopted, freed, split or stamped.

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
        self.allocator.adopt_pages(new)
        node_id = core.commit_insert(plan)
        if len(duplicates):
            self.allocator.free_pages(duplicates)
        canonical = np.frombuffer(plan.pages, dtype=np.int64)
        return InsertResult(prefix_len, node_id, False, duplicates, canonical)

    def _value_pages(self, params: InsertParams) -> PageIds:
        if (params.value is None) == (params.pages is None):
            raise ValueError("pass exactly one of value (slots) and pages (page ids)")
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
        finally:
            self.dec_lock_ref(receipt)

    # Evict

    def evict(self, params: EvictParams) -> EvictResult:
        """Free ``ceil(num_tokens / page_size)`` pages, or as many as are unlocked.

        The least valuable unlocked leaf by the policy loses pages from its tail first. With
        ``class_deficits`` the eviction aims: see ``UnifiedTreeCore.evict_classes``.

        Raises:
            ValueError: num_tokens or a deficit is negative, or there is not one deficit a class.
        """
        return self._release(drop_pages(self.tree_core, self.allocator.layout, params))

    def detach(self, params: EvictParams) -> list[DroppedRun]:
        """Evict from the tree alone; the caller copies the pages, then calls ``release_runs``."""
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

    # Requests

    def match_req(self, req: Req, *, max_prefix_len: int | None = None) -> int:
        """Match and lock a request's prefix, and put the result on the request.

        Sets ``prefix_indices``, ``last_node``, ``lock_receipt`` and ``kv.cache_protected_len``.
        A request that was matched before and has no row yet moves its lock and counts no new hit.

        Args:
            req: a request without a row.
            max_prefix_len: match at most this many tokens; default all but the last one, whose
                logits have to be computed.

        Returns:
            The matched tokens.

        Raises:
            ValueError: the request has a row, and with it pages past its prefix.
        """
        if req.kv.req_pool_idx is not None:
            raise ValueError("the request has a row; retract it before matching it again")
        self._check_lock(req)
        tokens = req.get_fill_ids()
        limit = len(tokens) - 1 if max_prefix_len is None else max_prefix_len
        match = self.match_and_lock(
            MatchPrefixParams(
                self.key_of(req, tokens[: max(0, limit)]), count_hit=req.lock_receipt is None
            )
        )
        self._unlock(req)
        req.lock_receipt = match.receipt
        req.last_node = match.last_device_node
        req.prefix_indices = match.device_indices
        req.kv.cache_protected_len = match.device_prefix_len
        return match.device_prefix_len

    def cache_unfinished_req(self, req: Req) -> InsertResult | None:
        """Cache the whole pages of a request that goes on, and hand it the canonical slots.

        Frees the request's duplicates, rewrites its row where they were, moves its lock to the
        end of what is cached, and sets ``prefix_indices``, ``last_node`` and
        ``kv.cache_protected_len``. Declined: the request stays on its own pages; only
        ``prefix_indices`` is set, to its own slots.

        Returns:
            What the insert found; None when nothing was inserted.

        Cost: O(tokens of the request) to read its ids.
        """
        self._check_lock(req)
        tokens = req.get_fill_ids()
        row_pages = self._row_pages(req, len(tokens))
        key = self.key_of(req, tokens)
        num_pages = len(key) // self.page_size
        # Tokens just matched are one bigram short of what the match protects; that must not shrink.
        if self.disable or num_pages * self.page_size < req.kv.cache_protected_len:
            req.prefix_indices = self._expand(row_pages)[: len(tokens)]
            return None
        result = self.insert(
            InsertParams(
                key,
                pages=row_pages[:num_pages],
                rotation_base=req.kv_rotation_base,
                priority=req.priority or 0,
            )
        )
        if not result.rotation_tail_declined:
            changed = np.flatnonzero(row_pages[:num_pages] != result.pages)
            if len(changed):
                first = int(changed[0])
                row_pages = np.concatenate([result.pages, row_pages[num_pages:]])
                # To the end of the row: a mirror that ended before it would hide the tail's page.
                self.pool().write(
                    self._row_of(req), first * self.page_size, pages=row_pages[first:]
                )
            receipt = self.inc_lock_ref(result.last_device_node)
            self._unlock(req)
            if num_pages:
                self._give_back_lease(req)
            req.lock_receipt = receipt
            req.last_node = result.last_device_node
            req.kv.cache_protected_len = num_pages * self.page_size
        req.prefix_indices = self._expand(row_pages)[: len(tokens)]
        return result

    def cache_finished_req(
        self, req: Req, *, kv_len_to_handle: int | None = None, is_insert: bool = True
    ) -> InsertResult | None:
        """Cache the whole pages of a finished request, free the rest, and unlock.

        Handles the row from ``kv.cache_protected_len`` to ``kv_len_to_handle``; pages past it are
        freed up to ``kv.allocated_len`` where the request has that. The row itself stays with
        the caller (``ReqToTokenPool.free``). A second call finds nothing left to do.

        Args:
            req: the request.
            kv_len_to_handle: tokens whose KV is valid; default prompt and output.
            is_insert: False frees everything past the protected prefix instead of caching it.

        Returns:
            What the insert found; None when nothing was inserted.
        """
        self._check_lock(req)
        if req.kv.req_pool_idx is None:
            self._unlock(req)
            self._give_back_lease(req)
            return None
        tokens = req.origin_input_ids
        if len(req.output_ids):
            tokens = [*tokens, *req.output_ids]
        if kv_len_to_handle is None:
            kv_len_to_handle = len(tokens)
        if not 0 <= kv_len_to_handle <= len(tokens):
            raise ValueError(
                f"kv_len_to_handle={kv_len_to_handle} must be in [0, {len(tokens)}], "
                f"the tokens of the request"
            )
        protected = ceil_div(req.kv.cache_protected_len, self.page_size)
        allocated = getattr(req.kv, "allocated_len", None) or 0
        row_pages = self._row_pages(req, max(kv_len_to_handle, allocated))
        keep, result = protected, None
        if is_insert and not self.disable and kv_len_to_handle > req.kv.cache_protected_len:
            key = self.key_of(req, tokens[:kv_len_to_handle])
            num_pages = len(key) // self.page_size
            self.allocator.check_held(row_pages[max(num_pages, protected) :])
            result = self.insert(
                InsertParams(
                    key,
                    pages=row_pages[:num_pages],
                    rotation_base=req.kv_rotation_base,
                    priority=req.priority or 0,
                )
            )
            if not result.rotation_tail_declined:
                keep = max(num_pages, protected)
        self.allocator.free_pages(row_pages[keep:])
        req.kv.cache_protected_len = max(len(row_pages), protected) * self.page_size
        self._unlock(req)
        self._give_back_lease(req)
        req.last_node = None
        return result

    def abort(self, req: Req) -> None:
        """Give back all that a request holds: lock, pages past its cached prefix, row.

        Safe at any point between planning and finish, and a second time.
        """
        self._give_back(req)

    def retract(self, req: Req) -> None:
        """Take a running request back to the queue: as ``abort``; what is cached stays cached.

        All progress marks are reset together, so that the request can be planned again.
        """
        self._give_back(req)

    def _give_back(self, req: Req) -> None:
        row = req.kv.req_pool_idx
        if row is not None:
            pool = self.pool()
            length = getattr(req.kv, "allocated_len", None) or pool.mirrored_len(row)
            row_pages = self._row_pages(req, length or len(req.get_fill_ids()))
            protected = ceil_div(req.kv.cache_protected_len, self.page_size)
            self.allocator.free_pages(row_pages[protected:])
            pool.free(row)
            req.kv.req_pool_idx = None
        # A lock from before a reset holds nothing any more.
        with suppress(ValueError):
            self._unlock(req)
        self._give_back_lease(req)
        req.kv.cache_protected_len = 0
        if hasattr(req.kv, "allocated_len"):
            req.kv.allocated_len = 0
        req.kv_rotation_base = None
        req.last_node = None
        req.prefix_indices = self._expand(np.empty(0, dtype=np.int64))

    def _check_lock(self, req: Req) -> None:
        """Raise before anything changes when the request's lock is stale; ``abort`` is the way."""
        if req.lock_receipt is not None:
            self.tree_core.check_receipt(req.lock_receipt)

    def _unlock(self, req: Req) -> None:
        receipt, req.lock_receipt = req.lock_receipt, None
        if receipt is not None:
            self.dec_lock_ref(receipt)

    def _give_back_lease(self, req: Req) -> None:
        self.leases.give_back(getattr(req, "kv_rotation_lease", None))

    def _row_pages(self, req: Req, length: int) -> PageIds:
        return self.pool().pages(self._row_of(req), 0, length)

    def _row_of(self, req: Req) -> int:
        row: int | None = req.kv.req_pool_idx
        if row is None:
            raise ValueError("the request has no row (kv.req_pool_idx is None); plan it first")
        return row

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

        Pages that requests hold stay theirs. Call it before clearing the allocator.
        """
        pages = self.tree_core.reset()
        self.leases.clear()
        if len(pages):
            self.allocator.release_cached(pages)

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
