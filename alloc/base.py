"""What every allocator shares: the API in slots, the host twins in pages, groups and backups.

An allocator *has* a ``ClassedFreeList`` and a ``PageLayout``; subclasses differ in how a draw
chooses classes. Sizes in the public API are tokens; page ids are host int64 arrays. The host
twins (``alloc_pages``, ``free_pages``, ``adopt_pages``, ``release_cached``) carry the work and
never touch a device; the slot calls wrap them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from alloc.extend import ExtendBatch
from alloc.free_list import ClassedFreeList, FreeListMark, PageState
from alloc.layout import PageLayout
from alloc.slots import slot_io
from alloc.spaces import IntArray, Locs, PageIds, Slots, as_count, as_int64


@dataclass(frozen=True, slots=True)
class ExtendPages:
    """The result of a host draw for one batch.

    Attributes:
        pages: int64[num_new_pages], batch order.
        rotation_bases: the base of each request; a classed allocator has resolved None entries.
    """

    pages: PageIds
    rotation_bases: list[int | None]


class BaseTokenToKVPoolAllocator(ABC):
    """Allocator of logical token slots over a paged KV pool.

    Args:
        layout: where pages lie.
        dtype: the KV dtype; kept for the caller, never used here.
        device: device of the slot tensors, or None for NumPy slots without torch.
        kvcache: the pool, returned by ``get_kvcache``.
        need_sort: stage frees and merge them in ascending order only when a draw needs them.
        debug: check more on every call; never changes a result.

    Attributes:
        size: slots that can be handed out, in tokens.
        page_size: tokens of a physical page.
        layout: the pool's ``PageLayout``.
        generation: times that ``clear`` was called.
    """

    def __init__(
        self,
        layout: PageLayout,
        *,
        dtype: Any,
        device: Any,
        kvcache: Any,
        need_sort: bool,
        debug: bool = False,
    ) -> None:
        self.layout = layout
        self.size = layout.capacity_pages * layout.page_size
        self.page_size = layout.page_size
        self.dtype = dtype
        self.device = device
        self.need_sort = bool(need_sort)
        self.debug = debug
        self.io = slot_io(device)
        self.free_list = ClassedFreeList(layout, need_sort=need_sort)
        self._kvcache = kvcache
        self.generation = 0

    # Sizes, in tokens

    def available_size(self) -> int:
        """Return the tokens that can be allocated, free and staged together."""
        return int(self.free_list.counts().sum()) * self.page_size

    def immediate_available_size(self) -> int:
        """Return the tokens on the free list, which a draw takes without a merge."""
        return self.free_list.num_free * self.page_size

    def deferred_available_size(self) -> int:
        """Return the staged tokens (``need_sort``), which a draw gets after a merge."""
        return self.free_list.num_staged * self.page_size

    def allocator_state_str(self) -> str:
        """Return one line with total, immediate and deferred tokens and their pages."""
        free, staged = self.free_list.num_free, self.free_list.num_staged
        return (
            f"total={(free + staged) * self.page_size} "
            f"immediate={self.immediate_available_size()} [free_pages={free}] "
            f"deferred={self.deferred_available_size()} [release_pages={staged}]"
        )

    def get_kvcache(self) -> Any:
        """Return the pool given at construction."""
        return self._kvcache

    def get_all_free_pages(self) -> Slots:
        """Return every free and staged page id in draw order, class by class. Cost: O(free)."""
        lists: list[PageIds] = []
        for c in range(self.layout.num_classes):
            lists += [self.free_list.free_pages_of(c), self.free_list.staged_pages_of(c)]
        return self.io.from_host(np.concatenate(lists))

    # Host twins, in pages

    @abstractmethod
    def alloc_pages(self, num_pages: int) -> PageIds | None:
        """Take ``num_pages`` pages; None when short, with nothing changed."""

    def alloc_extend_pages(
        self,
        prefix_lens: Any,
        seq_lens: Any,
        rotation_bases: list[int | None],
        continues: list[bool] | None = None,
    ) -> ExtendPages | None:
        """Draw the new pages of an extend batch.

        Args:
            prefix_lens: int[batch] tokens that have pages.
            seq_lens: int[batch] tokens afterwards.
            rotation_bases: one entry per request; only a classed allocator reads them.
            continues: False marks a seam; only a classed allocator reads it.

        Returns:
            The pages in batch order and the bases, or None when short; nothing changed then.
        """
        batch = ExtendBatch.of(prefix_lens, seq_lens, self.page_size)
        pages = self.alloc_pages(batch.num_new_pages)
        return None if pages is None else ExtendPages(pages, list(rotation_bases))

    def alloc_classes(self, classes: IntArray) -> PageIds | None:
        """Take one page of each class, in the given order.

        Args:
            classes: int64[num_pages] in [0, num_classes), any order, any repeats.

        Returns:
            int64[num_pages], or None when a class is short; nothing changed then.
        """
        return self.free_list.draw(classes)

    def pages_by_class(
        self,
        prefix_lens: Any,
        seq_lens: Any,
        rotation_bases: list[int | None],
        continues: list[bool] | None = None,
        *,
        evictable_by_class: IntArray | None = None,
    ) -> IntArray:
        """Return the pages that ``alloc_extend_pages`` would draw from each class: int64[C].

        Args:
            prefix_lens, seq_lens, rotation_bases, continues: see ``alloc_extend_pages``.
            evictable_by_class: int64[C] pages that eviction could free. An allocator that may
                take a page from any class looks there for what its free pages lack.
        """
        batch = ExtendBatch.of(prefix_lens, seq_lens, self.page_size)
        return np.array([batch.num_new_pages], dtype=np.int64)

    def class_deficits(self, pages_by_class: Any) -> IntArray:
        """Return how many pages each class lacks for ``pages_by_class``: int64[C], >= 0."""
        required = as_int64(pages_by_class, "pages_by_class")
        deficits: IntArray = np.maximum(required - self.free_list.counts(), 0)
        return deficits

    def free_pages(self, pages: PageIds) -> None:
        """Release pages that a request holds.

        Args:
            pages: int64[n] distinct page ids, host, any order.

        Raises:
            ValueError: a page is repeated, reserved, foreign, free already or cached by the
                tree. Nothing changed. Cost: O(pages).
        """
        self.free_list.free(pages)

    def adopt_pages(self, pages: PageIds) -> None:
        """Pass held pages to the cache: from now on only ``release_cached`` gives them back.

        Raises:
            ValueError: a page is not held by a request; nothing changed.
        """
        self.free_list.adopt(pages)

    def check_held(self, pages: PageIds) -> None:
        """Raise the ValueError that ``adopt_pages`` would raise, and change nothing."""
        self.free_list.check_held(pages)

    def release_cached(self, pages: PageIds) -> None:
        """Release pages that the cache held. Raises ValueError on any other page."""
        self.free_list.release_cached(pages)

    # Slots

    def alloc(self, need_size: int) -> Slots | None:
        """Take whole pages of slots, page-contiguous.

        Args:
            need_size: tokens, a multiple of page_size. 0 gives an empty result.

        Returns:
            int64[need_size] on ``device``, or None when it can't be served; nothing changed.

        Raises:
            ValueError: need_size is not an integer, negative or not whole pages.
        """
        return self._expand_draw(self._whole_pages(need_size), self.alloc_pages)

    def alloc_extend(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int | None,
    ) -> Slots | None:
        """Extend requests by ``seq_lens - prefix_lens``; only paged allocators do."""
        raise NotImplementedError(
            f"alloc_extend is only for paged allocators; use {type(self).__name__}.alloc"
        )

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Slots | None:
        """Take one slot for each request; only paged allocators do."""
        raise NotImplementedError(
            f"alloc_decode is only for paged allocators; use {type(self).__name__}.alloc"
        )

    def free(self, indices: Slots) -> None:
        """Release the whole pages of the given slots; repeats inside the call count once.

        Args:
            indices: int[n] slots, tensor or array. Empty does nothing. A device tensor is copied
                to the host; ``free_pages`` avoids that.

        Raises:
            ValueError: a page is reserved, foreign, free already or cached by the tree; the
                message names it and nothing changed.
        """
        self.free_list.free(self._pages_of(self.io.to_host(indices)))

    def free_segment(self, indices: Slots, *, start_pos: int) -> None:
        """Release the pages of one ascending run of a request's row.

        Equal in effect to ``free(indices)``, with one look at each page instead of each slot.

        Args:
            indices: int[n] slots of positions ``[start_pos, start_pos + n)``.
            start_pos: position of the first slot in its request, in tokens.
        """
        self.free_segments([(indices, start_pos)])

    def free_segments(self, segments: Iterable[tuple[Slots, int]]) -> None:
        """Release several disjoint runs ``(indices, start_pos)`` of one row in one call.

        Runs may be split anywhere on a page boundary. Raises ValueError as ``free`` does, with
        nothing changed.
        """
        heads: list[PageIds] = [np.empty(0, dtype=np.int64)]
        for indices, start_pos in segments:
            locs = self.io.to_host(indices)
            pages = self._page_heads(locs, start_pos)
            if self.debug and not np.array_equal(np.unique(pages), self._pages_of(locs)):
                raise ValueError(
                    f"start_pos={start_pos} does not fit the segment: its slots are not the "
                    f"consecutive pages of one row"
                )
            heads.append(pages)
        self.free_list.free(_distinct(np.concatenate(heads)))

    # Free groups

    def free_group_begin(self) -> None:
        """Hold frees back until ``free_group_end``; held-back pages can't be drawn or freed again.

        Raises:
            RuntimeError: a group is open already.
        """
        self.free_list.group_begin()

    def free_group_end(self) -> None:
        """Release all that the group held back as one call; fine when that is nothing."""
        self.free_list.group_end()

    @contextmanager
    def free_group(self) -> Iterator[None]:
        """Open a free group for a ``with`` block; an exception inside still releases."""
        self.free_group_begin()
        try:
            yield
        finally:
            self.free_group_end()

    # Order, trials, reset

    def merge_and_sort_free(self) -> None:
        """Merge all staged pages into the free list in ascending order. Cost: O(free pages)."""
        self.free_list.merge_staged()

    def backup_state(self) -> FreeListMark:
        """Remember free and staged pages, so that trial allocations can be undone exactly.

        Later calls don't affect the backup. Cost: O(free pages).
        """
        return self.free_list.backup()

    def restore_state(self, state: FreeListMark) -> None:
        """Undo everything since ``backup_state``; backups nest, last in first out.

        Raises:
            ValueError: ``state`` is not from ``backup_state``.
            RuntimeError: a free group is open, the backup is another allocator's, was used,
                passed over or taken inside a free group, or since then ``clear`` was called or
                pages went to or came from the cache.
        """
        self.free_list.restore(state)

    def clear(self) -> None:
        """Make all pages free again, as at construction. Cost: O(pool).

        A cache over the allocator must be reset too: until then it refuses to insert and evict.
        """
        self.free_list.reset()
        self.generation += 1

    # Checks

    def state_digest(self) -> str:
        """Return a hash of the state; replicas fed the same calls return the same. O(pool)."""
        return self.free_list.state_digest()

    def violations(self) -> list[str]:
        """Return broken rules in words, an empty list for a sound allocator. Cost: O(pool)."""
        found = self.free_list.violations()
        total = sum(self.page_census().values())
        if total != self.layout.capacity_pages:
            found.append(f"pages of all states sum to {total}, not {self.layout.capacity_pages}")
        return found

    def check_invariants(self) -> None:
        """Raise RuntimeError that lists every broken rule. Cost: O(pool)."""
        found = self.violations()
        if found:
            raise RuntimeError("; ".join(found))

    def page_census(self) -> dict[PageState, int]:
        """Return the number of pages in each state but reserved. Cost: O(pool)."""
        counts = np.bincount(self.free_list.states(), minlength=len(PageState))
        return {state: int(counts[state]) for state in PageState if state is not PageState.RESERVED}

    def pages_in(self, state: PageState) -> PageIds:
        """Return the ids of all pages in one state, ascending. Cost: O(pool)."""
        return np.flatnonzero(self.free_list.states() == state).astype(np.int64, copy=False)

    # For subclasses

    def _whole_pages(self, need_size: int) -> int:
        need_size = as_count(need_size, "need_size")
        if need_size < 0 or need_size % self.page_size:
            raise ValueError(
                f"need_size={need_size} must be a non-negative multiple of "
                f"page_size={self.page_size}"
            )
        return need_size // self.page_size

    def _pages_of(self, locs: Locs) -> PageIds:
        """Return the distinct pages of slots, ascending."""
        return _distinct(locs // self.page_size)

    def _page_heads(self, locs: Locs, start_pos: int) -> PageIds:
        """Return the page of every position that starts a page, and of the first position."""
        start_pos = as_count(start_pos, "start_pos")
        if start_pos < 0:
            raise ValueError(f"start_pos={start_pos} must not be negative")
        if not len(locs):
            return np.empty(0, dtype=np.int64)
        skip = -start_pos % self.page_size
        heads = locs[skip :: self.page_size]
        if skip:
            heads = np.concatenate([locs[:1] - start_pos % self.page_size, heads])
        pages = heads // self.page_size
        if (heads != pages * self.page_size).any():
            raise ValueError(
                f"start_pos={start_pos} does not fit the segment: the slot of position P must "
                f"have offset P % {self.page_size} in its page"
            )
        return pages

    def _can_draw_any(self, num_pages: int) -> bool:
        return num_pages <= int(self.free_list.counts().sum())

    def _expand_draw(self, num_pages: int, draw: Any) -> Slots | None:
        """Reserve the result first, so that running out of memory can't lose pages."""
        if not self._can_draw_any(num_pages):
            return None
        out = self.io.empty(num_pages * self.page_size)
        pages = draw(num_pages)
        if pages is None:
            return None
        self.io.fill_pages(out, pages, self.page_size)
        return out


def _distinct(pages: IntArray) -> IntArray:
    """Return distinct values in ascending order; of a run of equals only the first is sorted."""
    heads = _run_heads(pages)
    if (heads[1:] < heads[:-1]).any():
        heads.sort()
        heads = _run_heads(heads)
    return heads


def _run_heads(values: IntArray) -> IntArray:
    """Return a copy with one value of each run of equals."""
    keep = np.ones(len(values), dtype=np.bool_)
    np.not_equal(values[1:], values[:-1], out=keep[1:])
    return values[keep]
