"""The Triton kernels and their launchers: with ``alloc.kernels.jit`` all that imports triton here.

A program writes one block of consecutive outputs, whatever requests they belong to, so a batch of
one long request and one of many short ones fill the device alike. Which request a token belongs to
is found by bisection in the starts, a few loads that stay in the cache. The numbers of a batch are
not specialised: one compilation for each page size serves every batch.

``alloc.kernels`` documents the arguments; ``page_size`` is a power of two here.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from alloc.kernels.jit import kernel

_BLOCK = 1024
_SMALL_BLOCK = 128


@kernel("num_runs", "first_step")
def _find_run(
    token: tl.tensor, token_starts: tl.tensor, num_runs: tl.tensor, first_step: tl.tensor
) -> tl.tensor:
    """Return the last run that starts at or before each token; run 0 starts at 0."""
    run = token * 0
    step = first_step
    while step > 0:
        ahead = run + step
        inside = ahead < num_runs
        start = tl.load(token_starts + ahead, mask=inside, other=0)
        run = tl.where(inside & (start <= token), ahead, run)
        step = step // 2
    return run


@kernel("last_loc", "pages", "num_runs", "num_tokens", "first_step")
def _extend_slots_kernel(
    out: tl.tensor,
    plan: tl.tensor,
    last_loc: tl.tensor,
    pages: tl.tensor,
    num_runs: tl.tensor,
    num_tokens: tl.tensor,
    first_step: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = token < num_tokens
    run = _find_run(token, plan, num_runs, first_step)
    offset = token - tl.load(plan + num_runs + run, mask=live, other=0)
    in_new_page = live & (offset >= 0)
    in_last_page = live & (offset < 0)
    page_start = tl.load(plan + 2 * num_runs + run, mask=in_new_page, other=0)
    page = tl.load(pages + page_start + offset // PAGE_SIZE, mask=in_new_page, other=0)
    token_start = tl.load(plan + run, mask=in_last_page, other=0)
    last = tl.load(last_loc + run, mask=in_last_page, other=0).to(tl.int64)
    tl.store(out + token, page * PAGE_SIZE + offset % PAGE_SIZE, mask=in_new_page)
    tl.store(out + token, last + 1 + token - token_start, mask=in_last_page)


@kernel("fresh_locs", "last_loc", "num_requests")
def _decode_slots_kernel(
    out: tl.tensor,
    fresh_locs: tl.tensor,
    last_loc: tl.tensor,
    num_requests: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    request = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = request < num_requests
    fresh = tl.load(fresh_locs + request, mask=live, other=0)
    last = tl.load(last_loc + request, mask=live & (fresh < 0), other=0).to(tl.int64)
    tl.store(out + request, tl.where(fresh >= 0, fresh, last + 1), mask=live)


@kernel("pages", "num_runs", "num_tokens", "first_step")
def _write_rows_kernel(
    table: tl.tensor,
    plan: tl.tensor,
    pages: tl.tensor,
    num_runs: tl.tensor,
    num_tokens: tl.tensor,
    first_step: tl.tensor,
    PAGE_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    live = token < num_tokens
    run = _find_run(token, plan, num_runs, first_step)
    offset = token - tl.load(plan + run, mask=live, other=0)
    table_start = tl.load(plan + num_runs + run, mask=live, other=0)
    page_start = tl.load(plan + 2 * num_runs + run, mask=live, other=0)
    page = tl.load(pages + page_start + offset // PAGE_SIZE, mask=live, other=0)
    slot = page * PAGE_SIZE + offset % PAGE_SIZE
    tl.store(table + table_start + offset, slot.to(tl.int32), mask=live)


def extend_slots(
    out: torch.Tensor,
    plan: torch.Tensor,
    last_loc: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of an extend batch."""
    if len(out):
        num_runs = plan.shape[1]
        grid = (triton.cdiv(len(out), _BLOCK),)
        batch = (num_runs, len(out), _first_step(num_runs))
        with torch.cuda.device(out.get_device()):
            _extend_slots_kernel[grid](out, plan, last_loc, pages, *batch, page_size, _BLOCK)


def decode_slots(out: torch.Tensor, fresh_locs: torch.Tensor, last_loc: torch.Tensor) -> None:
    """Write one slot for each request."""
    if len(out):
        grid = (triton.cdiv(len(out), _SMALL_BLOCK),)
        with torch.cuda.device(out.get_device()):
            _decode_slots_kernel[grid](out, fresh_locs, last_loc, len(out), _SMALL_BLOCK)


def write_rows(
    table: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor, num_tokens: int, page_size: int
) -> None:
    """Write runs of slots into a table of request rows."""
    if num_tokens:
        num_runs = plan.shape[1]
        grid = (triton.cdiv(num_tokens, _BLOCK),)
        batch = (num_runs, num_tokens, _first_step(num_runs))
        with torch.cuda.device(table.get_device()):
            _write_rows_kernel[grid](table, plan, pages, *batch, page_size, _BLOCK)


def _first_step(num_runs: int) -> int:
    """Return the largest power of two below ``num_runs``, 0 for one run: where bisection starts."""
    return 1 << (num_runs - 1).bit_length() - 1 if num_runs > 1 else 0
