"""The classed allocator of a page-interleave pool: every chain runs cyclically over the ranks.

Position-page P of a chain with rotation base b is drawn from class ``(b + P) % N``, so a chain's
pages spread over the ranks with counts that differ by at most one. One class that is empty stops
every chain that needs it: that is why ``available_size`` is the floor over the classes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from alloc.base import BaseTokenToKVPoolAllocator, ExtendPages
from alloc.extend import ExtendBatch
from alloc.layout import PageLayout
from alloc.placement import PageShardSpec
from alloc.spaces import IntArray, PageIds, Slots, as_count


class ClassFills:
    """Free pages of each class while a batch is planned, nothing drawn yet.

    Only differences between classes matter, so whole rounds of a cyclic run need no update.
    """

    __slots__ = ("_counts",)

    def __init__(self, counts: IntArray) -> None:
        self._counts: list[int] = counts.tolist()

    def least_full(self) -> int:
        """Return the class with most free pages, ties to the lowest."""
        return self._counts.index(max(self._counts))

    def draw(self, first_class: int, num_pages: int) -> None:
        """Plan a cyclic run. Cost: O(num_classes)."""
        classes = len(self._counts)
        for step in range(num_pages % classes):
            self._counts[(first_class + step) % classes] -= 1


class PageInterleavePoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out logical pages of N ranks; rank r owns the pages ``l % N == r``.

    Args:
        size: physical token slots of one rank; what is over a whole page is not used.
        physical_page_size: tokens of a page on a rank.
        shard_size: ranks N, more than 1.
        dtype, device, kvcache, need_sort, debug: see ``BaseTokenToKVPoolAllocator``.
        shard_spec: checked against the other arguments when given.

    Attributes:
        size: logical slots, N times one rank's.
        page_size: the physical page size.
        shard_size: N.
    """

    def __init__(
        self,
        size: int,
        physical_page_size: int,
        shard_size: int,
        dtype: Any,
        device: Any,
        kvcache: Any,
        need_sort: bool = False,
        shard_spec: PageShardSpec | None = None,
        *,
        debug: bool = False,
    ) -> None:
        layout = _layout_of(size, physical_page_size, shard_size)
        if shard_spec is not None and (shard_spec.shard_size, shard_spec.page_size) != (
            layout.num_classes,
            layout.page_size,
        ):
            raise ValueError(
                f"shard_spec has shard_size={shard_spec.shard_size} and "
                f"page_size={shard_spec.page_size}; the allocator has {shard_size} and "
                f"{physical_page_size}"
            )
        super().__init__(
            layout,
            dtype=dtype,
            device=device,
            kvcache=kvcache,
            need_sort=need_sort,
            debug=debug,
        )
        self.shard_size = layout.num_classes
        self.shard_spec = shard_spec

    # Sizes

    @property
    def class_free_pages(self) -> tuple[Slots, ...]:
        """Each class's free pages in draw order, staged ones left out; copies, arrays read-only."""
        lists = map(self.free_list.free_pages_of, range(self.shard_size))
        return tuple(self.io.from_host(pages) for pages in lists)

    def class_free_page_counts(self) -> list[int]:
        """Return free + staged pages per class."""
        counts: list[int] = self.free_list.counts().tolist()
        return counts

    def least_full_class(self) -> int:
        """Return the class with most free pages, ties to the lowest: where a new chain starts."""
        return int(self.free_list.counts().argmax())

    def available_size(self) -> int:
        """Return the floor ``N * ps * min(class counts)``: tokens that any chain can draw."""
        return int(self.free_list.counts().min()) * self.shard_size * self.page_size

    def aggregate_free_size(self) -> int:
        """Return ``ps * sum(class counts)``: what is free, evenly spread or not."""
        return int(self.free_list.counts().sum()) * self.page_size

    # Draws

    def alloc_pages(self, num_pages: int) -> PageIds | None:
        """Not available: a page needs a class, and only a chain's base says which."""
        raise NotImplementedError(
            "a page-interleave pool draws by rotation base; "
            "use alloc_extend_pages, alloc_cyclic_pages or alloc_extend"
        )

    def alloc(self, need_size: int) -> Slots | None:
        """Not available: slots without a chain have no rotation base."""
        raise NotImplementedError(
            "alloc has no rotation base; use alloc_extend(..., rotation_bases=...) or "
            "alloc_cyclic(start_class, need_size)"
        )

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Slots | None:
        """Not available: sharded pools serve prefill; decode on rank-local pools."""
        raise NotImplementedError(
            "a page-interleave pool is prefill-only; use alloc_extend with whole-page prefixes, "
            "or decode on a rank-local PagedTokenToKVPoolAllocator"
        )

    def alloc_cyclic_pages(self, start_class: int, num_pages: int) -> PageIds | None:
        """Take ``num_pages`` pages of classes ``start_class, start_class + 1, ...`` (mod N)."""
        start_class = as_count(start_class, "start_class")
        if not 0 <= start_class < self.shard_size:
            raise ValueError(f"start_class={start_class} must be in [0, {self.shard_size})")
        num_pages = as_count(num_pages, "num_pages")
        if num_pages < 0:
            raise ValueError(f"num_pages={num_pages} must not be negative")
        if not self._can_draw_any(num_pages):
            return None
        return self.free_list.draw(self.layout.cyclic_classes(start_class, 0, num_pages))

    def alloc_cyclic(self, start_class: int, need_size: int) -> Slots | None:
        """Take whole pages of one chain at a fixed phase, for reloads.

        Args:
            start_class: class of the first page, in [0, N).
            need_size: tokens, a multiple of page_size.

        Returns:
            int64[need_size], or None when a class is short; nothing changed then.
        """
        return self._expand_draw(
            self._whole_pages(need_size), lambda n: self.alloc_cyclic_pages(start_class, n)
        )

    def alloc_extend(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int | None,
        rotation_bases: list[int | None] | None = None,
        continues: list[bool] | None = None,
    ) -> Slots | None:
        """Extend each request's chain; see ``alloc_extend_pages`` for bases.

        Args:
            prefix_lens, prefix_lens_cpu, seq_lens, seq_lens_cpu, extend_num_tokens: as in
                ``PagedTokenToKVPoolAllocator.alloc_extend``; prefixes must be whole pages.
            last_loc: int[batch] slot of each request's last prefix token, -1 without one. Its
                page's owner is checked against the base on the host, or in debug.
            rotation_bases: one entry per request, filled in place on success only.
            continues: see ``alloc_extend_pages``.

        Returns:
            int64[sum of extends] in batch order, or None when a class is short; nothing changed
            then, ``rotation_bases`` included.
        """
        batch = ExtendBatch.of(prefix_lens_cpu, seq_lens_cpu, self.page_size)
        batch.check_extend_num_tokens(extend_num_tokens)
        batch.check_one_last_loc_each(last_loc)
        num_requests = len(batch.seq_lens)
        bases: list[int | None] = [None] * num_requests
        if rotation_bases is not None:
            if not isinstance(rotation_bases, list):
                raise ValueError(
                    f"rotation_bases is a {type(rotation_bases).__name__}; pass a list, which is "
                    f"filled in place"
                )
            bases = rotation_bases
        resolved = self._resolve(batch, bases, continues)
        if self.device is None or self.debug:
            last_locs = self.io.to_host(last_loc)
            batch.check_last_locs(last_locs)
            self._check_phase(batch, last_locs, resolved, continues)
        if not self._can_draw_any(batch.num_new_pages):
            return None
        classes = self._classes(batch, resolved)
        if not self.free_list.can_draw(self.layout.tally(classes)):
            return None
        out = self.io.empty(batch.num_tokens)
        pages = self.free_list.draw(classes)
        assert pages is not None, "the counts were checked before the draw"
        self.io.fill_extend(out, batch, last_loc, pages)
        if rotation_bases is not None:
            rotation_bases[:] = resolved
        return out

    def alloc_extend_pages(
        self,
        prefix_lens: Any,
        seq_lens: Any,
        rotation_bases: list[int | None],
        continues: list[bool] | None = None,
    ) -> ExtendPages | None:
        """Draw the new pages of a batch: the host twin of ``alloc_extend``.

        Args:
            prefix_lens: int[batch] tokens, whole pages.
            seq_lens: int[batch] tokens afterwards.
            rotation_bases: each request's base in [0, N), or None for a new chain. A None is
                resolved at its turn from the fills that earlier requests of the batch leave:
                the chain's next page starts in the class with most free pages.
            continues: False marks a seam: the request's new pages take their own base and the
                owner of the prefix's last page is not asked. Default: all True.

        Returns:
            The pages and the resolved bases, or None when a class is short for the whole batch.
            ``rotation_bases`` is left as it is.

        Raises:
            ValueError: a prefix is not whole pages, a base is out of range, or None stands for a
                request that continues a prefix.
        """
        batch = ExtendBatch.of(prefix_lens, seq_lens, self.page_size)
        resolved = self._resolve(batch, rotation_bases, continues)
        if batch.num_new_pages > self.layout.capacity_pages:  # don't build a list of that length
            return None
        pages = self.free_list.draw(self._classes(batch, resolved))
        return None if pages is None else ExtendPages(pages, list(resolved))

    def pages_by_class(
        self,
        prefix_lens: Any,
        seq_lens: Any,
        rotation_bases: list[int | None],
        continues: list[bool] | None = None,
        *,
        evictable_by_class: IntArray | None = None,
    ) -> IntArray:
        """Return the pages that a batch would draw from each class: int64[N]. Changes nothing.

        Bases alone say which; ``evictable_by_class`` is not read.
        """
        batch = ExtendBatch.of(prefix_lens, seq_lens, self.page_size)
        resolved = self._resolve(batch, rotation_bases, continues)
        return self.layout.tally(self._classes(batch, resolved))

    # Private

    def _resolve(
        self,
        batch: ExtendBatch,
        bases: list[int | None],
        continues: list[bool] | None,
    ) -> list[int]:
        """Validate a batch's bases and resolve the None entries on simulated fills."""
        num_requests = len(batch.seq_lens)
        if continues is None:
            continues = [True] * num_requests
        if len(bases) != num_requests or len(continues) != num_requests:
            raise ValueError(
                f"{num_requests} requests need {num_requests} rotation_bases and continues, got "
                f"{len(bases)} and {len(continues)}"
            )
        unaligned = batch.prefix_lens % self.page_size
        if np.count_nonzero(unaligned):
            i = int((unaligned != 0).argmax())
            raise ValueError(
                f"request {i} has prefix_len={int(batch.prefix_lens[i])}, which is not a "
                f"multiple of page_size={self.page_size}; match with a page-aligned key"
            )
        for i, base in enumerate(bases):
            if base is not None and not (
                isinstance(base, (int, np.integer)) and 0 <= base < self.shard_size
            ):
                raise ValueError(
                    f"request {i} has base {base!r}; it must be an integer in "
                    f"[0, {self.shard_size})"
                )
        if None not in bases:
            return [int(base) for base in bases if base is not None]
        return self._resolve_new(batch, bases, continues)

    def _resolve_new(
        self, batch: ExtendBatch, bases: list[int | None], continues: list[bool]
    ) -> list[int]:
        """Give each None the base that starts its new pages in the class with most pages left."""
        fills = ClassFills(self.free_list.counts())
        resolved: list[int] = []
        runs = zip(batch.prefix_pages.tolist(), batch.new_pages.tolist(), strict=True)
        for i, (prefix, new) in enumerate(runs):
            base = bases[i]
            if base is None:
                if prefix and continues[i]:
                    raise ValueError(
                        f"request {i} continues a prefix of {prefix} pages without a rotation "
                        f"base; pass the base of its chain"
                    )
                base = (fills.least_full() - prefix) % self.shard_size
            resolved.append(int(base))
            fills.draw(self.layout.class_at(base, prefix), new)
        return resolved

    def _classes(self, batch: ExtendBatch, bases: list[int]) -> IntArray:
        """Return the class of every new page of a batch, in batch order."""
        new = batch.new_pages
        firsts = np.asarray(bases, dtype=np.int64) + batch.prefix_pages
        classes = (firsts - batch.page_starts).repeat(new)
        classes += np.arange(len(classes), dtype=np.int64)
        classes %= self.shard_size
        return classes

    def _check_phase(
        self,
        batch: ExtendBatch,
        last_locs: IntArray,
        bases: list[int],
        continues: list[bool] | None,
    ) -> None:
        """Raise ValueError when a base disagrees with the owner of the prefix's last page."""
        expected = (np.asarray(bases, dtype=np.int64) + batch.prefix_pages - 1) % self.shard_size
        owners = self.layout.class_of(last_locs // self.page_size)
        wrong = (owners != expected) & (batch.prefix_lens > 0)
        if continues is not None:
            wrong &= np.asarray(continues, dtype=np.bool_)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"request {i}: base {bases[i]} puts position-page {int(batch.prefix_pages[i]) - 1} "
                f"on rank {int(expected[i])}, but last_loc={int(last_locs[i])} lies on rank "
                f"{int(owners[i])}"
            )


def _layout_of(size: int, physical_page_size: int, shard_size: int) -> PageLayout:
    """Return the layout of a pool after validating its sizes."""
    size = as_count(size, "size")
    page_size = as_count(physical_page_size, "physical_page_size")
    shard_size = as_count(shard_size, "shard_size")
    if shard_size <= 1:
        raise ValueError(
            f"shard_size={shard_size} must be more than 1; "
            f"use PagedTokenToKVPoolAllocator for one rank"
        )
    if page_size < 1:
        raise ValueError(f"physical_page_size={page_size} must be at least 1")
    if size < page_size:
        raise ValueError(f"size={size} must be at least one page of {page_size}")
    return PageLayout.interleave(page_size, shard_size, size // page_size)


def page_interleave_shard_size(allocator: Any) -> int:
    """Return N of a page-interleave allocator, and 1 for every other allocator."""
    return allocator.shard_size if isinstance(allocator, PageInterleavePoolAllocator) else 1
