"""Pack this rank's prefix pages into its send block: whole pages, all parts of a row together."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack_pages(
    out: torch.Tensor, parts: Sequence[torch.Tensor], send_pages: torch.Tensor, page_size: int
) -> None:
    """Copy whole pages of a pool into a block of rows.

    ``out[k * page_size + o] == concat(part[send_pages[k] * page_size + o] for part in parts)``

    Args:
        out: integer[len(send_pages) * page_size, width], the block; rows may be strided.
        parts: integer[pool_rows, width_i] each, contiguous; the widths sum to ``width``.
        send_pages: int64[block_pages] local pages, on the device of ``out``.
        page_size: rows of a page.

    Cost: the block's bytes read once and written once.
    """
    if len(parts) == 1 and out.is_contiguous():
        torch.index_select(
            parts[0].view(-1, page_size * parts[0].shape[1]),
            0,
            send_pages,
            out=out.view(-1, page_size * out.shape[1]),
        )
        return
    block = out.view(-1, page_size, out.shape[1])
    column = 0
    for part in parts:
        width = part.shape[1]
        paged = part.view(-1, page_size, width)
        block[:, :, column : column + width] = paged.index_select(0, send_pages)
        column += width
