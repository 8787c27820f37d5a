"""The paged allocator of an unsharded pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from alloc.base import BaseTokenToKVPoolAllocator
from alloc.extend import ExtendBatch
from alloc.layout import PageLayout
from alloc.spaces import PageIds, Slots, as_count, as_int64


class PagedTokenToKVPoolAllocator(BaseTokenToKVPoolAllocator):
    """Hands out pages 1..size // page_size; page 0 is the padding target.

    Args:
        size: token slots; what is over a whole page is not used.
        page_size: tokens of a page.
        dtype, device, kvcache, need_sort, debug: see ``BaseTokenToKVPoolAllocator``.
        layout: where the pages lie, for subclasses; default all in one class.
    """

    def __init__(
        self,
        size: int,
        page_size: int,
        dtype: Any,
        device: Any,
        kvcache: Any,
        need_sort: bool = False,
        *,
        debug: bool = False,
        layout: PageLayout | None = None,
    ) -> None:
        size, page_size = as_count(size, "size"), as_count(page_size, "page_size")
        if page_size < 1:
            raise ValueError(f"page_size={page_size} must be at least 1")
        if size < page_size:
            raise ValueError(f"size={size} must be at least one page of {page_size} tokens")
        super().__init__(
            layout or PageLayout.single(page_size, size // page_size),
            dtype=dtype,
            device=device,
            kvcache=kvcache,
            need_sort=need_sort,
            debug=debug,
        )
        self.num_pages = self.layout.capacity_pages

    def alloc_pages(self, num_pages: int) -> PageIds | None:
        """Take ``num_pages`` pages in draw order; None when short, nothing changed."""
        num_pages = as_count(num_pages, "num_pages")
        if num_pages < 0:
            raise ValueError(f"num_pages={num_pages} must not be negative")
        return self.free_list.draw_run(0, num_pages)

    def alloc_extend(
        self,
        prefix_lens: Any,
        prefix_lens_cpu: Any,
        seq_lens: Any,
        seq_lens_cpu: Any,
        last_loc: Any,
        extend_num_tokens: int | None,
    ) -> Slots | None:
        """Extend each request from its prefix to its sequence length.

        Each request first fills the rest of its last page (from ``last_loc + 1``), then takes
        whole new pages, then part of one.

        Args:
            prefix_lens: the device copy of ``prefix_lens_cpu``; not read.
            prefix_lens_cpu: int[batch] tokens that have slots, host.
            seq_lens: the device copy of ``seq_lens_cpu``; not read.
            seq_lens_cpu: int[batch] tokens that have slots afterwards, host.
            last_loc: int[batch] slot of each request's last prefix token, -1 without a prefix.
            extend_num_tokens: the sum of the extends, checked; None to skip the check.

        Returns:
            int64[sum of extends] in batch order, or None when short; nothing changed then.

        Raises:
            ValueError: lengths or last slots contradict each other (last slots are checked on
                the host, or in debug).
        """
        batch = ExtendBatch.of(prefix_lens_cpu, seq_lens_cpu, self.page_size)
        batch.check_extend_num_tokens(extend_num_tokens)
        return self._extend(batch, last_loc, self.io.fill_extend)

    def alloc_decode(self, seq_lens: Any, seq_lens_cpu: Any, last_loc: Any) -> Slots | None:
        """Take the slot of position ``seq_len - 1`` for each request.

        A new page is taken exactly when ``(seq_len - 1) % page_size == 0``. Arguments and errors
        are those of ``alloc_extend`` with ``prefix_lens = seq_lens - 1``.

        Returns:
            int64[batch], or None when short; nothing changed then.
        """
        lens = as_int64(seq_lens_cpu, "seq_lens")
        batch = ExtendBatch.of(lens - 1, lens, self.page_size)
        return self._extend(batch, last_loc, self.io.fill_decode)

    def _extend(self, batch: ExtendBatch, last_loc: Any, fill: Callable[..., None]) -> Slots | None:
        self._check_last_loc(batch, last_loc)
        num_pages = batch.num_new_pages
        if not self._can_draw_any(num_pages):
            return None
        out = self.io.empty(batch.num_tokens)
        pages = self.alloc_pages(num_pages)
        assert pages is not None, "the counts were checked before the draw"
        fill(out, batch, last_loc, pages)
        return out

    def _check_last_loc(self, batch: ExtendBatch, last_loc: Any) -> None:
        batch.check_one_last_loc_each(last_loc)
        if self.device is None or self.debug:
            batch.check_last_locs(self.io.to_host(last_loc))
