"""Slots in host mode, and the small interface through which allocators make and take slots.

With ``device=None`` slots are NumPy int64 arrays and torch is never imported. With a device they
are tensors and ``alloc.tensors`` serves the same interface. Nothing else in the library asks
which of the two it is.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

from alloc.extend import ExtendBatch, fill_extend
from alloc.spaces import IntArray, Locs, PageIds, Slots, as_int64


class SlotIO(Protocol):
    """How slots are made from host page ids, and read back."""

    @property
    def device(self) -> Any:
        """The device of the slots; None in host mode."""

    def to_host(self, slots: Slots) -> Locs:
        """Return slots as int64[n] on the host; from a device tensor this is a copy."""

    def from_host(self, locs: Locs) -> Slots:
        """Return host slots as slots of this kind."""

    def empty(self, num_tokens: int) -> Slots:
        """Reserve int64[num_tokens]; an allocator calls it before it commits a draw."""

    def fill_pages(self, out: Slots, pages: PageIds, page_size: int) -> None:
        """Write the slots of whole pages into ``out``: int64[len(pages) * page_size]."""

    def fill_extend(self, out: Slots, batch: ExtendBatch, last_loc: Slots, pages: PageIds) -> None:
        """Write the slots of an extend batch into ``out``: int64[batch.num_tokens]."""

    def fill_decode(self, out: Slots, batch: ExtendBatch, last_loc: Slots, pages: PageIds) -> None:
        """Do what ``fill_extend`` does for a batch in which every request extends by one token."""

    def table(self, num_rows: int, num_columns: int) -> Any:
        """Return a zeroed int32[num_rows, num_columns] of this kind."""

    def write_rows(
        self, table: Any, starts: IntArray, lens: IntArray, pages: PageIds, page_size: int
    ) -> None:
        """Write runs of slots into a table, each run from the start of its first page.

        Args:
            table: int32[num_rows, num_columns], contiguous.
            starts: int64[runs] where each run starts in the flattened table; runs don't overlap.
            lens: int64[runs] tokens of each run.
            pages: the pages of all runs in order, ``ceil(len / page_size)`` for each.
            page_size: tokens of a page.
        """


class HostSlots:
    """``SlotIO`` over NumPy arrays."""

    __slots__ = ()

    device = None

    def to_host(self, slots: Slots) -> Locs:
        """Return ``slots`` as int64[n]; not a copy when it is that already."""
        return as_int64(slots, "slots")

    def from_host(self, locs: Locs) -> Slots:
        """Return ``locs`` itself."""
        return locs

    def empty(self, num_tokens: int) -> Slots:
        """Return uninitialised int64[num_tokens]."""
        return np.empty(num_tokens, dtype=np.int64)

    def fill_pages(self, out: Slots, pages: PageIds, page_size: int) -> None:
        """Write ``page * page_size + offset`` for every page and offset."""
        np.add((pages * page_size)[:, None], np.arange(page_size), out=out.reshape(-1, page_size))

    def fill_extend(self, out: Slots, batch: ExtendBatch, last_loc: Slots, pages: PageIds) -> None:
        """Write an extend batch's slots; see ``alloc.extend.fill_extend``."""
        fill_extend(out, batch, as_int64(last_loc, "last_loc"), pages)

    def fill_decode(self, out: Slots, batch: ExtendBatch, last_loc: Slots, pages: PageIds) -> None:
        """Write a decode batch's slots; see ``alloc.extend.fill_extend``."""
        fill_extend(out, batch, as_int64(last_loc, "last_loc"), pages)

    def table(self, num_rows: int, num_columns: int) -> Any:
        """Return zeroed int32[num_rows, num_columns]."""
        return np.zeros((num_rows, num_columns), dtype=np.int32)

    def write_rows(
        self, table: Any, starts: IntArray, lens: IntArray, pages: PageIds, page_size: int
    ) -> None:
        """Write the runs one by one; see ``SlotIO.write_rows``."""
        slots = ((pages * page_size)[:, None] + np.arange(page_size)).reshape(-1)
        flat, first = table.reshape(-1), 0
        for start, length in zip(starts.tolist(), lens.tolist(), strict=True):
            flat[start : start + length] = slots[first : first + length]
            first += -(-length // page_size) * page_size


def slot_io(device: Any) -> SlotIO:
    """Return the ``SlotIO`` of a device: NumPy for None, torch for anything else.

    Raises:
        RuntimeError: a device was given and torch is not installed.
    """
    if device is None:
        return HostSlots()
    try:
        from alloc.tensors import TensorSlots
    except ModuleNotFoundError as error:
        raise RuntimeError(
            f"device={device!r} needs torch, which is not installed: "
            f"install rotaradix[torch], or pass device=None for host mode"
        ) from error
    return TensorSlots(device)
