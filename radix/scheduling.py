"""What a scheduler calls to place a batch: rows, pages and rotation bases in one step.

``alloc_for_extend`` first decides everything on simulated fills - bases, pages per class, room to
make - and returns None before it changes anything if the batch can't be served. Then it evicts
until every class covers the draw, draws, writes the rows and records the bases on the requests.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import numpy as np

from alloc import (
    ClassFills,
    ExtendBatch,
    IntArray,
    PageIds,
    Slots,
    ceil_div,
    page_interleave_shard_size,
)
from alloc.spaces import as_int64
from radix.key import RadixKey
from radix.params import EvictParams, EvictResult, Req
from radix.request_checks import check_batch
from radix.unified_cache import UnifiedRadixCache

PageOwners: TypeAlias = Sequence[Any]
"""For each request of a batch, int[new pages] the class of each of its new pages."""


_OPEN_GROUP = (
    "room has to be made while a free group is open, which would hold back every evicted page; "
    "end the group first"
)


class Evicts(Protocol):
    """Anything with a cache's ``evict``."""

    def evict(self, params: EvictParams) -> EvictResult:
        """Free pages; see ``UnifiedRadixCache.evict``."""


@dataclass(frozen=True, slots=True)
class ExtendPreview:
    """What a batch would need; int64[num_classes] each.

    Attributes:
        pages_by_class: pages that the batch draws.
        free_by_class: pages that are free or staged.
        evictable_by_class: pages that eviction could free.
        rotation_bases: the base each request would get; None where it needs none.
        num_rows: rows that the batch takes.
        free_rows: rows that are free.
    """

    pages_by_class: IntArray
    free_by_class: IntArray
    evictable_by_class: IntArray
    rotation_bases: list[int | None]
    num_rows: int
    free_rows: int

    @property
    def fits(self) -> bool:
        """Whether ``alloc_for_extend`` would serve the batch now, exact and per class.

        Inside an open free group it is refused instead when room has to be made.
        """
        room = self.free_by_class + self.evictable_by_class
        return self.num_rows <= self.free_rows and not (self.pages_by_class > room).any()


@dataclass(frozen=True, slots=True)
class ExtendAllocation:
    """What a batch got.

    Attributes:
        out_cache_loc: int64[sum of extends] slots of the new tokens, batch order.
        pages: int64[num_new_pages] new page ids, batch order, host.
        rotation_bases: the base of each request; None unsharded.
        num_tokens_evicted: tokens that had to go.
    """

    out_cache_loc: Slots
    pages: PageIds
    rotation_bases: list[int | None]
    num_tokens_evicted: int


@dataclass(slots=True)
class _Placement:
    """The base of one request: what its pages are drawn with, and what it remembers."""

    drawn: int | None
    recorded: int | None
    leased_page: Any = None


def alloc_for_extend(
    cache: UnifiedRadixCache,
    reqs: Sequence[Req],
    *,
    page_owners: PageOwners | None = None,
    evictor: Evicts | None = None,
) -> ExtendAllocation | None:
    """Give every request of a batch the slots of its next chunk.

    Each request has been matched (``UnifiedRadixCache.match_req``), has no prefix, or is between
    two chunks; its chunk runs from ``len(prefix_indices)`` to ``len(get_fill_ids())``. Rows are
    taken for requests without one and get the matched prefix and the new pages.
    ``kv_rotation_base`` is set, and ``kv.allocated_len`` where the request has it.

    Args:
        cache: the cache; sharded or not.
        reqs: distinct requests, batch order.
        page_owners: for each request, int[new pages] the class that each of its new pages has to
            lie in, on a pool without rotation bases; default any class. Room is made in the
            classes that are short.
        evictor: evicts from the cache where room has to be made; the cache itself by default.

    Returns:
        The slots, or None when the batch can't be served even by evicting all that is unlocked;
        nothing changed then.

    Raises:
        ValueError: a request does not fit its row, its node or the pool (``request_checks``); or
            owners are given for other than the new pages, out of range, or on a sharded pool.
        KeyError: a request's node is stale.
        RuntimeError: a free group is open and room has to be made, which it would hold back.
            Nothing changed in any of these.
    """
    placer = _Placer(cache, reqs, page_owners)
    preview = placer.preview()
    if not preview.fits:
        return None
    return placer.allocate(preview.pages_by_class, cache if evictor is None else evictor)


def preview_extend(
    cache: UnifiedRadixCache, reqs: Sequence[Req], *, page_owners: PageOwners | None = None
) -> ExtendPreview:
    """Say what ``alloc_for_extend`` would need and whether it would fit; changes nothing."""
    return _Placer(cache, reqs, page_owners).preview()


def evict_until_allocatable(cache: Evicts, allocator: Any, num_tokens: int) -> bool:
    """Evict until ``allocator.available_size()`` covers ``num_tokens``, or nothing more goes.

    One eviction may raise the floor by less than it frees, so the size is read again after each.
    On a page-interleave allocator every round aims at the classes that are short.

    Returns:
        Whether the size is covered now. Works with any allocator and anything that evicts.

    Raises:
        RuntimeError: room has to be made and a free group is open; nothing changed.
    """
    shards = page_interleave_shard_size(allocator)
    while (short := num_tokens - allocator.available_size()) > 0:
        if getattr(getattr(allocator, "free_list", None), "group_is_open", False):
            raise RuntimeError(_OPEN_GROUP)
        params = EvictParams(num_tokens=short)
        if shards > 1:
            floor = ceil_div(num_tokens, shards * allocator.page_size)
            deficits = allocator.class_deficits([floor] * shards)
            wanted = int(deficits.sum()) * allocator.page_size
            params = EvictParams(num_tokens=wanted, class_deficits=tuple(deficits.tolist()))
        if cache.evict(params).num_tokens_evicted == 0:
            return False
    return True


class _Placer:
    """One batch on its way to its pages.

    ``classes`` names the class of every new page, batch order, from the owners given or from the
    rotation bases; None draws any class.
    """

    def __init__(
        self, cache: UnifiedRadixCache, reqs: Sequence[Req], page_owners: PageOwners | None = None
    ) -> None:
        self.cache = cache
        self.reqs = reqs
        self.batch = ExtendBatch.of(
            [0 if req.prefix_indices is None else len(req.prefix_indices) for req in reqs],
            [len(req.get_fill_ids()) for req in reqs],
            cache.page_size,
        )
        check_batch(cache, reqs, self.batch)
        self.classes = None if page_owners is None else self._owned_classes(page_owners)
        self.placements = self._place()

    def preview(self) -> ExtendPreview:
        evictable = self.cache.tree_core.component.evictable_by_class()
        return ExtendPreview(
            self._required(evictable),
            self.cache.allocator.free_list.counts(),
            evictable,
            [placement.recorded for placement in self.placements],
            sum(req.kv.req_pool_idx is None for req in self.reqs),
            self.cache.pool().available_size(),
        )

    def allocate(self, required: IntArray, evictor: Evicts) -> ExtendAllocation:
        """Evict, draw and write; the preview said that ``required`` fits."""
        cache, batch = self.cache, self.batch
        allocator, pool = cache.allocator, cache.pool()
        prefixes = [self._prefix_pages(req) for req in self.reqs]
        last_locs = np.array([self._last_loc(i) for i in range(len(self.reqs))], dtype=np.int64)
        out = allocator.io.empty(batch.num_tokens)
        evicted = self._make_room(required, evictor)
        drawn = self._draw()
        rows = pool.alloc(sum(req.kv.req_pool_idx is None for req in self.reqs))
        assert rows is not None, "the preview counted the free rows"
        stops = (batch.page_starts + batch.new_pages).tolist()
        starts = batch.page_starts.tolist()
        firsts = (batch.prefix_pages * cache.page_size).tolist()
        written: list[PageIds] = []
        for i, req in enumerate(self.reqs):
            pages = drawn[starts[i] : stops[i]]
            if req.kv.req_pool_idx is None:
                req.kv.req_pool_idx = rows.pop(0)
                firsts[i], pages = 0, np.concatenate([prefixes[i], pages])
            written.append(pages)
            self._record(i)
        pool.write_pages([req.kv.req_pool_idx for req in self.reqs], firsts, written)
        allocator.io.fill_extend(out, batch, last_locs, drawn)
        recorded = [placement.recorded for placement in self.placements]
        return ExtendAllocation(out, drawn, recorded, evicted)

    def _required(self, evictable: IntArray) -> IntArray:
        """Return the pages that each class gives, now or after an eviction."""
        allocator = self.cache.allocator
        if self.classes is not None:
            return allocator.layout.tally(self.classes)
        batch = self.batch
        return allocator.pages_by_class(
            batch.prefix_lens,
            batch.seq_lens,
            [None] * len(self.reqs),
            evictable_by_class=evictable,
        )

    def _make_room(self, required: IntArray, evictor: Evicts) -> int:
        """Evict until every class covers the draw; returns the evicted tokens."""
        cache = self.cache
        # A draw of any class may do without single classes: only the number of pages counts.
        aims = cache.aimed_eviction and self.classes is not None
        evicted = 0
        if cache.allocator.free_list.group_is_open and np.count_nonzero(
            cache.allocator.class_deficits(required)
        ):
            raise RuntimeError(_OPEN_GROUP)
        while np.count_nonzero(deficits := cache.allocator.class_deficits(required)):
            params = EvictParams(
                int(deficits.sum()) * cache.page_size, tuple(deficits.tolist()) if aims else None
            )
            freed = evictor.evict(params).num_tokens_evicted
            assert freed, "the preview counted the evictable pages of every class"
            evicted += freed
            if self.classes is None:
                required = self._required(cache.tree_core.component.evictable_by_class())
        return evicted

    def _draw(self) -> PageIds:
        """Take the new pages of the batch."""
        allocator = self.cache.allocator
        if self.classes is None:
            pages = allocator.alloc_pages(self.batch.num_new_pages)
        else:
            pages = allocator.alloc_classes(self.classes)
        assert pages is not None, "every class was made to cover the draw"
        return pages

    def _owned_classes(self, page_owners: PageOwners) -> IntArray:
        """Check the owners of a batch and join them."""
        if self.cache.is_sharded:
            raise ValueError("page_owners: rotation bases say where pages of this pool lie")
        counts = [len(owners) for owners in page_owners]
        if counts != self.batch.new_pages.tolist():
            raise ValueError(
                f"page_owners has {counts} entries for requests of "
                f"{self.batch.new_pages.tolist()} new pages; pass one of each per new page"
            )
        none = np.empty(0, dtype=np.int64)
        classes = np.concatenate([none, *(as_int64(o, "page_owners") for o in page_owners)])
        num_classes = self.cache.allocator.layout.num_classes
        wrong = (classes < 0) | (classes >= num_classes)
        if np.count_nonzero(wrong):
            raise ValueError(
                f"page_owners must be in [0, {num_classes}), got {int(classes[wrong.argmax()])}"
            )
        return classes

    def _record(self, i: int) -> None:
        req, placement = self.reqs[i], self.placements[i]
        if placement.leased_page is not None:
            assert placement.recorded is not None, "a lease is for a base"
            lease = self.cache.leases.take(placement.leased_page, placement.recorded)
            req.kv_rotation_lease = lease  # type: ignore[attr-defined]
        req.kv_rotation_base = placement.recorded
        if hasattr(req.kv, "allocated_len"):
            req.kv.allocated_len = int(self.batch.seq_lens[i])

    def _place(self) -> list[_Placement]:
        """Resolve every request's base at its turn, on the fills that earlier ones leave.

        With bases, ``classes`` follows from them.
        """
        if not self.cache.is_sharded:
            return [_Placement(None, req.kv_rotation_base) for req in self.reqs]
        layout = self.cache.allocator.layout
        fills = ClassFills(self.cache.allocator.free_list.counts())
        planned: dict[Any, int] = {}
        placements: list[_Placement] = []
        classes: list[IntArray] = [np.empty(0, dtype=np.int64)]
        runs = zip(self.batch.prefix_pages.tolist(), self.batch.new_pages.tolist(), strict=True)
        for req, (prefix, new) in zip(self.reqs, runs, strict=True):
            fresh = (fills.least_full() - prefix) % layout.num_classes
            placement = self._place_one(req, fresh, planned)
            placements.append(placement)
            assert placement.drawn is not None, "sharded pages are drawn with a base"
            fills.draw(layout.class_at(placement.drawn, prefix), new)
            classes.append(layout.cyclic_classes(placement.drawn, prefix, new))
        self.classes = np.concatenate(classes)
        return placements

    def _place_one(self, req: Req, fresh: int, planned: dict[Any, int]) -> _Placement:
        """Return the base of one request; ``fresh`` starts it in the emptiest class."""
        cache = self.cache
        if req.kv_rotation_base is not None:
            return _Placement(req.kv_rotation_base, req.kv_rotation_base)
        core = cache.tree_core
        if req.last_node is not None and req.last_node != core.root_node_handle():
            return self._place_below(req, fresh)
        first = self._first_page(req)
        if first is None or cache.rotation.name != "chain":
            return _Placement(fresh, fresh)
        child = core.root().child_at(first.namespace, first.data)
        if child is not None and child.rotation_base is None:
            return _Placement(fresh, None)
        base = None if child is None else child.rotation_base
        if not cache.use_leases:
            base = fresh if base is None else base
            return _Placement(base, base)
        return self._lease((first.namespace, first.data), base, fresh, planned)

    def _lease(
        self, chain: Any, cached: int | None, fresh: int, planned: dict[Any, int]
    ) -> _Placement:
        """Lease the base of a chain: the cached one's, a lease's in flight, or ``fresh``.

        A cached chain that the request does not lock is leased too: it may be evicted before the
        request inserts, and a request that starts the chain anew must find this base.
        """
        held = planned.get(chain)
        if held is None:
            held = self.cache.leases.base_of(chain)
        if cached is not None and held not in (None, cached):
            return _Placement(cached, cached)
        base = cached if cached is not None else held
        planned[chain] = base = fresh if base is None else base
        return _Placement(base, base, chain)

    def _first_page(self, req: Req) -> RadixKey | None:
        """Return the first page of a request's key, in this chunk or past it; None without one."""
        page_size = self.cache.page_size
        count = page_size + self.cache.is_bigram
        tokens = req.get_fill_ids()[:count]
        if len(tokens) < count:
            tokens = [*req.origin_input_ids[:count], *req.output_ids[:count]][:count]
        key = self.cache.key_of(req, tokens)
        return key if len(key) >= page_size else None

    def _place_below(self, req: Req, fresh: int) -> _Placement:
        """Return the base of a request whose prefix is cached.

        A chain goes on under its base; a chain without one takes any pages and keeps None. A seam
        is taken where the tail branches off, so that a path has few runs.
        """
        assert req.last_node is not None, "the request was matched below the root"
        node = self.cache.tree_core.node_by_id(req.last_node)
        base = node.rotation_base
        if self.cache.rotation.name == "chain":
            return _Placement(fresh if base is None else base, base)
        if node.children or base is None:
            return _Placement(fresh, fresh)
        return _Placement(base, base)

    def _prefix_pages(self, req: Req) -> PageIds:
        """Return the pages that a row starts with; nothing for a request that has its row."""
        if req.kv.req_pool_idx is not None or req.last_node is None:
            return np.empty(0, dtype=np.int64)
        return self.cache.tree_core.path_pages(req.last_node)

    def _last_loc(self, i: int) -> int:
        """Return the slot before the chunk where it starts inside a page; else -1, not read."""
        prefix, page_size = int(self.batch.prefix_lens[i]), self.cache.page_size
        if prefix % page_size == 0:
            return -1
        row = self.reqs[i].kv.req_pool_idx
        page = self.cache.pool().pages(row, prefix // page_size * page_size, prefix)
        return int(page[0]) * page_size + (prefix - 1) % page_size
