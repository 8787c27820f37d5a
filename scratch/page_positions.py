"""The table ``page_pos`` on the device: logical page -> scratch page, trash unless planned.

A batch changes as many entries as its plan and the plan before have pages, in one copy to the
device; nothing ever walks the whole table.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from alloc import IntArray, PageIds, ceil_div
from scratch.owner_major import Ints


class PagePositions:
    """Owner of ``page_pos``.

    Args:
        num_pages: entries, one per logical page.
        trash_page: what an entry holds when no plan names its page.
        device: where the table lies.

    Attributes:
        tensor: int32[num_pages]; read it, never write it.
    """

    def __init__(self, num_pages: int, trash_page: int, device: Any) -> None:
        self.trash_page = trash_page
        self.tensor = torch.full((num_pages,), trash_page, dtype=torch.int32, device=device)
        self._on_host = self.tensor.device.type == "cpu"
        self._host = self.tensor.numpy() if self._on_host else np.empty(0, dtype=np.int32)
        self._assigned_host: PageIds = np.empty(0, dtype=np.int64)
        self._assigned = torch.empty(0, dtype=torch.int64, device=device)

    def assign(
        self, pages: PageIds, places: Ints, send_pages: IntArray | None
    ) -> torch.Tensor | None:
        """Forget the last assignment, then place ``pages``; send ``send_pages`` along.

        On CUDA the writes are ordered on the current stream, behind whatever already reads the
        table there. What is about to be written is noted first: if an interrupt comes between,
        the next assignment still forgets all of it.

        Args:
            pages: int64[n] distinct logical pages.
            places: int32[n] their scratch pages.
            send_pages: int64[block_pages] to copy to the device with them, or None.

        Returns:
            ``send_pages`` on the device.

        Cost: O(n + pages of the last assignment), one copy to the device.
        """
        if self._on_host:
            self._host[self._assigned_host] = self.trash_page
            self._assigned_host = pages
            self._host[pages] = places
            return None if send_pages is None else torch.from_numpy(send_pages)
        num_sent = 0 if send_pages is None else len(send_pages)
        sent, sent_places = self._send(pages, places, send_pages)
        self.tensor.index_fill_(0, self._assigned, self.trash_page)
        self._assigned = sent[num_sent:]
        self.tensor.index_copy_(0, self._assigned, sent_places)
        return None if send_pages is None else sent[:num_sent]

    def _send(
        self, pages: PageIds, places: Ints, send_pages: IntArray | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy through pinned memory without waiting; its allocator keeps it until it is read.

        Returns:
            int64[block_pages + n] send pages and pages, and int32[n] places, on the device.
        """
        ids = pages if send_pages is None else np.concatenate([send_pages, pages])
        words = len(ids) + ceil_div(len(places), 2)  # two places share a word
        pinned = torch.empty(words, dtype=torch.int64, pin_memory=True)
        staged = pinned.numpy()
        staged[: len(ids)] = ids
        staged[len(ids) :].view(np.int32)[: len(places)] = places
        sent = pinned.to(self.tensor.device, non_blocking=True)
        return sent[: len(ids)], sent[len(ids) :].view(torch.int32)[: len(places)]
