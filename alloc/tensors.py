"""Slots as torch tensors: what this package has of torch, with ``alloc.kernels`` behind it.

Page ids travel to the device in one small copy and are expanded there by one kernel. For whole
pages that is a broadcast sum, which the host launches in half the time of a kernel of ours.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from alloc.extend import ExtendBatch
from alloc.kernels import decode_slots, extend_slots, write_rows
from alloc.spaces import IntArray, Locs, PageIds, Slots, as_int64, exclusive_sum, holds_integers


class TensorSlots:
    """``SlotIO`` over int64 tensors on one device."""

    __slots__ = ("_offsets", "device")

    def __init__(self, device: Any) -> None:
        self.device = torch.device(device)
        self._offsets = torch.empty(0, dtype=torch.int64, device=self.device)

    def to_host(self, slots: Slots) -> Locs:
        """Return slots as int64[n] on the host.

        From a device tensor this copies, and on CUDA it waits for the device: callers that have
        the page ids should use the host calls (``alloc_pages``, ``free_pages``) instead.
        """
        if isinstance(slots, torch.Tensor):
            if not holds_integers(slots):
                raise ValueError(f"slots have dtype {slots.dtype}; pass integers")
            return as_int64(slots.to(torch.int64).detach().cpu().numpy(), "slots")
        return as_int64(slots, "slots")

    def from_host(self, locs: Locs) -> Slots:
        """Copy host slots to the device."""
        return self._send(locs)

    def empty(self, num_tokens: int) -> Slots:
        """Return an uninitialised int64[num_tokens] tensor."""
        return torch.empty(num_tokens, dtype=torch.int64, device=self.device)

    def fill_pages(self, out: Slots, pages: PageIds, page_size: int) -> None:
        """Expand whole pages from one copy of their first slots."""
        if len(self._offsets) != page_size:
            self._offsets = torch.arange(page_size, dtype=torch.int64, device=self.device)
        firsts = self._send(pages * page_size)
        torch.add(firsts[:, None], self._offsets, out=out.view(-1, page_size))

    def fill_extend(self, out: Slots, batch: ExtendBatch, last_loc: Slots, pages: PageIds) -> None:
        """Expand an extend batch from one copy of its lengths and page ids.

        Args:
            out: int64[batch.num_tokens] on this device.
            batch: the lengths.
            last_loc: integers [batch]: a tensor on this device, or host data, which joins the copy.
            pages: int64[batch.num_new_pages], host.
        """
        num_requests = len(batch.extend_lens)
        starts = batch.token_starts
        heads = batch.prefix_pages * batch.page_size - batch.prefix_lens
        plan, rest = [starts, starts + heads, batch.page_starts], [pages, np.zeros(1, np.int64)]
        last, known = self._last_locs(last_loc, out.device)
        sent = self._send(np.concatenate([*plan, *known, *rest]))
        if known:
            last = sent[3 * num_requests : 4 * num_requests]
        extend_slots(
            out,
            sent[: 3 * num_requests].view(3, num_requests),
            last,
            sent[(3 + len(known)) * num_requests :],
            batch.page_size,
        )

    def fill_decode(self, out: Slots, batch: ExtendBatch, last_loc: Slots, pages: PageIds) -> None:
        """Expand a batch of one token a request from one copy; see ``fill_extend``."""
        fresh = np.full(len(batch.new_pages), -1, dtype=np.int64)
        fresh[batch.new_pages > 0] = pages * batch.page_size
        last, known = self._last_locs(last_loc, out.device)
        sent = self._send(np.concatenate([fresh, *known]))
        if known:
            last = sent[len(fresh) :]
        decode_slots(out, sent[: len(fresh)], last)

    def table(self, num_rows: int, num_columns: int) -> Any:
        """Return a zeroed int32[num_rows, num_columns] tensor."""
        return torch.zeros((num_rows, num_columns), dtype=torch.int32, device=self.device)

    def write_rows(
        self, table: Any, starts: IntArray, lens: IntArray, pages: PageIds, page_size: int
    ) -> None:
        """Write all runs from one copy of their lengths and page ids; see ``SlotIO.write_rows``."""
        num_runs = len(starts)
        plan = [exclusive_sum(lens), starts, exclusive_sum(-(-lens // page_size))]
        sent = self._send(np.concatenate([*plan, pages]))
        table_plan = sent[: 3 * num_runs].view(3, num_runs)
        write_rows(table, table_plan, sent[3 * num_runs :], int(lens.sum()), page_size)

    def _last_locs(self, last_loc: Slots, device: Any) -> tuple[torch.Tensor, list[IntArray]]:
        """Return last slots as a tensor on the device, or as host data to send along."""
        if isinstance(last_loc, torch.Tensor):
            if last_loc.device == device:
                wide = last_loc.dtype in (torch.int32, torch.int64)
                return (last_loc if wide else last_loc.to(torch.int64)).contiguous(), []
            last_loc = last_loc.cpu()
        return torch.empty(0), [np.asarray(last_loc).astype(np.int64)]

    def _send(self, values: IntArray) -> torch.Tensor:
        """Copy host integers to the device; on CUDA through pinned memory, without waiting.

        The result shares no memory with the caller's array. torch keeps the pinned block until
        the copy is done.
        """
        if self.device.type != "cuda":
            return torch.from_numpy(np.array(values, dtype=np.int64)).to(self.device)
        staging = torch.empty(len(values), dtype=torch.int64, pin_memory=True)
        staging.numpy()[:] = values
        return staging.to(self.device, non_blocking=True)
