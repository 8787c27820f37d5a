"""Slots on a device, written from page ids: one kernel a call on CUDA, a torch twin elsewhere.

The tensor that is written decides: a Triton kernel on CUDA with pages of a power of two from 1 to
256 tokens, the twin of equal results for anything else. Nothing waits for a device, and int64
throughout. ``plan`` tensors are made by ``alloc.tensors`` from host data; no value is checked here.
"""

from __future__ import annotations

from types import ModuleType

import torch

from alloc.kernels import twins

__all__ = ["decode_slots", "extend_slots", "write_rows"]

_LARGEST_PAGE = 256


def extend_slots(
    out: torch.Tensor,
    plan: torch.Tensor,
    last_loc: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of an extend batch: the rest of each last page, then new pages.

    Token t of request i (the last one that starts at or before t) gets
    ``last_loc[i] + 1 + t - token_start`` before ``new_start``, and the slot
    ``t - new_start`` of its new pages from there on.

    Args:
        out: int64[num_tokens], batch order.
        plan: int64[3, batch], contiguous rows: ``token_starts``, where each request's tokens start
            in ``out``, ascending from 0; ``new_starts``, where its new pages start in ``out`` or
            would start; ``page_starts``, where they start in ``pages``.
        last_loc: int32 or int64[batch], contiguous.
        pages: int64[num_new_pages + 1], batch order; the last one is never read as a page.
        page_size: tokens of a page.
    """
    _paths_of(out, page_size).extend_slots(out, plan, last_loc, pages, page_size)


def decode_slots(out: torch.Tensor, fresh_locs: torch.Tensor, last_loc: torch.Tensor) -> None:
    """Write one slot for each request: the first of its new page, or the one after its last.

    Args:
        out: int64[batch].
        fresh_locs: int64[batch] first slot of a new page, -1 for a request that opens none.
        last_loc: int32 or int64[batch], contiguous.
    """
    _paths_of(out, 1).decode_slots(out, fresh_locs, last_loc)


def write_rows(
    table: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor, num_tokens: int, page_size: int
) -> None:
    """Write runs of slots into a table of request rows.

    Args:
        table: int32[num_rows, num_columns], contiguous.
        plan: int64[3, runs], contiguous rows: ``token_starts``, the tokens of the runs before,
            ascending from 0; ``table_starts``, where each run starts in the flattened table;
            ``page_starts``, where its pages start in ``pages``. Runs don't overlap in the table.
        pages: int64[num_pages].
        num_tokens: tokens of all runs.
        page_size: tokens of a page.
    """
    _paths_of(table, page_size).write_rows(table, plan, pages, num_tokens, page_size)


def _paths_of(written: torch.Tensor, page_size: int) -> ModuleType:
    """Return the module that serves a tensor; triton is imported for the first CUDA tensor."""
    if not written.is_cuda or page_size > _LARGEST_PAGE or page_size & (page_size - 1):
        return twins
    from alloc.kernels import launch

    return launch
