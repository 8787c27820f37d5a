"""The allocator of a pool whose pages lie on the context-parallel rank that computes them.

Each rank owns a lane of pages: page ``l`` lies on lane ``(l - 1) % cp_size``. A draw with owners
takes each page from the lane that it names, and is None when one lane is short, however full the
others are. A stock draw takes any lane, the fullest first, which keeps the lanes even.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alloc.extend import ExtendBatch
from alloc.layout import PageLayout
from alloc.paged import PagedTokenToKVPoolAllocator
from alloc.spaces import IntArray, PageIds, Slots, as_count, as_int64, ceil_div, exclusive_sum


def build_in_seq_page_compute_owners(
    prefix_len: int, seq_len: int, page_size: int, cp_size: int
) -> IntArray:
    """Return the rank that computes each new page of one prefill split zigzag over ``cp_size``.

    The new pages are cut into ``2 * cp_size`` consecutive segments, and rank r takes segments r and
    ``2 * cp_size - 1 - r``: an early one, which attends to little, and a late one. Every page is in
    one segment, so one rank computes all of it. Segments differ by at most one page, the longer
    ones first; no rank then has two pages more than another. Fewer pages than segments leave the
    last segments empty.

    Args:
        prefix_len: tokens that have pages; the rest of their last page opens no page.
        seq_len: tokens afterwards.
        page_size: tokens of a page.
        cp_size: ranks.

    Returns:
        int64[ceil(seq_len / page_size) - ceil(prefix_len / page_size)], each in [0, cp_size).

    Raises:
        ValueError: a size is not an integer or less than 1, or not
            ``0 <= prefix_len <= seq_len < 2**63``.

    >>> build_in_seq_page_compute_owners(0, 8 * 16, page_size=16, cp_size=2).tolist()
    [0, 0, 1, 1, 1, 1, 0, 0]
    >>> build_in_seq_page_compute_owners(20, 100, page_size=16, cp_size=2).tolist()
    [0, 0, 1, 1, 0]
    """
    prefix_len, seq_len = as_count(prefix_len, "prefix_len"), as_count(seq_len, "seq_len")
    page_size, cp_size = as_count(page_size, "page_size"), as_count(cp_size, "cp_size")
    if page_size < 1 or cp_size < 1:
        raise ValueError(f"page_size={page_size} and cp_size={cp_size} must be at least 1")
    if not 0 <= prefix_len <= seq_len < 2**63:
        raise ValueError(f"0 <= prefix_len={prefix_len} <= seq_len={seq_len} < 2**63 must hold")
    num_pages = ceil_div(seq_len, page_size) - ceil_div(prefix_len, page_size)
    segments = np.arange(2 * cp_size, dtype=np.int64)
    shortest, longer = divmod(num_pages, 2 * cp_size)
    lengths = shortest + (segments < longer)
    return np.minimum(segments, segments[::-1]).repeat(lengths)


class CPSharedPagedTokenToKVPoolAllocator(PagedTokenToKVPoolAllocator):
    """Hands out the logical pages 1..logical_size / page_size of ``cp_size`` ranks.

    Args:
        logical_size: token slots of all ranks together.
        physical_size: token slots of one rank.
        page_size: tokens of a page.
        dtype, device, kvcache, need_sort, debug: see ``BaseTokenToKVPoolAllocator``.
        cp_size: ranks that share the pool.
        cp_rank: this rank; kept for the caller. Draws are the same on every rank.

    Raises:
        ValueError: a size is not whole pages, the sizes disagree, or the rank is out of range.
    """

    def __init__(
        self,
        logical_size: int,
        physical_size: int,
        page_size: int,
        dtype: Any,
        device: Any,
        kvcache: Any,
        need_sort: bool,
        cp_size: int,
        cp_rank: int,
        *,
        debug: bool = False,
    ) -> None:
        layout = _layout_of(logical_size, physical_size, page_size, cp_size, cp_rank)
        super().__init__(
            logical_size, page_size, dtype, device, kvcache, need_sort, debug=debug, layout=layout
        )
        self.physical_size = layout.pages_per_class * layout.page_size
        self.cp_size = layout.num_classes
        self.cp_rank = as_count(cp_rank, "cp_rank")

    # Stock draws: any lane

    def alloc_pages(self, num_pages: int) -> PageIds | None:
        """Take each page from the lane with most free pages, ties to the lowest; None when short.

        Staged pages count only when the free ones are too few. A fresh pool gives 1, 2, 3, ...
        Cost: O(num_pages log num_pages).
        """
        num_pages = as_count(num_pages, "num_pages")
        if num_pages < 0:
            raise ValueError(f"num_pages={num_pages} must not be negative")
        counts = self._counts_for(num_pages)
        if num_pages > int(counts.sum()):
            return None
        return self.free_list.draw(_fullest_first(counts, num_pages))

    def pages_by_class(
        self,
        prefix_lens: Any,
        seq_lens: Any,
        rotation_bases: list[int | None],
        continues: list[bool] | None = None,
        *,
        evictable_by_class: IntArray | None = None,
    ) -> IntArray:
        """Return the pages that a batch would take from each lane: int64[cp_size].

        What free pages lack is taken from the lanes with most evictable ones. The batch fits
        exactly when every lane covers its number with free and evictable pages; after an eviction
        the draw may take other lanes, as many pages in all.
        """
        num_pages = ExtendBatch.of(prefix_lens, seq_lens, self.page_size).num_new_pages
        counts = self._counts_for(num_pages)
        free = min(num_pages, int(counts.sum()))
        taken = _taken_from(counts, free)
        if evictable_by_class is not None:
            evicted = min(num_pages - free, int(evictable_by_class.sum()))
            taken += _taken_from(evictable_by_class, evicted)
        taken[0] += num_pages - int(taken.sum())
        return taken

    def _counts_for(self, num_pages: int) -> IntArray:
        """Return the pages per lane that a stock draw chooses from."""
        counts = self.free_list.free_counts()
        return counts if num_pages <= int(counts.sum()) else self.free_list.counts()

    # Draws with owners

    def compute_owner_lane_stats(
        self, page_compute_owners: Any
    ) -> tuple[list[int], list[int], list[int]]:
        """Return what a draw with owners needs, what there is, and what is missing.

        Args:
            page_compute_owners: int[num_pages] lane of each page.

        Returns:
            ``(required, available, deficits)``, one count per lane; available pages are free or
            staged. Deficits are what to evict: ``EvictParams(class_deficits=tuple(deficits))``.

        Raises:
            ValueError: an owner is not in [0, cp_size).
        """
        required = self.layout.tally(self._owners(page_compute_owners))
        available = self.free_list.counts()
        deficits = self.class_deficits(required)
        return required.tolist(), available.tolist(), deficits.tolist()

    def alloc_classes(self, classes: IntArray) -> PageIds | None:
        """Take one page of each lane, in the given order; nothing is merged for it."""
        return self.free_list.draw(classes, merge=False)

    def alloc_owner_pages(self, page_compute_owners: Any) -> PageIds | None:
        """Take one page of each owner's lane, in the given order: the host twin.

        A lane gives its free pages in draw order, then staged ones in the order of their release;
        nothing is merged.

        Returns:
            int64[num_pages], or None when a lane is short; nothing changed then.

        Raises:
            ValueError: an owner is not in [0, cp_size).
        """
        return self.alloc_classes(self._owners(page_compute_owners))

    def alloc_pages_with_owners(self, page_compute_owners: Any) -> Slots | None:
        """Take whole pages, page i from the lane ``page_compute_owners[i]``.

        Args:
            page_compute_owners: int[num_pages], in [0, cp_size); empty gives an empty result.

        Returns:
            int64[num_pages * page_size], page-contiguous in input order, or None when a lane is
            short: never pages of another lane. Nothing changed then.
        """
        owners = self._owners(page_compute_owners)
        if not self.free_list.can_draw(self.layout.tally(owners)):
            return None
        out = self.io.empty(len(owners) * self.page_size)
        self.io.fill_pages(out, self._draw_owned(owners), self.page_size)
        return out

    def alloc_extend_compute_owner(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int | None,
        page_compute_owners: Any,
    ) -> Slots | None:
        """Extend one request; its new pages lie on the ranks that compute them.

        The rest of its last page is filled first, from ``last_loc + 1``; new pages follow with the
        given owners in order. All other arguments are those of ``alloc_extend``.

        Args:
            page_compute_owners: int[num_new_pages] lane of each new page
                (``build_in_seq_page_compute_owners``).

        Returns:
            int64[seq_len - prefix_len], the same on every rank, or None when a lane is short;
            nothing changed then.

        Raises:
            ValueError: not one request, not one owner for each new page, an owner out of range,
                or lengths and last slot contradict each other.
        """
        batch = ExtendBatch.of(prefix_lens_cpu, seq_lens_cpu, self.page_size)
        if len(batch.seq_lens) != 1:
            raise ValueError(
                f"compute-owner allocation supports batch size 1 only, got {len(batch.seq_lens)}"
            )
        batch.check_extend_num_tokens(extend_num_tokens)
        owners = self._owners(page_compute_owners)
        if len(owners) != batch.num_new_pages:
            raise ValueError(
                f"compute-owner page count mismatch: num_new_pages={batch.num_new_pages} "
                f"page_compute_owners={len(owners)}"
            )
        self._check_last_loc(batch, last_loc)
        if not self.free_list.can_draw(self.layout.tally(owners)):
            return None
        out = self.io.empty(batch.num_tokens)
        self.io.fill_extend(out, batch, last_loc, self._draw_owned(owners))
        return out

    # Private

    def _owners(self, page_compute_owners: Any) -> IntArray:
        owners = as_int64(page_compute_owners, "page_compute_owners")
        wrong = (owners < 0) | (owners >= self.cp_size)
        if wrong.any():
            raise ValueError(
                f"compute owner must be in [0, {self.cp_size}), got {int(owners[wrong.argmax()])}"
            )
        return owners

    def _draw_owned(self, owners: IntArray) -> PageIds:
        pages = self.alloc_classes(owners)
        assert pages is not None, "the counts were checked before the draw"
        if self.debug:
            assert np.array_equal(self.layout.class_of(pages), owners), "a page on another lane"
        return pages


def _layout_of(
    logical_size: int, physical_size: int, page_size: int, cp_size: int, cp_rank: int
) -> PageLayout:
    """Return the layout of a pool after validating its sizes and rank against each other."""
    logical_size = as_count(logical_size, "logical_size")
    physical_size = as_count(physical_size, "physical_size")
    page_size, cp_size = as_count(page_size, "page_size"), as_count(cp_size, "cp_size")
    cp_rank = as_count(cp_rank, "cp_rank")
    if page_size < 1:
        raise ValueError(f"page_size={page_size} must be at least 1")
    for name, size in (("logical_size", logical_size), ("physical_size", physical_size)):
        if size % page_size:
            raise ValueError(f"{name} must be page aligned, got {size} for pages of {page_size}")
    if logical_size != physical_size * cp_size:
        raise ValueError(
            f"logical_size must equal physical_size * cp_size, got "
            f"logical_size={logical_size} physical_size={physical_size} cp_size={cp_size}"
        )
    if not 0 <= cp_rank < cp_size:
        raise ValueError(f"cp_rank must be in [0, {cp_size}), got {cp_rank}")
    if physical_size < page_size:
        raise ValueError(f"physical_size={physical_size} must be at least one page")
    return PageLayout.owner_lanes(page_size, cp_size, physical_size // page_size)


def _taken_from(counts: IntArray, num_pages: int) -> IntArray:
    """Return how many pages each lane gives when the fullest lane gives each: int64[lanes].

    Args:
        counts: int64[lanes].
        num_pages: at most the sum of the counts. Ties go to the lowest lane.
    """
    ranked = np.sort(counts)[::-1]
    above = ranked.cumsum() - np.arange(1, len(counts) + 1) * ranked
    lanes = int(np.count_nonzero(above < num_pages))
    taken = np.zeros(len(counts), dtype=np.int64)
    if lanes:
        giving = np.sort(np.argsort(-counts, kind="stable")[:lanes])
        level, spared = divmod(int(ranked[:lanes].sum()) - num_pages, lanes)
        taken[giving] = counts[giving] - level
        taken[giving[lanes - spared :]] -= 1
    return taken


def _fullest_first(counts: IntArray, num_pages: int) -> IntArray:
    """Return the lane of each page when the fullest lane gives each: int64[num_pages]."""
    taken = _taken_from(counts, num_pages)
    lanes = np.arange(len(counts), dtype=np.int64).repeat(taken)
    levels = (counts + exclusive_sum(taken)).repeat(taken) - np.arange(num_pages)
    return lanes[np.argsort(-levels, kind="stable")]
