"""Slots and pages to scratch rows, elementwise over the planner's page table."""

from __future__ import annotations

import torch


def translate_locs(loc: torch.Tensor, page_pos: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return ``page_pos[loc // ps] * ps + loc % ps`` as int64 of the shape of ``loc``.

    Args:
        loc: int32 or int64 slots, any shape, on the device of ``page_pos``.
        page_pos: int32[num_pages] scratch page of each logical page.
        page_size: ps; powers of two use shifts and masks.
    """
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
    """Return the rows of whole pages in order: int64[len(places) * page_size]."""
    offsets = torch.arange(page_size, dtype=torch.int64, device=places.device)
    starts = places.to(torch.int64).mul_(page_size)
    return (starts[:, None] + offsets).view(-1)
