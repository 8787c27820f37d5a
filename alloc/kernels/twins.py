"""The torch twins: any device, any page size, the same results as the kernels.

``alloc.kernels`` documents the arguments.
"""

from __future__ import annotations

import torch


def extend_slots(
    out: torch.Tensor,
    plan: torch.Tensor,
    last_loc: torch.Tensor,
    pages: torch.Tensor,
    page_size: int,
) -> None:
    """Write the slots of an extend batch."""
    if not len(out):
        return
    token, run = _tokens_and_runs(plan[0], len(out))
    token_starts, new_starts, page_starts = plan.index_select(1, run)
    offset = token - new_starts
    page = pages.index_select(0, page_starts + offset.clamp(min=0) // page_size)
    in_last_page = last_loc.index_select(0, run).to(torch.int64) + 1 + token - token_starts
    in_new_page = page * page_size + offset % page_size
    torch.where(offset >= 0, in_new_page, in_last_page, out=out)


def decode_slots(out: torch.Tensor, fresh_locs: torch.Tensor, last_loc: torch.Tensor) -> None:
    """Write one slot for each request."""
    torch.where(fresh_locs >= 0, fresh_locs, last_loc.to(torch.int64) + 1, out=out)


def write_rows(
    table: torch.Tensor, plan: torch.Tensor, pages: torch.Tensor, num_tokens: int, page_size: int
) -> None:
    """Write runs of slots into a table of request rows."""
    if not num_tokens:
        return
    token, run = _tokens_and_runs(plan[0], num_tokens)
    token_starts, table_starts, page_starts = plan.index_select(1, run)
    offset = token - token_starts
    page = pages.index_select(0, page_starts + offset // page_size)
    slots = page * page_size + offset % page_size
    table.view(-1).scatter_(0, table_starts + offset, slots.to(table.dtype))


def _tokens_and_runs(token_starts: torch.Tensor, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """Return 0 .. num_tokens - 1 and the last run that starts at or before each."""
    device = token_starts.device
    lens = torch.diff(token_starts, append=token_starts.new_full((1,), num_tokens))
    runs = torch.arange(len(token_starts), device=device)
    tokens = torch.arange(num_tokens, device=device)
    return tokens, torch.repeat_interleave(runs, lens, output_size=num_tokens)
