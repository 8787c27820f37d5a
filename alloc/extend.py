"""The arithmetic of one extend batch: how many pages it opens and which slots its tokens take.

    request i, one row of positions:

        0 ........ prefix | rest of the page | whole new pages ... | part of the last one | seq
                          '--- last_loc+1 .. '--- new pages, in batch order -------------'

The plan is host data, so nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from alloc.spaces import IntArray, Locs, PageIds, as_int64, exclusive_sum, holds_integers


@dataclass(frozen=True, slots=True)
class ExtendBatch:
    """Lengths of a batch in tokens, and what follows from them; int64[batch] each.

    Attributes:
        page_size: tokens of a page.
        prefix_lens: tokens that each request has slots for already.
        seq_lens: tokens that it has afterwards.
        extend_lens: ``seq_lens - prefix_lens``.
        prefix_pages: ``ceil(prefix_lens / page_size)``: pages the request holds already.
        new_pages: pages that it opens.
    """

    page_size: int
    prefix_lens: IntArray
    seq_lens: IntArray
    extend_lens: IntArray
    prefix_pages: IntArray
    new_pages: IntArray

    @classmethod
    def of(cls, prefix_lens: Any, seq_lens: Any, page_size: int) -> ExtendBatch:
        """Validate lengths and derive the rest.

        Raises:
            ValueError: the lists differ in length, or a request shrinks or is negative.
        """
        prefix = as_int64(prefix_lens, "prefix_lens")
        seq = as_int64(seq_lens, "seq_lens")
        if len(prefix) != len(seq):
            raise ValueError(
                f"prefix_lens has {len(prefix)} entries and seq_lens {len(seq)}; "
                f"pass one of each per request"
            )
        extend = seq - prefix
        if np.count_nonzero(prefix < 0) or np.count_nonzero(extend < 0):
            i = int(((prefix < 0) | (extend < 0)).argmax())
            raise ValueError(
                f"request {i} has prefix_len={int(prefix[i])} and seq_len={int(seq[i])}; "
                f"0 <= prefix_len <= seq_len must hold"
            )
        prefix_pages = (prefix + (page_size - 1)) // page_size
        new_pages = (seq + (page_size - 1)) // page_size
        new_pages -= prefix_pages
        return cls(page_size, prefix, seq, extend, prefix_pages, new_pages)

    @property
    def num_tokens(self) -> int:
        """Tokens that the whole batch extends by."""
        return int(self.extend_lens.sum())

    @property
    def num_new_pages(self) -> int:
        """Pages that the whole batch opens."""
        return int(self.new_pages.sum())

    @property
    def token_starts(self) -> IntArray:
        """Where each request's tokens start in the batch's output: int64[batch]."""
        return exclusive_sum(self.extend_lens)

    @property
    def page_starts(self) -> IntArray:
        """Where each request's new pages start in the batch's draw: int64[batch]."""
        return exclusive_sum(self.new_pages)

    def check_extend_num_tokens(self, extend_num_tokens: int | None) -> None:
        """Raise ValueError when the caller's own sum disagrees with the lengths."""
        if extend_num_tokens is not None and extend_num_tokens != self.num_tokens:
            raise ValueError(
                f"extend_num_tokens={extend_num_tokens} differs from the sum of "
                f"seq_lens - prefix_lens = {self.num_tokens}"
            )

    def check_one_last_loc_each(self, last_loc: Any) -> None:
        """Raise ValueError unless ``last_loc`` is one integer per request; nothing is copied."""
        given = last_loc if hasattr(last_loc, "dtype") else np.asarray(last_loc)
        shape = tuple(given.shape)
        if shape != self.seq_lens.shape:
            raise ValueError(
                f"last_loc has shape {shape} for {len(self.seq_lens)} requests; "
                f"pass one slot per request, -1 without a prefix"
            )
        if not holds_integers(given):
            raise ValueError(f"last_loc has dtype {given.dtype}; pass integers")

    def check_last_locs(self, last_locs: Locs) -> None:
        """Raise ValueError unless each last slot ends its prefix inside a page.

        The slot of position ``prefix - 1`` has that position's offset in its page. A request
        without a prefix is not looked at (its last_loc is -1 by convention).
        """
        wrong = (last_locs + 1 - self.prefix_lens) % self.page_size != 0
        wrong &= self.prefix_lens > 0
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"request {i} has last_loc={int(last_locs[i])}, which can't be the slot of "
                f"position {int(self.prefix_lens[i]) - 1} in pages of {self.page_size}"
            )


def fill_extend(out: Locs, batch: ExtendBatch, last_locs: Locs, pages: PageIds) -> None:
    """Write the slots of a batch into ``out``: the reference for every other extend path.

    Args:
        out: int64[num_tokens], written in full.
        batch: the lengths.
        last_locs: int64[batch], the slot of each request's last prefix token; -1 without one.
        pages: int64[num_new_pages], the new pages in batch order.
    """
    ps, extend = batch.page_size, batch.extend_lens
    heads = batch.prefix_pages * ps - batch.prefix_lens
    token = np.arange(len(out)) - batch.token_starts.repeat(extend)
    past_head = token - heads.repeat(extend)
    in_new_page = past_head >= 0
    out[:] = token + (last_locs + 1).repeat(extend)
    offset = past_head[in_new_page]
    page = pages[batch.page_starts.repeat(extend)[in_new_page] + offset // ps]
    out[in_new_page] = page * ps + offset % ps
