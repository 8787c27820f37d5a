"""Scattered pages between device and pinned memory in one kernel a tensor; alone imports triton.

A copy call for each page would keep the host busy for longer than the bytes travel. A few programs
suffice to fill the link, and leave the other processors to the model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl

_BLOCK = 2048
_PROGRAMS = 32

_jit: Callable[[Callable[..., Any]], Any] = triton.jit(do_not_specialize=["num_pages"])


@_jit
def _copy_pages_kernel(
    source: tl.tensor,
    target: tl.tensor,
    places: tl.tensor,
    num_pages: tl.tensor,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    blocks = (PAGE + BLOCK - 1) // BLOCK
    item = tl.program_id(0)
    while item < num_pages * blocks:
        page = item // blocks
        offset = (item % blocks) * BLOCK + tl.arange(0, BLOCK)
        live = offset < PAGE
        origin = tl.load(places + page) * PAGE
        goal = tl.load(places + num_pages + page) * PAGE
        value = tl.load(source + origin + offset, mask=live, other=0)
        tl.store(target + goal + offset, value, mask=live)
        item += tl.num_programs(0)


def copy_pages(
    source: torch.Tensor, target: torch.Tensor, places: torch.Tensor, page_size: int
) -> None:
    """Copy whole pages on the current stream.

    Args:
        source: integer[rows, width], contiguous; on the device or pinned.
        target: like ``source``, of the same width.
        places: int64[2, num_pages] local pages of source and target, on the device.
        page_size: rows of a page.
    """
    num_pages = places.shape[1]
    if not num_pages:
        return
    page_bytes = page_size * source.shape[1] * source.element_size()
    wide = torch.int64 if page_bytes % 8 == 0 else source.dtype
    page = page_bytes // wide.itemsize
    programs = min(_PROGRAMS, num_pages * triton.cdiv(page, _BLOCK))
    _copy_pages_kernel[(programs,)](
        source.view(-1).view(wide), target.view(-1).view(wide), places, num_pages, page, _BLOCK
    )
