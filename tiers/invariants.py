"""What must hold of a tiered cache, as a list of sentences. Cost: O(pools + trees)."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from alloc import BaseTokenToKVPoolAllocator, PageState
from radix import Req, UnifiedRadixCache
from tiers.in_flight import WriteInFlight

if TYPE_CHECKING:
    from tiers.cache import TieredCache


def tier_violations(cache: TieredCache, reqs: Iterable[Req] | None) -> list[str]:
    """Return the broken rules of both caches and of what is in flight between them."""
    found = _violations("device", cache.device, reqs) + _violations("host", cache.host.cache, None)
    for name, allocator in (("device", cache.device.allocator), ("host", cache.host.allocator)):
        found += _census_violations(name, allocator)
    flights = cache.in_flight()
    writes = [flight for flight in flights if isinstance(flight, WriteInFlight)]
    empty = np.empty(0, dtype=np.int64)
    drawn = np.sort(np.concatenate([empty, *(write.host_pages for write in writes)]))
    if not np.array_equal(drawn, cache.host.allocator.pages_in(PageState.HELD)):
        found.append("the host pages that are held differ from those of the writes in flight")
    device_receipts = {id(receipt) for receipt in cache.device.tree_core.receipts()}
    host_receipts = {id(receipt) for receipt in cache.host.cache.tree_core.receipts()}
    if any(id(flight.device_receipt) not in device_receipts for flight in flights):
        found.append("a transfer in flight has lost its lock on the device")
    if host_receipts != {id(flight.host_receipt) for flight in flights}:
        found.append("the host's locks differ from those of the transfers in flight")
    return found


def _violations(name: str, cache: UnifiedRadixCache, reqs: Iterable[Req] | None) -> list[str]:
    try:
        cache.check_invariants(reqs)
    except RuntimeError as error:
        return [f"{name}: {error}"]
    return []


def _census_violations(name: str, allocator: BaseTokenToKVPoolAllocator) -> list[str]:
    """Check that the pages of all states sum to the pool."""
    total = sum(allocator.page_census().values())
    if total == allocator.layout.capacity_pages:
        return []
    return [f"{name}: pages sum to {total}, not {allocator.layout.capacity_pages}"]
