"""The host tier: a prefix cache over host pages, which may keep what it evicts in blobs.

A copy of a path is inserted from where the host's own copy of it ends, so the host holds prefixes
without holes: a page is never kept under a parent that is not. Every host page has the owner of the
page that it copies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alloc import IntArray, PageIds, PageLayout
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    LockReceipt,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
    UnifiedRadixCache,
)
from tiers.groups import GroupTier
from tiers.host_allocator import HostPageAllocator, leading_fit
from tiers.transfer import NullTransfer, Transfer


@dataclass(slots=True)
class HostCounters:
    """Pages since the start.

    Attributes:
        evicted: dropped to make room.
        fetched: read back from blobs.
        kept_blobs: blobs written of what was evicted; a rank's own count.
    """

    evicted: int = 0
    fetched: int = 0
    kept_blobs: int = 0


class HostTier:
    """Which prefixes have a copy on the host, and where.

    Args:
        layout: of the host pages, from ``host_layout``.
        transfer: moves this rank's bytes between device and host; none by default.
        groups: where evicted page groups go; None drops them.
        eviction_policy: name of the host's own policy.

    Attributes:
        cache: the host's prefix cache.
        allocator: its pages.
        counters: what happened so far.
    """

    def __init__(
        self,
        layout: PageLayout,
        transfer: Transfer | None = None,
        groups: GroupTier | None = None,
        eviction_policy: str = "lru",
    ) -> None:
        self.layout = layout
        self.transfer: Transfer = transfer or NullTransfer()
        self.groups = groups
        self.counters = HostCounters()
        self.allocator = HostPageAllocator(layout)
        self.cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self.allocator,
                page_size=layout.page_size,
                eviction_policy=eviction_policy,
            )
        )

    # Look

    def held_pages(self, key: RadixKey) -> int:
        """Return how many leading pages of a key have a copy; changes nothing."""
        return self.cache.match_prefix(MatchPrefixParams(key, peek=True)).handle.end

    def lock(self, key: RadixKey, *, count_hit: bool = False) -> MatchResult:
        """Find the copies of a key, use them, and lock them; ``unlock`` the receipt."""
        return self.cache.match_and_lock(MatchPrefixParams(key, count_hit=count_hit))

    def unlock(self, receipt: LockReceipt | None) -> None:
        """Release a lock; None does nothing."""
        if receipt is not None:
            self.cache.dec_lock_ref(receipt)

    # Copies

    def room_for(self, classes: IntArray) -> int:
        """Return how many leading pages of these classes the host could take, evicting the rest.

        Args:
            classes: int64[n] owner of each page, in order.
        """
        evictable = self.cache.tree_core.component.evictable_by_class()
        return leading_fit(classes, self.allocator.free_list.counts() + evictable)

    def draw(self, classes: IntArray) -> PageIds | None:
        """Take pages of these classes, evicting others as far as needed; None when short.

        Pages that are evicted are kept in blobs first, where there are any.
        """
        deficits = self.allocator.class_deficits(self.layout.tally(classes))
        if deficits.any():
            if self.room_for(classes) < len(classes):
                return None
            self._evict(deficits)
        return self.allocator.alloc_classes(classes)

    def give_back(self, pages: PageIds) -> None:
        """Free drawn pages that nothing was stored in."""
        self.allocator.free_pages(pages)

    def add(self, key: RadixKey, pages: PageIds, start: int) -> int:
        """Add the copies of a path's pages from ``start`` on.

        Args:
            key: the path, whole pages.
            pages: int64[n] drawn pages for position-pages ``[start, start + n)`` of the key.
            start: pages below it have copies, which the caller has locked.

        Returns:
            The pages of the key that have copies now. Pages that came in meanwhile stay, and the
            caller's for the same positions are freed.
        """
        page_size = self.layout.page_size
        stop = start + len(pages)
        above = self.cache.match_prefix(MatchPrefixParams(key[: start * page_size], peek=True))
        assert above.handle.end == start, "the copies above are locked"
        self.cache.insert(
            InsertParams(key[: stop * page_size], pages=np.concatenate([above.pages, pages]))
        )
        return stop

    def _evict(self, deficits: IntArray) -> None:
        wanted = int(deficits.sum()) * self.layout.page_size
        aim = tuple(deficits.tolist()) if self.layout.num_classes > 1 else None
        runs = self.cache.detach(EvictParams(wanted, aim))
        try:
            if self.groups is not None:
                # Blobs are read and written by the host: no copy may still be on its way to a
                # page that is read here, or that is drawn again later.
                self.transfer.drain()
                for run in runs:
                    self.counters.kept_blobs += self.groups.keep(run)
        finally:
            released = self.cache.release_runs(runs)
            self.counters.evicted += released.num_tokens_evicted // self.layout.page_size

    # Blobs

    def fetch(self, key: RadixKey) -> int:
        """Bring back from blobs what follows the host's copy of a key, as far as there is room.

        Collective where the groups' agreement is: all ranks call it with the same key.

        Returns:
            Pages that have a copy now and had none before.
        """
        if self.groups is None:
            return 0
        found = self.lock(key)
        try:
            fetched = self._fetch_after(key, found.handle.end, self.groups)
        finally:
            self.unlock(found.receipt)
        self.counters.fetched += fetched
        return fetched

    def _fetch_after(self, key: RadixKey, start: int, groups: GroupTier) -> int:
        offer = groups.offer(key, start)
        if offer is None:
            return 0
        classes = offer.owners.classes()
        size = groups.group_pages
        # Whole groups only: half a group's bytes would be read for nothing.
        stop = (start + self.room_for(classes)) // size * size
        if stop <= start:
            return 0
        pages = self.draw(classes[: stop - start])
        assert pages is not None, "there was room for them"
        added = 0
        try:
            count = groups.load(offer, pages)
            if count:
                self.add(key[: (start + count) * self.layout.page_size], pages[:count], start)
            added = count
        finally:
            self.give_back(pages[added:])
        return added
