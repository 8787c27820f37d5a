"""Slots as torch tensors: the only module of this package that imports torch.

Page ids travel to the device in one small copy and are expanded there.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from alloc.extend import ExtendBatch
from alloc.spaces import IntArray, Locs, PageIds, Slots, as_int64


class TensorSlots:
    """``SlotIO`` over int64 tensors on one device."""

    __slots__ = ("device",)

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)

    def to_host(self, slots: Slots) -> Locs:
        """Return slots as int64[n] on the host.

        From a device tensor this copies, and on CUDA it waits for the device: callers that have
        the page ids should use the host calls (``alloc_pages``, ``free_pages``) instead.
        """
        if isinstance(slots, torch.Tensor):
            if slots.numel() and (slots.is_floating_point() or slots.dtype == torch.bool):
                raise ValueError(f"slots have dtype {slots.dtype}; pass integers")
            return as_int64(slots.detach().cpu().numpy(), "slots")
        return as_int64(slots, "slots")

    def from_host(self, locs: Locs) -> Slots:
        """Copy host slots to the device."""
        return self._send(locs)

    def empty(self, num_tokens: int) -> Slots:
        """Return an uninitialised int64[num_tokens] tensor."""
        return torch.empty(num_tokens, dtype=torch.int64, device=self.device)

    def fill_pages(self, out: Slots, pages: PageIds, page_size: int) -> None:
        """Expand whole pages: one copy of page ids, one addition."""
        offsets = torch.arange(page_size, device=self.device)
        starts = self._send(pages * page_size)
        torch.add(starts[:, None], offsets, out=out.view(-1, page_size))

    def fill_extend(self, out: Slots, batch: ExtendBatch, last_loc: Slots, pages: PageIds) -> None:
        """Expand an extend batch from one copy of its lengths and page ids.

        Args:
            out: int64[batch.num_tokens] on this device.
            batch: the lengths.
            last_loc: integer tensor [batch], on this device or the host.
            pages: int64[batch.num_new_pages], host.
        """
        num_requests = len(batch.extend_lens)
        sent = self._send(
            np.concatenate(
                [
                    batch.extend_lens,
                    batch.token_starts,
                    batch.prefix_pages * batch.page_size - batch.prefix_lens,
                    batch.page_starts,
                    pages,
                    np.zeros(1, dtype=np.int64),  # so that a clamped index always finds a page
                ]
            )
        )
        extend, starts, heads, page_starts = sent[: 4 * num_requests].view(4, num_requests)
        page_table = sent[4 * num_requests :]
        last = torch.as_tensor(last_loc, device=self.device).to(torch.int64)
        size = batch.num_tokens
        request = torch.repeat_interleave(
            torch.arange(num_requests, device=self.device), extend, output_size=size
        )
        token = torch.arange(size, device=self.device) - starts[request]
        past_head = token - heads[request]
        offset = past_head.clamp(min=0)
        page = page_table[page_starts[request] + offset // batch.page_size]
        in_page = page * batch.page_size + offset % batch.page_size
        torch.where(past_head >= 0, in_page, token + last[request] + 1, out=out)

    def table(self, num_rows: int, num_columns: int) -> Any:
        """Return a zeroed int32[num_rows, num_columns] tensor."""
        return torch.zeros((num_rows, num_columns), dtype=torch.int32, device=self.device)

    def _send(self, values: IntArray) -> torch.Tensor:
        # A copy: the tensor must not share memory with the caller's array.
        return torch.from_numpy(np.array(values, dtype=np.int64)).to(self.device)
