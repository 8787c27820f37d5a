"""Page allocators over logical token slots, request rows and the page-interleave placement.

>>> allocator = PagedTokenToKVPoolAllocator(64, 16, dtype=None, device=None, kvcache=None)
>>> slots = allocator.alloc(32)
>>> slots[0].item(), slots[-1].item(), allocator.available_size()
(16, 47, 32)
>>> allocator.free(slots)
>>> allocator.available_size()
64
"""

from alloc.base import BaseTokenToKVPoolAllocator, ExtendPages
from alloc.extend import ExtendBatch
from alloc.free_list import ClassedFreeList, FreeListMark, PageState
from alloc.layout import PageLayout
from alloc.owner_lanes import (
    CPSharedPagedTokenToKVPoolAllocator,
    build_in_seq_page_compute_owners,
)
from alloc.page_interleave import (
    ClassFills,
    PageInterleavePoolAllocator,
    page_interleave_shard_size,
)
from alloc.paged import PagedTokenToKVPoolAllocator
from alloc.placement import PageInterleavePlacement, PageShardSpec
from alloc.req_to_token import ReqToTokenPool
from alloc.spaces import IntArray, Locs, PageIds, Slots, ceil_div, pages_of_runs
from alloc.token_slot import TokenToKVPoolAllocator

__all__ = [
    # allocators
    "BaseTokenToKVPoolAllocator",
    "TokenToKVPoolAllocator",
    "PagedTokenToKVPoolAllocator",
    "PageInterleavePoolAllocator",
    "page_interleave_shard_size",
    "CPSharedPagedTokenToKVPoolAllocator",
    "build_in_seq_page_compute_owners",
    "ClassFills",
    "ExtendBatch",
    "ExtendPages",
    # where pages lie
    "PageLayout",
    "PageShardSpec",
    "PageInterleavePlacement",
    # page state
    "ClassedFreeList",
    "FreeListMark",
    "PageState",
    # request rows
    "ReqToTokenPool",
    # spaces
    "IntArray",
    "Locs",
    "PageIds",
    "Slots",
    "ceil_div",
    "pages_of_runs",
]
