"""A prefix cache in tiers: device pages, their copies on the host, and blobs below.

The device's cache and the host's decide on their own trees, a transfer moves bytes, and this file
carries pages and copies between them, once.

    evict      device runs ─► host copies what it lacks ─► device pages are released
    match      device ─► host ─► blobs                     says how much could come back
    load back  host pages ─► device pages of the same owners ─► inserted, locked until filled

A loaded page is drawn with the owner under which its copy was written, never with any other: a rank
has only the rows that it stored. Where such a page can't be had the load is a miss, and the tokens
are computed again.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from itertools import takewhile

import numpy as np

from alloc import IntArray, PageIds
from radix import (
    DroppedRun,
    EvictParams,
    ExtendAllocation,
    InsertParams,
    LockReceipt,
    MatchHandle,
    MatchPrefixParams,
    MatchResult,
    PageOwners,
    RadixKey,
    Req,
    UnifiedRadixCache,
    alloc_for_extend,
)
from tiers import invariants
from tiers.agreement import Agreement, alone
from tiers.host_tier import HostTier
from tiers.in_flight import LoadInFlight, WriteInFlight
from tiers.metadata import MAX_OWNERS
from tiers.owners import LoadablePart, loadable_parts, num_loadable
from tiers.params import (
    WRITE_BACK,
    WRITE_THROUGH,
    TierCounters,
    TieredEvictResult,
    TieredMatch,
    WritePolicy,
)
from tiers.transfer import Ticket, TransferError


class TieredCache:
    """A device's prefix cache with copies on the host.

    The scheduler goes on calling ``device`` for inserts, locks and requests; what may evict or load
    goes through here. Every replica makes the same calls in the same order, ``poll`` included.

    Args:
        device: the device's cache.
        host: the host's copies; page size and classes as the device's.
        write: when pages are copied to the host.
        agree: how ranks agree on which transfers are done.

    Attributes:
        device, host: as given.
        counters: what happened so far.

    Raises:
        ValueError: the layouts differ in page size or classes, there are more ranks than metadata
            tells apart, or the device's cache is disabled.
    """

    def __init__(
        self,
        device: UnifiedRadixCache,
        host: HostTier,
        *,
        write: WritePolicy | None = None,
        agree: Agreement = alone,
    ) -> None:
        layout, below = device.allocator.layout, host.layout
        if (layout.page_size, layout.num_classes) != (below.page_size, below.num_classes):
            raise ValueError(
                f"the device has pages of {layout.page_size} in {layout.num_classes} classes, the "
                f"host of {below.page_size} in {below.num_classes}"
            )
        if layout.num_classes > MAX_OWNERS:
            raise ValueError(f"{layout.num_classes} ranks are more than {MAX_OWNERS}")
        if device.disable:
            raise ValueError("a disabled cache has no pages to copy")
        self.device = device
        self.host = host
        self.page_size = layout.page_size
        self.write = write or WritePolicy()
        self.counters = TierCounters()
        self._layout = layout
        self._transfer = host.transfer
        self._agree = agree
        self._in_flight: deque[WriteInFlight | LoadInFlight] = deque()

    # Match

    def match(self, key: RadixKey, *, count_hit: bool = True, lock: bool = True) -> TieredMatch:
        """Find a key's longest prefix on the device, and what could be loaded past it.

        Where blobs are kept, what they have past the host's copies is brought back to the host.

        Args:
            key: the tokens.
            count_hit: False for a repeated look-up on behalf of one request.
            lock: lock the device's match; the receipt is in ``TieredMatch.device``.
        """
        device = self._match_device(key, count_hit=count_hit, lock=lock)
        try:
            return self._beyond(key, device)
        except BaseException:
            if device.receipt is not None:
                self.device.dec_lock_ref(device.receipt)
            raise

    def match_req(self, req: Req, *, max_prefix_len: int | None = None) -> int:
        """Match and lock a request's prefix, with what can be loaded back.

        As ``UnifiedRadixCache.match_req``, which it calls; returns the matched tokens.
        """
        matched = self.device.match_req(req, max_prefix_len=max_prefix_len)
        tokens = req.get_fill_ids()
        limit = len(tokens) - 1 if max_prefix_len is None else max_prefix_len
        key = self.device.key_of(req, tokens[: max(0, limit)])
        found = self._beyond(key, self._match_device(key, count_hit=False, lock=False))
        on_host = found.last_host_node != self.host.cache.tree_core.root_node_handle()
        if on_host and self.load_back(found) is not None:
            matched = self.device.match_req(req, max_prefix_len=max_prefix_len)
        return matched

    def _match_device(self, key: RadixKey, *, count_hit: bool, lock: bool) -> MatchResult:
        params = MatchPrefixParams(key, count_hit=count_hit)
        return self.device.match_and_lock(params) if lock else self.device.match_prefix(params)

    def _beyond(self, key: RadixKey, device: MatchResult) -> TieredMatch:
        """Say what the host has past a device's match."""
        self._write_through(key, device)
        on_device = device.handle.end
        root = self.host.cache.tree_core.root_node_handle()
        if on_device == len(key) // self.page_size:
            return TieredMatch(key, device, 0, 0, root)
        fetched = self.host.fetch(key)
        held = self.host.cache.match_prefix(MatchPrefixParams(key))
        below = num_loadable(self._loadable(device.handle, held.pages))
        from_files = on_device + below - max(on_device, held.handle.end - fetched)
        return TieredMatch(
            key,
            device,
            below * self.page_size,
            max(0, from_files) * self.page_size,
            held.handle.node_id if held.handle.end > on_device else root,
        )

    def _loadable(self, device: MatchHandle, copies: PageIds) -> list[LoadablePart]:
        """Cut what a path's copies have past the device into parts that can be loaded."""
        return loadable_parts(self.device, device, self.host.layout, copies[device.end :])

    # Load back

    def load_back(self, match: TieredMatch) -> TieredMatch | None:
        """Bring back to the device what a match found on the host.

        Pages are drawn with the owners of the copies; a class that is short is made room in once,
        aimed at what it lacks. The loaded run is in the device's tree at once, and locked until its
        bytes have arrived (``poll``): who reads layer l calls ``Transfer.wait_layer(l)`` first.

        Returns:
            The match as it is now. Its device part replaces that of ``match``, whose lock, if it
            has one, moves. None when nothing was loaded: a miss. Nothing was evicted then, unless
            the transfer was refused after room was made for it.
        """
        device = self._match_device(match.key, count_hit=False, lock=True)
        copies = self.host.lock(match.key)
        load = None
        try:
            load = self._start_load(match.key, device, copies)
        finally:
            self.device.dec_lock_ref(_receipt(device))
            if load is None:
                self.host.unlock(copies.receipt)
        if load is None:
            return None
        self._in_flight.append(load)
        return self._renewed(match)

    def _start_load(
        self, key: RadixKey, device: MatchResult, copies: MatchResult
    ) -> LoadInFlight | None:
        """Draw, start the copy, and insert; both matches are locked. None is a miss."""
        run = copies.pages[device.handle.end :]
        parts = self._loadable(device.handle, copies.pages)
        wanted, run = len(run), run[: num_loadable(parts)]
        pages = self._draw(self.host.layout.class_of(run)) if len(run) else None
        ticket = None if pages is None else self._copy_back(run, pages)
        if pages is None or ticket is None:
            self.counters.missed += wanted
            return None
        self.counters.missed += wanted - len(run)
        self.counters.loaded += len(run)
        return LoadInFlight(ticket, self._adopt(key, device, pages, parts), _receipt(copies))

    def _adopt(
        self, key: RadixKey, device: MatchResult, pages: PageIds, parts: list[LoadablePart]
    ) -> LockReceipt:
        """Insert the pages of a load that has started, past a locked match; returns their lock."""
        path = np.concatenate([device.pages, pages])
        adopted = 0
        with ExitStack() as undo:
            undo.callback(lambda: self.device.allocator.free_pages(pages[adopted:]))
            undo.callback(self._transfer.drain)
            for part in parts:
                stop = device.handle.end + part.stop
                part_key = key[: stop * self.page_size]
                inserted = self.device.insert(
                    InsertParams(part_key, pages=path[:stop], rotation_base=part.base)
                )
                assert not inserted.rotation_tail_declined, "only what the chain takes is loaded"
                adopted = part.stop
            filling = self._match_device(key, count_hit=False, lock=True)
            undo.pop_all()
        return _receipt(filling)

    def _copy_back(self, host_pages: PageIds, device_pages: PageIds) -> Ticket | None:
        """Start a load; where it is refused, free the pages."""
        try:
            return self._transfer.load(host_pages, device_pages)
        except BaseException as error:
            self.device.allocator.free_pages(device_pages)
            if not isinstance(error, TransferError):
                raise
            self.counters.refused_transfers += 1
            return None

    def _renewed(self, match: TieredMatch) -> TieredMatch:
        """Return a match after a load; the caller's lock, if any, moves to the new end."""
        old = match.device
        now = self._match_device(match.key, count_hit=False, lock=old.receipt is not None)
        if old.receipt is not None:
            self.device.dec_lock_ref(old.receipt)
        gained = now.device_prefix_len - old.device_prefix_len
        return TieredMatch(
            match.key,
            now,
            max(0, match.host_hit_length - gained),
            max(0, match.file_hit_length - gained),
            match.last_host_node,
        )

    def _draw(self, classes: IntArray) -> PageIds | None:
        """Take device pages of these owners, evicting once what they lack; None when short."""
        allocator = self.device.allocator
        pages = allocator.alloc_classes(classes)
        if pages is not None:
            return pages
        deficits = allocator.class_deficits(self._layout.tally(classes))
        if (deficits > self.device.tree_core.component.evictable_by_class()).any():
            return None
        self.evict(EvictParams(int(deficits.sum()) * self.page_size, tuple(deficits.tolist())))
        return allocator.alloc_classes(classes)

    # Evict

    def evict(self, params: EvictParams) -> TieredEvictResult:
        """Free device pages as ``UnifiedRadixCache.evict`` does, copying them to the host first.

        Under ``write_back`` the host makes room for what it lacks of a victim's path; what does not
        fit is dropped, tail first. On CUDA the compute stream waits for the copies, the host does
        not.
        """
        runs = self.device.detach(params)
        try:
            for run in runs:
                self._keep(run)
        finally:
            freed = self.device.release_runs(runs).num_tokens_evicted
        kept = sum(self._kept(run) for run in runs)
        dropped = freed // self.page_size - kept
        self.counters.kept += kept
        self.counters.dropped += dropped
        return TieredEvictResult(freed, kept * self.page_size, dropped * self.page_size)

    def _keep(self, run: DroppedRun) -> None:
        """Use the host's copies of a victim's path; under ``write_back`` store what it lacks."""
        copies = self.host.lock(run.key)
        start = copies.handle.end
        try:
            if self.write.name != WRITE_BACK or start == len(run.pages):
                return
            write = self._store(run.key, run.pages, start)
            if write is None:
                return
            host_pages, ticket = write
            with ExitStack() as undo:
                undo.callback(self.host.give_back, host_pages)
                undo.callback(self._transfer.drain)
                ticket.fence()
                self.host.add(run.key, host_pages, start)
                undo.pop_all()
        finally:
            self.host.unlock(copies.receipt)

    def _kept(self, run: DroppedRun) -> int:
        """Return how many pages of a victim could be loaded back now."""
        params = MatchPrefixParams(run.key, peek=True)
        device = self.device.match_prefix(params).handle
        copies = self.host.cache.match_prefix(params).pages
        return max(0, device.end + num_loadable(self._loadable(device, copies)) - run.start)

    def _store(self, key: RadixKey, pages: PageIds, start: int) -> tuple[PageIds, Ticket] | None:
        """Start copying a path's pages from ``start`` on, as many as the host has room for.

        Args:
            key: the path; the host's copies of its first ``start`` pages are locked.
            pages: int64[whole pages of key] device pages, all still there.
            start: see ``key``.

        Returns:
            The host pages drawn and the ticket; None where there is no room for any, or the
            transfer is refused. Nothing is copied then.
        """
        classes = self._layout.class_of(pages[start:])
        fits = self.host.room_for(classes)
        if not fits:
            return None
        host_pages = self.host.draw(classes[:fits])
        assert host_pages is not None, "there was room for them"
        try:
            ticket = self._transfer.store(pages[start : start + fits], host_pages)
        except BaseException as error:
            self.host.give_back(host_pages)
            if not isinstance(error, TransferError):
                raise
            self.counters.refused_transfers += 1
            return None
        self.counters.stored += fits
        return host_pages, ticket

    def alloc_for_extend(
        self, reqs: Sequence[Req], *, page_owners: PageOwners | None = None
    ) -> ExtendAllocation | None:
        """Place a batch as ``radix.alloc_for_extend`` does, copying what has to go to the host."""
        return alloc_for_extend(self.device, reqs, page_owners=page_owners, evictor=self)

    # Write-through

    def _write_through(self, key: RadixKey, device: MatchResult) -> None:
        """Start a copy of the part of a match that has been used often enough."""
        if self.write.name != WRITE_THROUGH:
            return
        node = self.device.tree_core.node_by_id(device.last_device_node)
        while node.parent is not None and node.hits < self.write.hits:
            node = node.parent
        path = key[: node.end * self.page_size]
        writes = (flight for flight in self._in_flight if isinstance(flight, WriteInFlight))
        if self.host.held_pages(path) == node.end or any(w.is_along(path) for w in writes):
            return
        copies = self.host.lock(path)
        originals = self.device.inc_lock_ref(node.id)
        start = copies.handle.end
        write = None
        try:
            write = self._store(path, device.pages[: node.end], start)
        finally:
            if write is None:
                self.device.dec_lock_ref(originals)
                self.host.unlock(copies.receipt)
        if write is None:
            return
        host_pages, ticket = write
        stop = start + len(host_pages)
        self._in_flight.append(
            WriteInFlight(
                path[: stop * self.page_size],
                start,
                host_pages,
                ticket,
                originals,
                _receipt(copies),
            )
        )

    # In flight

    def poll(self) -> int:
        """Confirm the transfers that are done on every rank, oldest first; returns how many.

        Copies become visible, loads are unlocked; until then their pages can't be evicted, so call
        it once a scheduling step. Collective where the agreement is: every rank calls it at the
        same step.
        """
        if not self._in_flight:
            return 0
        done = sum(1 for _ in takewhile(lambda f: f.ticket.is_done(), self._in_flight))
        agreed = int(self._agree(np.array([done], dtype=np.int64))[0])
        for _ in range(agreed):
            self._confirm(self._in_flight.popleft())
        return agreed

    def drain(self) -> None:
        """Wait for every transfer in flight and confirm it."""
        self._transfer.drain()
        while self._in_flight:
            self._confirm(self._in_flight.popleft())

    def in_flight(self) -> list[WriteInFlight | LoadInFlight]:
        """Return the transfers that are not confirmed, oldest first."""
        return list(self._in_flight)

    def _confirm(self, flight: WriteInFlight | LoadInFlight) -> None:
        if isinstance(flight, WriteInFlight):
            self.host.add(flight.key, flight.host_pages, flight.start)
        self.device.dec_lock_ref(flight.device_receipt)
        self.host.unlock(flight.host_receipt)

    def reset(self) -> None:
        """Wait for what is in flight, then drop both trees; blobs stay."""
        self.drain()
        self.device.reset()
        self.host.cache.reset()

    # Checks

    def check_invariants(self, reqs: Iterable[Req] | None = None) -> None:
        """Raise RuntimeError that lists every broken rule of both tiers; see ``radix``' own."""
        found = invariants.tier_violations(self, None if reqs is None else list(reqs))
        if found:
            raise RuntimeError("; ".join(found))

    def state_digest(self) -> str:
        """Return a hash of both tiers, equal on replicas fed the same calls."""
        digests = (self.device.state_digest(), self.host.cache.state_digest())
        return "-".join((*digests, str(len(self._in_flight))))


def _receipt(match: MatchResult) -> LockReceipt:
    assert match.receipt is not None, "the match was locked"
    return match.receipt
