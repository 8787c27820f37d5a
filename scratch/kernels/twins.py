"""The torch twins: any device, the same results as the kernels.

``scratch.kernels`` documents the arguments.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack_pages(
    out: torch.Tensor, parts: Sequence[torch.Tensor], send_pages: torch.Tensor, page_size: int
) -> None:
    """Copy whole pages of a pool into a block of rows."""
    if len(parts) == 1:
        page_width = page_size * out.shape[1]
        paged = parts[0].view(-1, page_width)
        torch.index_select(paged, 0, send_pages, out=out.view(-1, page_width))
        return
    block = out.view(-1, page_size, out.shape[1])
    column = 0
    for part in parts:
        width = part.shape[1]
        paged = part.view(-1, page_size, width)
        block[:, :, column : column + width] = paged.index_select(0, send_pages)
        column += width


def store_rows(
    values: Sequence[torch.Tensor],
    dtype: torch.dtype,
    targets: Sequence[torch.Tensor],
    pool_rows: torch.Tensor,
    scratch: torch.Tensor | None = None,
    scratch_rows: torch.Tensor | None = None,
) -> None:
    """Convert a chunk's rows, persist the owned ones, and stage all of them in a scratch."""
    owned = (pool_rows >= 0).nonzero(as_tuple=True)[0]
    kept_rows = pool_rows.index_select(0, owned)
    column = 0
    for value, target in zip(values, targets, strict=True):
        width = value.shape[1]
        bits = value.to(dtype).view(target.dtype)
        if scratch is not None and scratch_rows is not None:
            scratch[:, column : column + width].index_copy_(0, scratch_rows, bits)
        target.index_copy_(0, kept_rows, bits.index_select(0, owned))
        column += width


def translate_locs(loc: torch.Tensor, page_pos: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return scratch rows of slots."""
    flat = loc.reshape(-1)
    if page_size & (page_size - 1):
        rows = page_pos.index_select(0, flat // page_size).to(torch.int64)
        rows.mul_(page_size).add_(flat % page_size)
    else:
        shift = page_size.bit_length() - 1
        rows = page_pos.index_select(0, flat >> shift).to(torch.int64)
        rows.bitwise_left_shift_(shift).bitwise_or_(flat & (page_size - 1))
    return rows.view(loc.shape)


def expand_pages(places: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the rows of whole pages in order."""
    offsets = torch.arange(page_size, dtype=torch.int64, device=places.device)
    starts = places.to(torch.int64).mul_(page_size)
    return (starts[:, None] + offsets).view(-1)
