"""Where a plan's page ids come from: a host page table, or a table of slots on CPU or CUDA.

The planner works on host page ids whatever the source. ``ReqToTokenPool`` and NumPy tables cost no
copy at all; a CUDA tensor costs exactly one copy to the host, which waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np
import torch

from alloc import ReqToTokenPool, ceil_div

PageSource: TypeAlias = "ReqToTokenPool | np.ndarray[Any, Any] | torch.Tensor"
"""A ``ReqToTokenPool`` (its mirror holds pages), a NumPy array int32 or int64[rows, max pages] of
PAGE ids, or a tensor int32 or int64[rows, max tokens] of token SLOTS."""

PageRow: TypeAlias = "np.ndarray[Any, Any]"

_TABLE_DTYPES = (torch.int32, torch.int64, np.int32, np.int64)


def read_page_rows(
    source: PageSource,
    rows: Sequence[int],
    seq_lens: Sequence[int],
    page_size: int,
    *,
    debug: bool = False,
) -> list[PageRow]:
    """Return the pages of each request: int32 or int64[ceil(seq_len / page_size)], host.

    Args:
        source: see ``PageSource``. What a row holds past its ``seq_len`` is never read.
        rows: row of each request.
        seq_lens: tokens of each request.
        page_size: tokens of a page.
        debug: compare every slot of a slot table with its page, not only the first of each.

    Raises:
        ValueError: a row or length leaves the table, the pool has another page size, a slot
            table's positions are not at their pages' offsets, or the table's dtype is wrong.

    Cost: O(pages); with a CUDA tensor one copy of O(batch x longest) slots to the host.
    """
    if isinstance(source, ReqToTokenPool):
        return _pool_rows(source, rows, seq_lens, page_size)
    if isinstance(source, np.ndarray):
        _check_table(source, rows, max(seq_lens, default=0), page_size, "page table")
        return [
            source[row, : ceil_div(seq, page_size)] for row, seq in zip(rows, seq_lens, strict=True)
        ]
    if isinstance(source, torch.Tensor):
        return _slot_rows(source, rows, seq_lens, page_size, debug)
    raise ValueError(
        f"req_to_token is a {type(source).__name__}; pass a ReqToTokenPool, a NumPy page table "
        f"or a tensor of slots"
    )


def _pool_rows(
    pool: ReqToTokenPool, rows: Sequence[int], seq_lens: Sequence[int], page_size: int
) -> list[PageRow]:
    if pool.page_size != page_size:
        raise ValueError(
            f"the pool's rows hold pages of {pool.page_size} tokens, the plan's have {page_size}; "
            f"make ReqToTokenPool with page_size={page_size}"
        )
    table = pool.page_table()
    pages: list[PageRow] = []
    for row, seq in zip(rows, seq_lens, strict=True):
        mirrored = not pool.debug and 0 <= row < pool.size and seq <= pool.mirrored_len(row)
        pages.append(
            table[row, : ceil_div(seq, page_size)] if mirrored else pool.pages(row, 0, seq)
        )
    return pages


def _slot_rows(
    table: torch.Tensor,
    rows: Sequence[int],
    seq_lens: Sequence[int],
    page_size: int,
    debug: bool,
) -> list[PageRow]:
    longest = max(seq_lens, default=0)
    _check_table(table, rows, longest, 1, "slot table")
    step = 1 if debug else page_size
    if table.device.type == "cpu":
        slots = table.detach().numpy()
        picked = [slots[row, :seq:step] for row, seq in zip(rows, seq_lens, strict=True)]
    else:
        index = torch.tensor(list(rows), dtype=torch.int64, device=table.device)
        copied = table[:, :longest:step].index_select(0, index).cpu().numpy()
        picked = [copied[i, : ceil_div(seq, step)] for i, seq in enumerate(seq_lens)]
    return [_pages_of_slots(slots, page_size, step) for slots in picked]


def _pages_of_slots(slots: PageRow, page_size: int, step: int) -> PageRow:
    """Return the page of every ``page_size // step``-th slot after checking all given offsets."""
    per_page = page_size // step
    heads = slots[::per_page]
    pages: PageRow = heads // page_size
    expected = pages * page_size
    if step < page_size:
        offsets = np.arange(len(slots))
        wrong = slots != expected[offsets // page_size] + offsets % page_size
    else:
        wrong = heads != expected
    if wrong.any():
        at = int(wrong.argmax())
        raise ValueError(
            f"slot {slots[at]} at position {at * step} is not at its position's offset in a page "
            f"of {page_size} tokens; rows must hold whole pages of consecutive slots"
        )
    return pages


def _check_table(
    table: Any, rows: Sequence[int], longest: int, tokens_per_column: int, what: str
) -> None:
    """Check a table's shape, dtype, rows and width."""
    if table.ndim != 2 or table.dtype not in _TABLE_DTYPES:
        raise ValueError(
            f"the {what} is {table.dtype}{list(table.shape)}; pass int32 or int64 [rows, columns]"
        )
    for row in rows:
        if not 0 <= row < table.shape[0]:
            raise ValueError(f"row {row} is not in the {what} of {table.shape[0]} rows")
    if ceil_div(longest, tokens_per_column) > table.shape[1]:
        raise ValueError(
            f"seq_len={longest} is longer than the {what}'s {table.shape[1]} columns hold"
        )
