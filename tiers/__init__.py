"""Copies of cached pages on the host and in files; each comes back to the rank that owned it.

>>> from alloc import PagedTokenToKVPoolAllocator
>>> from radix import CacheInitParams, EvictParams, InsertParams, RadixKey, UnifiedRadixCache
>>> allocator = PagedTokenToKVPoolAllocator(8, 2, dtype=None, device=None, kvcache=None)
>>> device = UnifiedRadixCache(CacheInitParams(False, None, allocator, page_size=2))
>>> cache = TieredCache(device, HostTier(host_layout(allocator.layout, pages_per_class=16)))
>>> key = RadixKey([1, 2, 3, 4, 5, 6])
>>> result = device.insert(InsertParams(key, value=allocator.alloc(6)))
>>> cache.evict(EvictParams(num_tokens=4)).num_tokens_kept
4
>>> match = cache.match(key)
>>> match.device.device_prefix_len, match.host_hit_length
(2, 4)
>>> match = cache.load_back(match)
>>> match.device.device_prefix_len, cache.poll()
(6, 1)
>>> device.dec_lock_ref(match.device.receipt)
>>> cache.check_invariants()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tiers.agreement import Agreement, agreement_over, alone
from tiers.blobs import BlobStore, MemoryStore
from tiers.cache import TieredCache
from tiers.file_store import FileCounters, FileStore
from tiers.groups import GroupOffer, GroupTier, HostRows, NoRows
from tiers.host_allocator import HostPageAllocator, host_layout
from tiers.host_tier import HostCounters, HostTier
from tiers.in_flight import LoadInFlight, WriteInFlight
from tiers.metadata import OwnerMetadata
from tiers.params import TierCounters, TieredEvictResult, TieredMatch, WritePolicy
from tiers.transfer import NullTransfer, Ticket, Transfer, TransferError

if TYPE_CHECKING:
    from tiers.copy_transfer import CopyTransfer
    from tiers.host_pool import HostKVPool

__all__ = [
    # the scheduler's cache
    "TieredCache",
    "TieredMatch",
    "TieredEvictResult",
    "TierCounters",
    "WritePolicy",
    # the host
    "HostTier",
    "HostCounters",
    "HostPageAllocator",
    "host_layout",
    "OwnerMetadata",
    "WriteInFlight",
    "LoadInFlight",
    # moving bytes; HostKVPool and CopyTransfer need torch
    "Transfer",
    "TransferError",
    "Ticket",
    "NullTransfer",
    "HostKVPool",
    "CopyTransfer",
    # page groups below
    "GroupTier",
    "GroupOffer",
    "HostRows",
    "NoRows",
    "BlobStore",
    "MemoryStore",
    "FileStore",
    "FileCounters",
    # ranks
    "Agreement",
    "agreement_over",
    "alone",
]


def __getattr__(name: str) -> Any:
    """Import what needs torch when it is asked for."""
    if name == "HostKVPool":
        from tiers.host_pool import HostKVPool

        return HostKVPool
    if name == "CopyTransfer":
        from tiers.copy_transfer import CopyTransfer

        return CopyTransfer
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
