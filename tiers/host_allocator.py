"""Pages of the host tier: the classes of the device pool, and a size of its own."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from alloc import BaseTokenToKVPoolAllocator, IntArray, PageIds, PageLayout


def host_layout(device_layout: PageLayout, pages_per_class: int) -> PageLayout:
    """Return the layout of host pages: the device's page size and classes, another size.

    Raises:
        ValueError: less than one page a rank.
    """
    return replace(device_layout, pages_per_class=pages_per_class)


class HostPageAllocator(BaseTokenToKVPoolAllocator):
    """Hands out host pages of given classes, so that a copy lies with the owner of its original.

    Args:
        layout: from ``host_layout``.
    """

    def __init__(self, layout: PageLayout) -> None:
        super().__init__(layout, dtype=None, device=None, kvcache=None, need_sort=False)

    def alloc_pages(self, num_pages: int) -> PageIds | None:
        """Not available: a host page needs the class of the device page that it copies."""
        raise NotImplementedError("a host page has its original's class; use alloc_classes")


def leading_fit(classes: IntArray, room: IntArray) -> int:
    """Return how many leading pages a room serves.

    Args:
        classes: int64[n] class of each page, in order.
        room: int64[num_classes] pages that each class can give.

    >>> leading_fit(np.array([0, 1, 0, 0]), np.array([2, 5]))
    3
    """
    order = np.argsort(classes, kind="stable")
    counts = np.bincount(classes, minlength=len(room))
    before = np.empty(len(classes), dtype=np.int64)
    before[order] = np.arange(len(classes)) - (np.cumsum(counts) - counts).repeat(counts)
    short = before >= room[classes]
    return int(short.argmax()) if short.any() else len(classes)
