"""The host free list that every allocator shares: C stacks of page ids and a state byte a page.

The stacks are the rows of one 2-D array with a vector of tops, so a draw of any mix of classes is
one gather and a free is one scatter, whatever C is. Costs are O(pages touched), never O(pool); the
calls that cost more say so.

This module is the only writer of page state. A page is in exactly one state:

    reserved   padding; never handed out
    free       on its class's stack
    staged     released under ``need_sort``, not merged yet; counts as available
    pending    released inside an open free group
    held       with a request
    cached     with a node of the tree

Every call checks all its pages before it writes anything, so a call that raises changed nothing.
Single-threaded by design: a commit that is interrupted, or entered a second time while it runs,
marks the list unusable and every later call says so.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from numpy.typing import NDArray

from alloc.layout import PageLayout
from alloc.spaces import IntArray, PageIds, as_int64, exclusive_sum, frozen_copy


class PageState(IntEnum):
    """Where a page is. The values are those of the state bytes."""

    RESERVED = 0
    FREE = 1
    STAGED = 2
    PENDING = 3
    HELD = 4
    CACHED = 5


# Enum look-ups cost as much as a small array operation: the hot paths use these.
_FREE, _STAGED, _PENDING, _HELD, _CACHED = (
    int(state) for state in PageState if state is not PageState.RESERVED
)


@dataclass(frozen=True, slots=True)
class FreeListMark:
    """A read-only copy of the free and staged pages, from ``ClassedFreeList.backup``."""

    owner: object
    serial: int
    free: tuple[PageIds, ...]
    staged: tuple[PageIds, ...]


class ClassedFreeList:
    """C stacks of free pages under one ``PageLayout``.

    Freed pages come back first: the last call first, ascending inside one call. With
    ``need_sort`` they are staged instead, and merged in ascending order only when a class can't
    serve a draw from its stack.

    Args:
        layout: the pool's layout; its ids below ``first_page`` are reserved.
        need_sort: stage releases instead of pushing them.
    """

    __slots__ = (
        "_committing",
        "_flat_free",
        "_flat_staged",
        "_free",
        "_free_tops",
        "_group",
        "_group_serial",
        "_mark_owner",
        "_mark_serial",
        "_marks",
        "_num_pages",
        "_offsets",
        "_sort_dtype",
        "_staged",
        "_staged_tops",
        "_state",
        "layout",
        "need_sort",
    )

    def __init__(self, layout: PageLayout, *, need_sort: bool = False) -> None:
        self.layout = layout
        self.need_sort = bool(need_sort)
        classes, depth = layout.num_classes, layout.pages_per_class
        self._offsets = np.arange(classes, dtype=np.int64) * depth
        self._sort_dtype = np.int16 if classes < 2**15 else np.int64
        self._free = np.empty((classes, depth), dtype=np.int64)
        self._flat_free = self._free.reshape(-1)
        self._staged = np.empty((classes, depth if need_sort else 0), dtype=np.int64)
        self._flat_staged = self._staged.reshape(-1)
        self._free_tops = np.empty(classes, dtype=np.int64)
        self._staged_tops = np.empty(classes, dtype=np.int64)
        self._num_pages = layout.num_pages
        self._state = np.empty(layout.num_pages, dtype=np.uint8)
        self._group: list[PageIds] | None = None
        self._group_serial = 0
        self._marks: list[int] = []
        self._mark_owner = object()
        self._mark_serial = 0
        self._committing = False
        self.reset()

    def reset(self) -> None:
        """Make every page free again, lowest ids first. An open group stays open, emptied.

        Cost: O(pool).
        """
        self._check_usable()
        self._committing = True
        layout = self.layout
        locals_descending = np.arange(layout.pages_per_class, 0, -1, dtype=np.int64)
        classes = np.arange(layout.num_classes, dtype=np.int64)[:, None]
        self._free[:] = layout.page_at(classes, locals_descending[None, :])
        self._free_tops[:] = layout.pages_per_class
        self._staged_tops[:] = 0
        self._state[: layout.first_page] = PageState.RESERVED
        self._state[layout.first_page :] = _FREE
        if self._group is not None:
            self._group = []
        self._marks.clear()
        self._committing = False

    # What is there

    def counts(self) -> IntArray:
        """Return free + staged pages per class: int64[num_classes], a copy."""
        self._check_usable()
        return self._free_tops + self._staged_tops

    def free_counts(self) -> IntArray:
        """Return the pages on each stack, staged ones left out: int64[num_classes], a copy."""
        self._check_usable()
        return self._free_tops.copy()

    @property
    def num_free(self) -> int:
        """Pages on the stacks."""
        self._check_usable()
        return int(self._free_tops.sum())

    @property
    def num_staged(self) -> int:
        """Pages released under ``need_sort`` and not merged yet."""
        self._check_usable()
        return int(self._staged_tops.sum())

    @property
    def num_pending(self) -> int:
        """Pages held back by the open free group."""
        return sum(len(pages) for pages in self._group or ())

    @property
    def group_is_open(self) -> bool:
        """Say whether a free group is open."""
        return self._group is not None

    def free_pages_of(self, page_class: int) -> PageIds:
        """Return one class's free pages in draw order, a read-only copy. Cost: O(those pages)."""
        self._check_usable()
        return frozen_copy(self._free[page_class, : self._free_tops[page_class]][::-1])

    def staged_pages_of(self, page_class: int) -> PageIds:
        """Return one class's staged pages in the order of their release, a read-only copy."""
        self._check_usable()
        return frozen_copy(self._staged[page_class, : self._staged_tops[page_class]])

    def states(self) -> NDArray[np.uint8]:
        """Return a copy of the state bytes: uint8[num_pages]. Cost: O(pool)."""
        return self._state.copy()

    def all_in(self, pages: PageIds, state: PageState) -> bool:
        """Say whether every page is a valid id in ``state``. Cost: O(pages)."""
        if not len(pages):
            return True
        if pages.min() < 0 or pages.max() >= self.layout.num_pages:
            return False
        return bool((self._state[pages] == state).all())

    # Draws

    def draw_run(self, page_class: int, count: int) -> PageIds | None:
        """Take ``count`` pages of one class in draw order, or None when it holds fewer."""
        self._check_usable()
        top = int(self._free_tops[page_class])
        if count > top:
            if count > top + int(self._staged_tops[page_class]):
                return None
            self._merge(page_class)
            top = int(self._free_tops[page_class])
        pages = self._free[page_class, top - count : top][::-1].copy()
        self._committing = True
        self._free_tops[page_class] = top - count
        self._state[pages] = _HELD
        self._committing = False
        return pages

    def draw(self, classes: IntArray, *, merge: bool = True) -> PageIds | None:
        """Take one page of each given class, in the given order.

        Args:
            classes: int64[num_pages], any order, any repeats.
            merge: what a class whose stack is short does: merge all its staged pages, or give
                just the missing ones in the order of their release (O(its staged pages)).

        Returns:
            int64[num_pages] with ``class_of(pages[i]) == classes[i]``, or None when a class is
            short; then nothing changed, no merge either. Cost: a fixed number of array calls.
        """
        self._check_usable()
        if not len(classes):
            return np.empty(0, dtype=np.int64)
        required = np.bincount(classes, minlength=self.layout.num_classes)
        if np.count_nonzero(required > self._free_tops):
            if np.count_nonzero(required > self.counts()):
                return None
            for page_class in np.flatnonzero(required > self._free_tops).tolist():
                if merge:
                    self._merge(page_class)
                else:
                    self._unstage(page_class, int(required[page_class]))
        order = classes.astype(self._sort_dtype).argsort(kind="stable")
        starts = exclusive_sum(required)
        tops = self._offsets + self._free_tops - 1 + starts
        sources = tops.repeat(required) - np.arange(len(classes))
        pages = np.empty(len(classes), dtype=np.int64)
        pages[order] = self._flat_free[sources]
        self._committing = True
        self._free_tops -= required
        self._state[pages] = _HELD
        self._committing = False
        return pages

    def can_draw(self, required: IntArray) -> bool:
        """Say whether every class has its ``required`` pages, free and staged together."""
        return not (required > self.counts()).any()

    # Releases

    def free(self, pages: PageIds) -> None:
        """Release pages that a request holds. Raises ValueError on any other page."""
        self._release(pages, _HELD, "free")

    def release_cached(self, pages: PageIds) -> None:
        """Release pages that the cache gives back. Raises ValueError on any other page."""
        if self._release(pages, _CACHED, "release"):
            self._marks.clear()

    def adopt(self, pages: PageIds) -> None:
        """Pass pages from a request to the cache. Raises ValueError unless all are held."""
        ordered = self._checked(pages, _HELD, "cache")
        if not len(ordered):
            return
        self._committing = True
        self._state[ordered] = _CACHED
        self._marks.clear()
        self._committing = False

    def check_held(self, pages: PageIds, verb: str = "cache") -> None:
        """Raise the ValueError that ``adopt`` would raise, and change nothing."""
        self._checked(pages, _HELD, verb)

    def group_begin(self) -> None:
        """Hold releases back from now on. Raises RuntimeError when a group is already open."""
        self._check_usable()
        if self._group is not None:
            raise RuntimeError("a free group is already open; end it before opening another")
        self._group = []
        self._group_serial = self._mark_serial

    def group_end(self) -> None:
        """Release all that the group held back, as one call. Raises RuntimeError without one."""
        self._check_usable()
        if self._group is None:
            raise RuntimeError("no free group is open; call free_group_begin first")
        pending = np.sort(np.concatenate([*self._group, np.empty(0, dtype=np.int64)]))
        self._committing = True
        self._group = None
        # What was pending at a mark is free now, so the mark can't be restored exactly.
        self._marks = [serial for serial in self._marks if serial <= self._group_serial]
        self._push(pending)

    def merge_staged(self) -> None:
        """Merge every class's staged pages into one ascending run. Cost: O(free pages)."""
        self._check_usable()
        for page_class in np.flatnonzero(self._staged_tops).tolist():
            self._merge(page_class)

    # Trial allocations

    def backup(self) -> FreeListMark:
        """Copy the free and staged pages. Cost: O(free pages). Marks nest, last in first out."""
        self._check_usable()
        self._mark_serial += 1
        self._marks.append(self._mark_serial)
        classes = range(self.layout.num_classes)
        return FreeListMark(
            self._mark_owner,
            self._mark_serial,
            tuple(frozen_copy(self._free[c, : self._free_tops[c]]) for c in classes),
            tuple(self.staged_pages_of(c) for c in classes),
        )

    def restore(self, mark: FreeListMark) -> None:
        """Go back to ``mark``; pages drawn since are free, pages freed since are held again.

        Raises:
            ValueError: ``mark`` is not from ``backup``.
            RuntimeError: a free group is open; or the mark is another free list's, is used, was
                passed over by restoring an older one, or was taken inside a free group; or pages
                went to or came from the cache, or the list was reset, since.
        """
        self._check_usable()
        if not isinstance(mark, FreeListMark):
            raise ValueError(f"{mark!r} is not a backup; pass what backup_state returned")
        if self._group is not None:
            raise RuntimeError("a free group is open; end it before restoring a backup")
        if mark.owner is not self._mark_owner:
            raise RuntimeError("this backup is another allocator's; restore it there")
        if mark.serial not in self._marks:
            raise RuntimeError(
                "this backup can't be restored: it was used already, an older one was restored, "
                "it was taken inside a free group, or the allocator was cleared or pages were "
                "cached or released from the cache since; take a new backup"
            )
        self._committing = True
        del self._marks[self._marks.index(mark.serial) :]
        for c in range(self.layout.num_classes):
            self._state[self._free[c, : self._free_tops[c]]] = _HELD
            self._state[self._staged[c, : self._staged_tops[c]]] = _HELD
        for c, (free, staged) in enumerate(zip(mark.free, mark.staged, strict=True)):
            self._free[c, : len(free)] = free
            self._free_tops[c] = len(free)
            self._staged[c, : len(staged)] = staged
            self._staged_tops[c] = len(staged)
            self._state[free] = _FREE
            self._state[staged] = _STAGED
        self._committing = False

    # Checks

    def state_digest(self) -> str:
        """Return a hash of everything that later calls depend on. Cost: O(pool)."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(repr((self.layout, self.need_sort)).encode())
        for c in range(self.layout.num_classes):
            for pages in (self.free_pages_of(c), self.staged_pages_of(c)):
                digest.update(len(pages).to_bytes(8, "little"))
                digest.update(pages.tobytes())
        digest.update(b"open" if self.group_is_open else b"closed")
        for pages in self._group or ():
            digest.update(pages.tobytes())
        digest.update(self._state.tobytes())
        return digest.hexdigest()

    def violations(self) -> list[str]:
        """Return every broken rule in words; an empty list for a sound free list."""
        if self._committing:
            return ["a commit was interrupted; the free list is unusable"]
        found: list[str] = []
        layout, state = self.layout, self._state
        if (state[: layout.first_page] != PageState.RESERVED).any():
            found.append("a reserved page lost its state")
        places = {
            PageState.FREE: [self.free_pages_of(c) for c in range(layout.num_classes)],
            PageState.STAGED: [self.staged_pages_of(c) for c in range(layout.num_classes)],
        }
        for kind, by_class in places.items():
            for c, pages in enumerate(by_class):
                if (layout.class_of(pages) != c).any():
                    found.append(f"the {kind.name.lower()} pages of class {c} hold another class")
        places[PageState.PENDING] = list(self._group or ())
        for kind, lists in places.items():
            listed = np.sort(np.concatenate([*lists, np.empty(0, dtype=np.int64)]))
            if not np.array_equal(listed, np.flatnonzero(state == kind)):
                found.append(f"the {kind.name.lower()} pages differ from their state bytes")
        return found

    # Private

    def _check_usable(self) -> None:
        if self._committing:
            raise RuntimeError(
                "the free list was interrupted inside a commit, or is used by two threads; "
                "its state is unknown: build a new allocator"
            )

    def _checked(self, pages: PageIds, state: int, verb: str) -> PageIds:
        """Return the pages in ascending order, or raise naming the first that breaks a rule.

        The result is a copy. Counting bytes and non-zeros costs a third of comparing with a
        Python integer and ``any()``, on the few pages of a request.
        """
        self._check_usable()
        ordered = as_int64(pages, "pages").copy()
        ordered.sort()
        count = len(ordered)
        if not count:
            return ordered
        if ordered[0] < 0 or ordered[-1] >= self._num_pages:
            bad = int(ordered[0] if ordered[0] < 0 else ordered[-1])
            raise ValueError(
                f"cannot {verb} page {bad}: valid pages are "
                f"[{self.layout.first_page}, {self._num_pages})"
            )
        states = self._state[ordered]
        if states.tobytes().count(state) != count:
            page = int(ordered[(states != state).argmax()])
            actual = PageState(int(self._state[page])).name.lower()
            needed = PageState(state).name.lower()
            raise ValueError(
                f"cannot {verb} page {page}: it is {actual}, and only {needed} pages can be"
            )
        repeated = ordered[1:] == ordered[:-1]
        if np.count_nonzero(repeated):
            page = int(ordered[repeated.argmax()])
            raise ValueError(f"cannot {verb} page {page} twice in one call; pass distinct pages")
        return ordered

    def _release(self, pages: PageIds, state: int, verb: str) -> bool:
        """Release pages that are in ``state``, and say whether there were any."""
        ordered = self._checked(pages, state, verb)
        if not len(ordered):
            return False
        if self._group is not None:
            self._committing = True
            self._state[ordered] = _PENDING
            self._group.append(ordered)
            self._committing = False
        else:
            self._push(ordered)
        return True

    def _push(self, ascending: PageIds) -> None:
        """Put distinct pages back, so that the lowest of them is drawn first."""
        self._committing = True
        if self.need_sort:
            self._scatter(ascending, self._flat_staged, self._staged_tops)
            self._state[ascending] = _STAGED
        else:
            self._scatter(ascending[::-1], self._flat_free, self._free_tops)
            self._state[ascending] = _FREE
        self._committing = False

    def _scatter(self, pages: PageIds, flat: IntArray, tops: IntArray) -> None:
        """Append pages to their classes' rows of ``flat``, keeping their order in each class."""
        if self.layout.num_classes == 1:
            top = int(tops[0])
            flat[top : top + len(pages)] = pages
            tops[0] = top + len(pages)
            return
        classes = self.layout.class_of(pages)
        order = classes.astype(self._sort_dtype).argsort(kind="stable")
        counts = np.bincount(classes, minlength=self.layout.num_classes)
        starts = exclusive_sum(counts)
        targets = (self._offsets + tops - starts).repeat(counts) + np.arange(len(pages))
        flat[targets] = pages[order]
        tops += counts

    def _merge(self, page_class: int) -> None:
        """Make one class's free and staged pages a single ascending run."""
        merged = np.sort(
            np.concatenate([self.free_pages_of(page_class), self.staged_pages_of(page_class)])
        )
        self._committing = True
        self._free[page_class, : len(merged)] = merged[::-1]
        self._free_tops[page_class] = len(merged)
        self._staged_tops[page_class] = 0
        self._state[merged] = _FREE
        self._committing = False

    def _unstage(self, page_class: int, required: int) -> None:
        """Put the oldest staged pages under one class's stack, which holds ``required`` then."""
        top, staged = int(self._free_tops[page_class]), int(self._staged_tops[page_class])
        missing = required - top
        oldest = self._staged[page_class, :missing].copy()
        self._committing = True
        self._free[page_class, missing:required] = self._free[page_class, :top].copy()
        self._free[page_class, :missing] = oldest[::-1]
        self._staged[page_class, : staged - missing] = self._staged[
            page_class, missing:staged
        ].copy()
        self._free_tops[page_class] = required
        self._staged_tops[page_class] = staged - missing
        self._state[oldest] = _FREE
        self._committing = False
