"""The operations that touch every token: pack, store, translate.

Each is one function on tensors, with no planner or pool behind it, that writes into buffers of the
caller. The tensor that is written or read decides: one Triton kernel a call on CUDA, a torch twin
of equal results elsewhere. Kernels are launched on the current device, which has to be the
tensors'. They never wait for it, addresses are int64, and rows travel as integers, so that every
dtype arrives bit for bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from types import ModuleType

import torch

from scratch.kernels import twins

__all__ = ["BITS", "expand_pages", "pack_pages", "store_rows", "translate_locs"]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""The integer dtype that rows of each element size travel as."""


def pack_pages(
    out: torch.Tensor, parts: Sequence[torch.Tensor], send_pages: torch.Tensor, page_size: int
) -> None:
    """Copy whole pages of a pool into a block of rows.

    ``out[k * page_size + o] == concat(part[send_pages[k] * page_size + o] for part in parts)``

    Args:
        out: bits[len(send_pages) * page_size, width], contiguous.
        parts: bits[pool_rows, width_i] each, one or two, contiguous; their widths sum to ``width``.
        send_pages: int64[block_pages] local pages, on the device of ``out``.
        page_size: rows of a page.

    Cost: the block's bytes read once and written once.
    """
    _paths_of(out).pack_pages(out, parts, send_pages, page_size)


def store_rows(
    values: Sequence[torch.Tensor],
    dtype: torch.dtype,
    targets: Sequence[torch.Tensor],
    pool_rows: torch.Tensor,
    scratch: torch.Tensor | None = None,
    scratch_rows: torch.Tensor | None = None,
) -> None:
    """Convert a chunk's rows, persist the owned ones, and stage all of them in a scratch.

    Args:
        values: [num_tokens, width_i] each, one or two, of any dtype: K and V, or the latent and
            rope parts. Rows may be strided, elements of a row not.
        dtype: the pool's dtype; conversion rounds to nearest, as ``Tensor.to`` does.
        targets: bits[num_pool_rows, width_i] each; may be column ranges of one tensor.
        pool_rows: int64[num_tokens] pool row of each token; negative ones are not persisted.
        scratch: bits[num_scratch_rows, Σ width_i], or None for no staging; values lie side by
            side in a row.
        scratch_rows: int64[num_tokens] rows of the chunk in ``scratch``.

    Rows that are named twice (padding) hold one of the values written to them.

    Cost: on CUDA one launch; every value is read once.
    """
    _paths_of(pool_rows).store_rows(values, dtype, targets, pool_rows, scratch, scratch_rows)


def translate_locs(loc: torch.Tensor, page_pos: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return ``page_pos[loc // page_size] * page_size + loc % page_size``: int64, like ``loc``.

    Args:
        loc: int32 or int64 slots, any shape, on the device of ``page_pos``. A slot out of range
            is an IndexError on a CPU, and in the place of page 0 (a reserved page) on CUDA.
        page_pos: int32[num_pages] scratch page of each logical page.
        page_size: tokens of a page, any number; powers of two need no division.
    """
    rows: torch.Tensor = _paths_of(loc).translate_locs(loc, page_pos, page_size)
    return rows


def expand_pages(places: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return the rows of whole pages in order: int64[len(places) * page_size].

    Args:
        places: int32 or int64[n] pages.
        page_size: rows of a page.
    """
    return twins.expand_pages(places, page_size)


def _paths_of(tensor: torch.Tensor) -> ModuleType:
    """Return the module that serves a tensor."""
    return _launchers() if tensor.is_cuda else twins


@cache
def _launchers() -> ModuleType:
    """Return the kernels' module; triton is imported for the first CUDA tensor, where it exists."""
    if find_spec("triton") is None:
        return twins
    from scratch.kernels import launch

    return launch
