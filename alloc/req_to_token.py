"""Request rows: position -> slot, with a host mirror of page ids.

The table is what kernels read; the mirror is what the tree and the planner read, so that neither
ever copies from the device. ``write`` keeps both together and remembers how far each row's mirror
holds. A range that was written into ``req_to_token`` directly is read from the table instead.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from alloc.slots import slot_io
from alloc.spaces import IntArray, Locs, PageIds, Slots, as_count, as_int64, ceil_div

_MAX_TABLE_SLOT = 2**31 - 1


class ReqToTokenPool:
    """Rows of slots for requests in flight.

    Args:
        size: number of rows.
        max_context_len: columns, in tokens.
        device: device of the table, or None for a NumPy table.
        page_size: tokens of a page; positions of one page hold consecutive slots.
        debug: compare mirror and table on every read.

    Attributes:
        req_to_token: int32[size, max_context_len], zeroed; callers may write it directly.
    """

    def __init__(
        self,
        size: int,
        max_context_len: int,
        device: Any,
        *,
        page_size: int = 1,
        debug: bool = False,
    ) -> None:
        self.size = _at_least_one(size, "size")
        self.max_context_len = _at_least_one(max_context_len, "max_context_len")
        self.page_size = _at_least_one(page_size, "page_size")
        self.device = device
        self.debug = debug
        self.io = slot_io(device)
        self.req_to_token = self.io.table(self.size, self.max_context_len)
        self._mirror = self._new_mirror(self.page_size)
        self._mirror_len = np.zeros(self.size, dtype=np.int64)
        self._free_rows: list[int] = []
        self._in_use = np.zeros(self.size, dtype=np.bool_)
        self.clear()

    def bind_page_size(self, page_size: int) -> None:
        """Take over the page size of the cache or planner that reads this pool.

        Raises:
            ValueError: page_size is not an integer or less than 1.
            RuntimeError: page_size is another one and rows are in use, whose pages would be lost.
        """
        page_size = _at_least_one(page_size, "page_size")
        if page_size == self.page_size:
            return
        if self._in_use.any():
            raise RuntimeError(
                f"page_size={page_size} differs from the pool's {self.page_size}, and rows "
                f"{np.flatnonzero(self._in_use).tolist()} in use hold pages of it; free them first"
            )
        self._mirror = self._new_mirror(page_size)
        self.page_size = page_size

    def check_slots(self, num_slots: int) -> None:
        """Raise ValueError when a pool's slots don't all fit the table.

        Args:
            num_slots: slots of the pool, reserved ones included
                (``layout.num_pages * layout.page_size``).
        """
        num_slots = as_count(num_slots, "num_slots")
        if num_slots > _MAX_TABLE_SLOT + 1:
            raise ValueError(
                f"num_slots={num_slots} don't fit the request table: it is int32 and holds "
                f"slots below {_MAX_TABLE_SLOT + 1}"
            )

    def clear(self) -> None:
        """Make every row free, lowest first; mirrors hold nothing. The table is left as it is."""
        self._free_rows = list(range(self.size - 1, -1, -1))
        self._in_use[:] = False
        self._mirror_len[:] = 0

    def available_size(self) -> int:
        """Return the number of free rows."""
        return len(self._free_rows)

    def alloc(self, num_rows: int) -> list[int] | None:
        """Take rows, the last freed first; None when fewer are free, nothing changed."""
        num_rows = as_count(num_rows, "num_rows")
        if num_rows < 0:
            raise ValueError(f"num_rows={num_rows} must not be negative")
        if num_rows > len(self._free_rows):
            return None
        cut = len(self._free_rows) - num_rows
        rows = self._free_rows[cut:][::-1]
        del self._free_rows[cut:]
        self._in_use[rows] = True
        self._mirror_len[rows] = 0
        return rows

    def free(self, rows: int | Sequence[int]) -> None:
        """Give rows back, one or several; the slots written in them are the caller's business.

        Raises:
            ValueError: a row is out of range, free already or named twice; nothing changed.
        """
        given: list[int] = as_int64(np.atleast_1d(rows), "rows").tolist()
        seen: set[int] = set()
        for row in given:
            self._check_row(row)
            if row in seen:
                raise ValueError(f"row {row} is named twice in one call; pass distinct rows")
            seen.add(row)
        self._in_use[given] = False
        self._mirror_len[given] = 0
        self._free_rows.extend(sorted(given, reverse=True))

    def write(
        self, row: int, start: int, slots: Slots | None = None, *, pages: PageIds | None = None
    ) -> None:
        """Write a row from position ``start`` on, table and mirror together.

        The last page is written to its end, so that no position of it shows an old owner.

        Args:
            row: a row in use.
            start: position of the first slot; a multiple of page_size when ``pages`` is given.
            slots: int[n] slots of positions ``[start, start + n)``. A device tensor is copied to
                the host for the mirror.
            pages: int64[n] page ids, host; the path that copies nothing back from a device.

        Raises:
            ValueError: not exactly one of slots and pages, the range leaves the row, or the
                slots don't sit at their positions' offsets in their pages.
        """
        if (slots is None) == (pages is None):
            raise ValueError("pass exactly one of slots and pages")
        if pages is not None:
            self.write_pages([row], [start], [pages])
            return
        row, start = self._check_row(row), as_count(start, "start")
        locs = self.io.to_host(slots)
        self._check_range(start, start + len(locs))
        if len(locs):
            self._commit([(row, *self._pages_of_slots(start, locs))])

    def write_pages(
        self, rows: Sequence[int], starts: Sequence[int], pages: Sequence[PageIds]
    ) -> None:
        """Write page ids into several rows, tables and mirrors together, in one step.

        A device gets one copy of all ids. Last pages are written to their ends, as by ``write``.

        Args:
            rows: distinct rows in use.
            starts: position of each row's first page; multiples of page_size.
            pages: int64[n] page ids for each row, host; n may be 0.

        Raises:
            ValueError: a row is not in use or named twice, or a range leaves its row. Nothing
                changed.
        """
        if not len(rows) == len(starts) == len(pages):
            raise ValueError(
                f"{len(rows)} rows, {len(starts)} starts and {len(pages)} lists differ"
            )
        rows = [self._check_row(row) for row in rows]
        if len(set(rows)) < len(rows):
            raise ValueError(f"rows {rows} name a row twice; pass distinct rows")
        runs: list[tuple[int, int, PageIds]] = []
        for row, start, given in zip(rows, starts, pages, strict=True):
            ids, start = as_int64(given, "pages"), as_count(start, "start")
            if start % self.page_size:
                raise ValueError(
                    f"start={start} must be a multiple of page_size={self.page_size} "
                    f"when pages are written"
                )
            last_page = start + (len(ids) - 1) * self.page_size
            self._check_range(start, last_page + 1 if len(ids) else start)
            if len(ids):
                runs.append((row, start, ids))
        self._commit(runs)

    def _commit(self, runs: list[tuple[int, int, PageIds]]) -> None:
        """Write runs of (row, aligned start, pages), after checking that the pages fit."""
        if not runs:
            return
        ps = self.page_size
        ids = np.concatenate([pages for _, _, pages in runs])
        highest = (_MAX_TABLE_SLOT + 1) // ps - 1
        if ids.min() < 0 or ids.max() > highest:
            raise ValueError(
                f"pages {int(ids.min())} to {int(ids.max())} don't fit an int32 table; valid "
                f"pages of {ps} tokens are [0, {highest}]"
            )
        stops = [min(start + len(pages) * ps, self.max_context_len) for _, start, pages in runs]
        starts = np.array([row * self.max_context_len + start for row, start, _ in runs])
        lens = np.array([stop - run[1] for stop, run in zip(stops, runs, strict=True)])
        self.io.write_rows(self.req_to_token, starts, lens, ids, ps)
        for (row, start, pages), stop in zip(runs, stops, strict=True):
            first = start // ps
            self._mirror[row, first : first + len(pages)] = pages
            if start <= self._mirror_len[row]:
                self._mirror_len[row] = max(stop, int(self._mirror_len[row]))

    def pages(self, row: int, start: int, stop: int) -> PageIds:
        """Return the page ids of positions ``[start, stop)`` of a row: int64, host.

        From the mirror where it holds; else the range is copied from the table, which waits for
        the device on CUDA. Rows are not cleared between owners: a position that this owner wrote
        neither through ``write`` nor into the table shows zero or the slot of an earlier owner.

        Args:
            row: a row in use.
            start: first position, a multiple of page_size.
            stop: end position; a page is included when any of its positions is.
        """
        row, start, stop = self._check_row(row), as_count(start, "start"), as_count(stop, "stop")
        if start % self.page_size or not 0 <= start <= stop <= self.max_context_len:
            raise ValueError(
                f"[{start}, {stop}) must start on a page of {self.page_size} tokens and lie in "
                f"the row of {self.max_context_len}"
            )
        first, last = start // self.page_size, ceil_div(stop, self.page_size)
        if stop <= self._mirror_len[row]:
            mirrored = self._mirror[row, first:last].astype(np.int64)
            if self.debug and not np.array_equal(mirrored, self._table_pages(row, start, stop)):
                raise RuntimeError(
                    f"row {row} positions [{start}, {stop}): the table was changed behind the "
                    f"mirror; write rows through ReqToTokenPool.write"
                )
            return mirrored
        return self._table_pages(row, start, stop)

    def page_table(self) -> np.ndarray[Any, np.dtype[np.int32]]:
        """Return the mirror itself: int32[size, max pages], read-only; see ``mirrored_len``."""
        view = self._mirror.view()
        view.flags.writeable = False
        return view

    def mirrored_len(self, row: int) -> int:
        """Return how many positions of a row the mirror holds; 0 for a row that is not in use."""
        row = as_count(row, "row")
        if not 0 <= row < self.size:
            raise ValueError(f"row {row} must be in [0, {self.size})")
        return int(self._mirror_len[row])

    def forget_mirror(self, row: int) -> None:
        """Drop a row's mirror after writing ``req_to_token`` directly."""
        self._mirror_len[self._check_row(row)] = 0

    def state_digest(self) -> str:
        """Return a hash of rows in use and their mirrors. Cost: O(rows in use)."""
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.asarray(self._free_rows, dtype=np.int64).tobytes())
        for row in np.flatnonzero(self._in_use).tolist():
            last = ceil_div(int(self._mirror_len[row]), self.page_size)
            digest.update(self._mirror[row, :last].tobytes())
            digest.update(b"|")
        return digest.hexdigest()

    def _new_mirror(self, page_size: int) -> np.ndarray[Any, np.dtype[np.int32]]:
        return np.zeros((self.size, ceil_div(self.max_context_len, page_size)), dtype=np.int32)

    def _check_row(self, row: int) -> int:
        row = as_count(row, "row")
        if not 0 <= row < self.size or not self._in_use[row]:
            raise ValueError(f"row {row} is not in use; take rows with ReqToTokenPool.alloc")
        return row

    def _check_range(self, start: int, stop: int) -> None:
        if not 0 <= start <= stop <= self.max_context_len:
            raise ValueError(
                f"positions [{start}, {stop}) leave the row of {self.max_context_len} tokens"
            )

    def _pages_of_slots(self, start: int, locs: Locs) -> tuple[int, PageIds]:
        """Return the page-aligned start and the pages of slots, after checking their offsets."""
        ps = self.page_size
        offset = start % ps
        heads = locs[-start % ps :: ps]
        if offset and len(locs):
            heads = np.concatenate([locs[:1] - offset, heads])
        positions = np.arange(offset, offset + len(locs), dtype=np.int64)
        if len(locs) and (
            (heads % ps).any() or not np.array_equal(locs, heads[positions // ps] + positions % ps)
        ):
            raise ValueError(
                f"the slots written at position {start} are not consecutive inside pages of "
                f"{ps} tokens at their positions' offsets"
            )
        return start - offset, heads // ps

    def _table_pages(self, row: int, start: int, stop: int) -> IntArray:
        return self.io.to_host(self.req_to_token[row, start : stop : self.page_size]) // (
            self.page_size
        )


def _at_least_one(value: int, name: str) -> int:
    value = as_count(value, name)
    if not 1 <= value < 2**63:
        raise ValueError(f"{name}={value} must be at least 1 and fit int64")
    return value
