"""How pages of a group's pool lie on its ranks: what a scheduler asks for, and how much fits.

- ``interleave``: position-page P lies on rank ``(base + P) % N``, whoever computes it.
- ``owner-lane``: a page lies on the rank that computes it, and a prefill computes the uncached part
  of its prompt zigzag over the ranks.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Protocol

import numpy as np

from alloc import (
    BaseTokenToKVPoolAllocator,
    CPSharedPagedTokenToKVPoolAllocator,
    IntArray,
    PagedTokenToKVPoolAllocator,
    PageInterleavePoolAllocator,
    build_in_seq_page_compute_owners,
)
from radix import ExtendPreview
from replay.driver import RunConfig
from replay.schedule import Schedule


class PoolLayout(Protocol):
    """What a sharded replay asks about where pages lie. Sizes are units of the tree."""

    def make_allocator(self, config: RunConfig) -> BaseTokenToKVPoolAllocator:
        """Return the allocator of a pool; the capacity is one rank's."""

    def owners(self, prefix_len: int, seq_len: int) -> IntArray | None:
        """Return the rank of each new page of a prefill; None where the allocator chooses."""

    def num_fitting(self, room: IntArray, need: ExtendPreview, prefix_pages: int) -> int:
        """Return how many new pages of a prompt fit behind its cached ones.

        Args:
            room: int[ranks] pages that each rank can give.
            need: what the whole prompt would take.
            prefix_pages: cached pages at its front.
        """


class Interleaved:
    """Pages that go round the ranks; with one rank, a pool of which every rank holds a copy.

    Args:
        ranks: Ranks that share the pool.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def make_allocator(self, config: RunConfig) -> BaseTokenToKVPoolAllocator:
        """Return a page-interleave allocator, or the paged one of a single rank."""
        page = config.tree_page_size
        size = config.capacity_pages * page
        if self._ranks == 1:
            return PagedTokenToKVPoolAllocator(size, page, dtype=None, device=None, kvcache=None)
        return PageInterleavePoolAllocator(size, page, self._ranks, None, None, None)

    def owners(self, prefix_len: int, seq_len: int) -> IntArray | None:
        """Return None: rotation bases say it."""
        return None

    def num_fitting(self, room: IntArray, need: ExtendPreview, prefix_pages: int) -> int:
        """Return how far a chain goes until it comes round to a rank without room."""
        ranks = self._ranks
        first = (need.rotation_bases[0] or 0) + prefix_pages
        return min(int(room[(first + i) % ranks]) * ranks + i for i in range(ranks))


class OwnerLanes:
    """Pages that lie on the ranks that compute them, zigzag over the uncached part of a prompt.

    Args:
        ranks: Ranks that share the pool and compute a prefill together.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks
        self._page = 1

    def make_allocator(self, config: RunConfig) -> BaseTokenToKVPoolAllocator:
        """Return an owner-lane allocator."""
        self._page = config.tree_page_size
        size = config.capacity_pages * self._page
        return CPSharedPagedTokenToKVPoolAllocator(
            size * self._ranks,
            size,
            self._page,
            dtype=None,
            device=None,
            kvcache=None,
            need_sort=False,
            cp_size=self._ranks,
            cp_rank=0,
        )

    def owners(self, prefix_len: int, seq_len: int) -> IntArray | None:
        """Return the zigzag owners of a prefill's new pages."""
        return build_in_seq_page_compute_owners(prefix_len, seq_len, self._page, self._ranks)

    def num_fitting(self, room: IntArray, need: ExtendPreview, prefix_pages: int) -> int:
        """Return the longest prefill whose lanes all have room: more pages never take fewer."""
        most = range(int(need.pages_by_class.sum()) + 1)
        return bisect_right(most, 0, key=lambda pages: self._lacks(pages, room)) - 1

    def _lacks(self, pages: int, room: IntArray) -> bool:
        owners = build_in_seq_page_compute_owners(0, pages, 1, self._ranks)
        return bool((np.bincount(owners, minlength=self._ranks) > room).any())


def pool_layout(schedule: Schedule) -> PoolLayout:
    """Return the layout that a schedule names."""
    if schedule.owner_lanes:
        return OwnerLanes(schedule.ranks)
    return Interleaved(schedule.ranks)
