"""The prefix cache as a scheduler sees it: requests over the tree and the allocator.

positions of a request at an insert

0 .......... protected | ......... matched | ......... whole pages | .... tail
the cache's, by lock   | duplicates: freed | adopted by the cache  | the request's
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from alloc import PageIds, ceil_div
from radix.params import InsertParams, InsertResult, MatchPrefixParams, Req, row_len
from radix.tree_cache import TreeCache


class UnifiedRadixCache(TreeCache):
    """A radix tree over one allocator's pages, with the calls that a scheduler makes.

    Not thread-safe: one scheduler thread owns tree and allocator. ``TreeCache`` has the
    constructor and the calls on keys; here are those on requests.
    """

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
        the caller, who frees it (``ReqToTokenPool.free``) and sets ``kv.req_pool_idx`` to None. A
        second call finds nothing left to do.

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
            self.allocator.check_held(row_pages[protected:])
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
            row_pages = self._row_pages(req, row_len(req, pool))
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
