"""Where a logical page lies: its class, its local page and its rows. The only holder of the rule.

A pool of ``num_classes`` ranks numbers its pages round robin: consecutive ids go to consecutive
classes. The first ``first_page`` ids are reserved for padding and all of them map to local page 0,
the trash page of every rank. Three pools differ only in these two numbers:

    ==================  ===========  ==========  =====================
    pool                num_classes  first_page  owner of page ``l``
    ==================  ===========  ==========  =====================
    token, paged        1            1           0
    page-interleave     N            N           ``l % N``
    owner-lane          N            1           ``(l - 1) % N``
    ==================  ===========  ==========  =====================

>>> layout = PageLayout.interleave(page_size=16, shard_size=4, pages_per_class=8)
>>> layout.class_of(13), layout.local_page(13), layout.page_at(1, 3)
(1, 3, 13)
>>> layout.cyclic_counts(base=1, start=2, count=6).tolist()
[2, 1, 1, 2]
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TypeVar

import numpy as np

from alloc.spaces import IntArray, PageIds, as_count

IntLike = TypeVar("IntLike", int, IntArray)


@dataclass(frozen=True, slots=True)
class PageLayout:
    """The arithmetic of one pool's logical pages.

    Attributes:
        page_size: tokens of a page.
        num_classes: ranks that share the pool; a page belongs to exactly one class.
        first_page: ids below are reserved; they are never handed out.
        pages_per_class: usable pages of each class, the trash page left out.
    """

    page_size: int
    num_classes: int
    first_page: int
    pages_per_class: int

    def __post_init__(self) -> None:
        """Make every field an int; reject a layout without a page, a class or a reserved page."""
        for field in fields(self):
            object.__setattr__(self, field.name, as_count(getattr(self, field.name), field.name))
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size} must be at least 1")
        if self.num_classes < 1:
            raise ValueError(f"num_classes={self.num_classes} must be at least 1")
        if self.first_page not in (1, self.num_classes):
            raise ValueError(
                f"first_page={self.first_page} must be 1 or num_classes={self.num_classes}"
            )
        if self.pages_per_class < 1:
            raise ValueError(f"pages_per_class={self.pages_per_class} must be at least 1")
        if self.num_pages * self.page_size > 2**63:
            raise ValueError(
                f"{self.num_pages} pages of {self.page_size} tokens have slots that leave int64"
            )

    @classmethod
    def single(cls, page_size: int, num_pages: int) -> PageLayout:
        """Return the layout of an unsharded pool of ``num_pages`` pages, ids from 1."""
        return cls(page_size, 1, 1, num_pages)

    @classmethod
    def interleave(cls, page_size: int, shard_size: int, pages_per_class: int) -> PageLayout:
        """Return the page-interleave layout: owner ``l % N``, pages 0..N-1 reserved."""
        return cls(page_size, shard_size, shard_size, pages_per_class)

    @classmethod
    def owner_lanes(cls, page_size: int, cp_size: int, pages_per_class: int) -> PageLayout:
        """Return the owner-lane layout: owner ``(l - 1) % N``, page 0 reserved."""
        return cls(page_size, cp_size, 1, pages_per_class)

    @property
    def num_pages(self) -> int:
        """Size of the id space, reserved ids included: tables have this many entries."""
        return self.first_page + self.capacity_pages

    @property
    def capacity_pages(self) -> int:
        """Pages that can be handed out, all classes together."""
        return self.pages_per_class * self.num_classes

    @property
    def rank_rows(self) -> int:
        """Rows of one rank's pool tensor, its trash page included."""
        return (self.pages_per_class + 1) * self.page_size

    def class_of(self, pages: IntLike) -> IntLike:
        """Return the owner class of each page."""
        return (pages - self.first_page) % self.num_classes

    def local_page(self, pages: IntLike) -> IntLike:
        """Return each page's number in its owner's pool tensor; reserved ids give 0."""
        return (pages + (self.num_classes - self.first_page)) // self.num_classes

    def page_at(self, classes: IntLike, local_pages: IntLike) -> IntLike:
        """Return the page of a class and a local page >= 1: the inverse of the two above."""
        return local_pages * self.num_classes + (classes + (self.first_page - self.num_classes))

    def local_row(self, locs: IntLike) -> IntLike:
        """Return the row of each slot in its owner's pool tensor."""
        return self.local_page(locs // self.page_size) * self.page_size + locs % self.page_size

    def class_at(self, base: int, position: int) -> int:
        """Return the class of position-page ``position`` of a chain with rotation base ``base``."""
        return (base + position) % self.num_classes

    def base_of(self, page: int, position: int) -> int:
        """Return the rotation base of the chain whose position-page ``position`` is ``page``."""
        return (self.class_of(page) - position) % self.num_classes

    def cyclic_classes(self, base: int, start: int, count: int) -> IntArray:
        """Return the classes of position-pages ``[start, start + count)``: int64[count]."""
        first = base + start
        return np.arange(first, first + count, dtype=np.int64) % self.num_classes

    def cyclic_counts(self, base: int, start: int, count: int) -> IntArray:
        """Return pages per class of a cyclic run in closed form: int64[num_classes]."""
        rounds, extra = divmod(count, self.num_classes)
        counts = np.empty(self.num_classes, dtype=np.int64)
        counts.fill(rounds)
        first = self.class_at(base, start)
        stop = first + extra
        counts[first:stop] += 1
        if stop > self.num_classes:
            counts[: stop - self.num_classes] += 1
        return counts

    def count_classes(self, pages: PageIds) -> IntArray:
        """Return pages per class by counting: int64[num_classes]. Cost: O(pages)."""
        return self.tally(self.class_of(pages))

    def tally(self, classes: IntArray) -> IntArray:
        """Return how often each class is named: int64[num_classes]. Cost: O(classes)."""
        return np.bincount(classes, minlength=self.num_classes).astype(np.int64, copy=False)

    def is_cyclic(self, pages: PageIds) -> bool:
        """Say whether consecutive pages lie in consecutive classes. Cost: O(pages)."""
        steps = (pages[1:] - pages[:-1]) % self.num_classes
        return bool((steps == 1 % self.num_classes).all())
