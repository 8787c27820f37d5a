"""The prefix tree and the cache that a scheduler embeds.

>>> from alloc import PagedTokenToKVPoolAllocator
>>> allocator = PagedTokenToKVPoolAllocator(64, 4, dtype=None, device=None, kvcache=None)
>>> cache = UnifiedRadixCache(CacheInitParams(False, None, allocator, page_size=4))
>>> key = RadixKey([1, 2, 3, 4, 5, 6, 7, 8])
>>> cache.insert(InsertParams(key, value=allocator.alloc(8))).prefix_len
0
>>> match = cache.match_prefix(MatchPrefixParams(RadixKey([1, 2, 3, 4, 9, 9])))
>>> match.device_prefix_len, match.device_indices.tolist()
(4, [4, 5, 6, 7])
>>> with cache.locked(match.last_device_node):
...     cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted
4
>>> cache.check_invariants()
"""

from radix.components import ComponentType, FullComponent, TreeComponent
from radix.detached import DroppedRun
from radix.eviction import POLICIES
from radix.key import RadixKey
from radix.node import NodeId, TreeNode
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
from radix.scheduling import (
    ExtendAllocation,
    ExtendPreview,
    PageOwners,
    alloc_for_extend,
    evict_until_allocatable,
    preview_extend,
)
from radix.tree_core import UnifiedTreeCore
from radix.unified_cache import UnifiedRadixCache

__all__ = [
    # the scheduler's cache
    "UnifiedRadixCache",
    "CacheInitParams",
    "MatchPrefixParams",
    "MatchResult",
    "MatchHandle",
    "InsertParams",
    "InsertResult",
    "EvictParams",
    "EvictResult",
    "DroppedRun",
    "LockReceipt",
    "Req",
    # placing a batch
    "alloc_for_extend",
    "preview_extend",
    "evict_until_allocatable",
    "ExtendAllocation",
    "ExtendPreview",
    "PageOwners",
    # keys and the tree
    "RadixKey",
    "UnifiedTreeCore",
    "NodeId",
    "TreeNode",
    "POLICIES",
    # components
    "ComponentType",
    "TreeComponent",
    "FullComponent",
]
