"""The allocator of single token slots (page size 1)."""

from __future__ import annotations

from typing import Any

from alloc.base import BaseTokenToKVPoolAllocator
from alloc.layout import PageLayout
from alloc.spaces import PageIds, as_count


class TokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out slots 1..size one by one; slot 0 is the padding target.

    Args:
        size: token slots.
        dtype, device, kvcache, need_sort, debug: see ``BaseTokenToKVPoolAllocator``.
    """

    def __init__(
        self,
        size: int,
        dtype: Any,
        device: Any,
        kvcache: Any,
        need_sort: bool = False,
        *,
        debug: bool = False,
    ) -> None:
        size = as_count(size, "size")
        if size < 1:
            raise ValueError(f"size={size} must be at least 1 token")
        super().__init__(
            PageLayout.single(1, size),
            dtype=dtype,
            device=device,
            kvcache=kvcache,
            need_sort=need_sort,
            debug=debug,
        )

    def alloc_pages(self, num_pages: int) -> PageIds | None:
        """Take ``num_pages`` slots (a page is one token); None when short."""
        num_pages = as_count(num_pages, "num_pages")
        if num_pages < 0:
            raise ValueError(f"num_pages={num_pages} must not be negative")
        return self.free_list.draw_run(0, num_pages)
