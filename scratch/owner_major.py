"""The order of a plan's prefix pages: unique, by owner, then by local page. One sort, host only.

Every rank computes the same order from the same pages; only what it sends differs. A page's sort
key is ``owner * stride + local page`` with a stride above every local page. The arithmetic of
owners and local pages is ``PageLayout``'s.

>>> layout = PageLayout.interleave(page_size=16, shard_size=2, pages_per_class=8)
>>> order = owner_major(layout, sorted_keys(layout, *classify(layout, np.array([8, 3, 4, 3]))))
>>> order.pages.tolist(), order.counts.tolist(), order.places(block_pages=2).tolist()
([4, 8, 3], [2, 1], [0, 1, 2])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from alloc import IntArray, PageIds, PageLayout
from alloc.spaces import exclusive_sum

Ints: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""int32 or int64[n], host: int32 where every key fits, since it sorts twice as fast."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnerMajor:
    """Distinct pages in owner-major order.

    Attributes:
        pages: int64[n] logical pages, by owner, then by local page.
        local_pages: int[n] their local pages.
        counts: int64[N] pages of each owner.
    """

    pages: PageIds
    local_pages: Ints
    counts: IntArray

    def places(self, block_pages: int) -> Ints:
        """Return each page's scratch page if every owner has ``block_pages``: int32[n]."""
        owners = np.arange(len(self.counts), dtype=np.int64)
        shifts = owners * block_pages - exclusive_sum(self.counts)
        places: Ints = np.repeat(shifts.astype(np.int32), self.counts)
        places += np.arange(len(self.pages), dtype=np.int32)
        return places

    def local_pages_of(self, rank: int) -> Ints:
        """Return the local pages that ``rank`` owns, ascending."""
        end = int(self.counts[: rank + 1].sum())
        return self.local_pages[end - int(self.counts[rank]) : end]


def key_dtype(layout: PageLayout) -> type[np.int32] | type[np.int64]:
    """Return the narrowest dtype that holds every page and sort key of a layout."""
    largest = layout.num_classes * _stride(layout) + layout.first_page
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64


def classify(layout: PageLayout, pages: Ints) -> tuple[Ints, Ints]:
    """Return owner and local page of usable pages.

    The owner is the distance from the first page of the page's group: equal to
    ``layout.class_of`` at the cost of a division by a scalar instead of a remainder.
    """
    local_pages: Ints = layout.local_page(pages)
    first_class = np.zeros(1, dtype=pages.dtype)
    return pages - layout.page_at(first_class, local_pages), local_pages


def sorted_keys(layout: PageLayout, classes: Ints, local_pages: Ints) -> Ints:
    """Return ascending sort keys, repeats kept. Cost: one sort of n keys."""
    keys = classes * _stride(layout)
    keys += local_pages
    keys.sort()
    return keys


def owner_major(layout: PageLayout, keys: Ints) -> OwnerMajor:
    """Return the distinct pages behind ascending sort keys. Cost: O(n)."""
    repeated = keys[1:] == keys[:-1]
    if repeated.any():
        keys = keys[np.concatenate([[True], ~repeated])]
    owners = np.arange(layout.num_classes + 1, dtype=keys.dtype)
    bounds = np.searchsorted(keys, owners * _stride(layout))
    counts: IntArray = bounds[1:] - bounds[:-1]
    owner_of: Ints = np.repeat(owners[:-1], counts)
    local_pages: Ints = keys - owner_of * _stride(layout)
    pages = layout.page_at(owner_of, local_pages)
    return OwnerMajor(pages.astype(np.int64), local_pages, counts)


def first_repeat(layout: PageLayout, keys: Ints) -> int | None:
    """Return the first page that ascending keys name twice, or None."""
    repeated = keys[1:] == keys[:-1]
    return _page_of_key(layout, keys[repeated.argmax()]) if repeated.any() else None


def first_shared(layout: PageLayout, keys: Ints, others: Ints) -> int | None:
    """Return the first page of ``keys`` that is in ``others`` too, or None.

    Both ascend. Cost: O(len(keys) * log len(others)).
    """
    if not len(others):
        return None
    found = np.searchsorted(others, keys)
    found[found == len(others)] = 0
    shared = others[found] == keys
    return _page_of_key(layout, keys[shared.argmax()]) if shared.any() else None


def first_not_cyclic(layout: PageLayout, classes: Ints, run_lens: Sequence[int]) -> int | None:
    """Return the first run whose owners are not consecutive, or None.

    Args:
        layout: where pages lie.
        classes: int[Σ run_lens] owners, run after run.
        run_lens: pages of each run.

    Cost: O(pages), whatever the number of runs.
    """
    runs = [run for run, count in enumerate(run_lens) if count]
    if not runs:
        return None
    lens = np.array([run_lens[run] for run in runs])
    starts = exclusive_sum(lens)
    longest = int(lens.max())
    wheel = layout.cyclic_classes(0, 0, longest + layout.num_classes).astype(classes.dtype)
    turns = np.repeat((classes[starts] - starts).astype(np.int32), lens)
    turns += np.arange(len(classes), dtype=np.int32)
    wrong = wheel[turns] != classes
    if not wrong.any():
        return None
    return runs[int(np.searchsorted(starts, wrong.argmax(), side="right")) - 1]


def _stride(layout: PageLayout) -> int:
    return layout.pages_per_class + 1


def _page_of_key(layout: PageLayout, key: Any) -> int:
    owner, local_page = divmod(int(key), _stride(layout))
    return layout.page_at(owner, local_page)
