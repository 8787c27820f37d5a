"""The order of a plan's prefix pages: unique, by owner, then by local page. One sort, host only.

Every rank computes the same order from the same pages; only what it sends differs. A page's sort
key is ``owner * stride + local page`` with a stride above every local page. The arithmetic of
owners and local pages is ``PageLayout``'s.

Pages come in cyclic runs, whose consecutive pages lie on consecutive ranks. Laid into rows of N
entries, one column a rank, they are told apart by rank without a comparison, and N short sorts
are twice as fast as a long one:

    run of base 2, N = 4     |  .  .  a  b |      a, e in the column of rank 2
                             |  c  d  e  . |      . is padding, which sorts last and is dropped

>>> layout = PageLayout.interleave(page_size=16, shard_size=2, pages_per_class=8)
>>> order = owner_major(layout, sorted_keys(layout, np.array([8, 3, 4, 3])))
>>> order.pages.tolist(), order.counts.tolist(), order.places(block_pages=2).tolist()
([4, 8, 3], [2, 1], [0, 1, 2])
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np

from alloc import IntArray, PageLayout, ceil_div
from alloc.spaces import exclusive_sum

Ints: TypeAlias = "np.ndarray[Any, np.dtype[Any]]"
"""int32 or int64[n], host: int32 where every key fits, since it sorts twice as fast."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnerMajor:
    """Distinct pages in owner-major order.

    Attributes:
        pages: int[n] logical pages, by owner, then by local page.
        local_pages: int[n] their local pages.
        counts: int64[N] pages of each owner.
    """

    pages: Ints
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


def sorted_keys(layout: PageLayout, pages: Ints) -> Ints:
    """Return ascending sort keys of usable pages, repeats kept. Cost: one sort of n keys.

    The owner is a page's distance from the first page of its group: ``layout.class_of`` at the
    cost of a division by a scalar instead of a remainder.
    """
    local_pages: Ints = layout.local_page(pages)
    keys = pages - layout.page_at(np.zeros(1, dtype=pages.dtype), local_pages)
    keys *= _stride(layout)
    keys += local_pages
    keys.sort()
    return keys


class NotCyclicError(ValueError):
    """A run's owners are not consecutive.

    Attributes:
        run: the first such run.
    """

    def __init__(self, run: int) -> None:
        super().__init__(f"run {run} is not cyclic")
        self.run = run


def sorted_keys_of_runs(layout: PageLayout, runs: Sequence[Ints]) -> Ints:
    """Return ``sorted_keys`` of all runs' pages together, for cyclic runs.

    Args:
        layout: where pages lie.
        runs: usable pages of each run; none is empty, all of one dtype.

    Raises:
        NotCyclicError: consecutive pages of a run are not on consecutive ranks.

    Cost: O(pages) and N sorts of 1/N of them.
    """
    ranks, columns = layout.num_classes, _columns_of(layout, runs[0].dtype)
    padding = columns.padding_pages
    pieces: list[Ints] = []
    for run in runs:
        base = layout.class_of(int(run[0]))
        end = (base + len(run)) % ranks
        pieces += [padding[:base], run, padding[end:] if end else padding[:0]]
    by_rank = np.concatenate(pieces).reshape(-1, ranks).T.copy()
    by_rank -= columns.first_pages
    keys = by_rank // ranks  # a rank's pages are as far apart as there are ranks
    astray = keys * ranks != by_rank
    if astray.any():
        raise NotCyclicError(_run_at(layout, runs, int(astray.any(axis=0).argmax())))
    keys += columns.first_keys
    keys.sort(axis=1)
    if sum(map(len, runs)) == keys.size:
        return keys.reshape(-1)
    unpadded: Ints = keys[keys != columns.padding_keys]
    return unpadded


@dataclass(frozen=True, slots=True, eq=False)
class _Columns:
    """Constants of the ranks' columns: [N, 1] but for ``padding_pages``, [N].

    Attributes:
        padding_pages: a page of each rank above all that exist.
        padding_keys: their keys.
        first_pages: local page 1 of each rank.
        first_keys: their keys.
    """

    padding_pages: Ints
    padding_keys: Ints
    first_pages: Ints
    first_keys: Ints


@lru_cache(maxsize=8)
def _columns_of(layout: PageLayout, dtype: np.dtype[Any]) -> _Columns:
    owners = np.arange(layout.num_classes, dtype=dtype)
    first_keys = owners * _stride(layout) + 1
    return _Columns(
        padding_pages=layout.page_at(owners, np.full_like(owners, layout.pages_per_class + 1)),
        padding_keys=(first_keys + layout.pages_per_class)[:, None],
        first_pages=layout.page_at(owners, np.ones_like(owners))[:, None],
        first_keys=first_keys[:, None],
    )


def _run_at(layout: PageLayout, runs: Sequence[Ints], row: int) -> int:
    """Return which run fills a row of N entries."""
    for number, run in enumerate(runs):
        row -= ceil_div(layout.class_of(int(run[0])) + len(run), layout.num_classes)
        if row < 0:
            return number
    raise AssertionError(f"row {row} is past all runs")


def may_be_cyclic(layout: PageLayout, run: Ints) -> bool:
    """Say whether a run ends on the rank on which a cyclic run would. Cost: O(1)."""
    first, last = layout.class_of(int(run[0])), layout.class_of(int(run[-1]))
    return last == layout.class_at(first, len(run) - 1)


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
    return OwnerMajor(layout.page_at(owner_of, local_pages), local_pages, counts)


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


def _stride(layout: PageLayout) -> int:
    """Return a stride above every local page and the padding."""
    return layout.pages_per_class + 2


def _page_of_key(layout: PageLayout, key: Any) -> int:
    owner, local_page = divmod(int(key), _stride(layout))
    return layout.page_at(owner, local_page)
