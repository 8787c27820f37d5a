"""Slots to scratch rows under the plan in force, remembered per plan.

The memo goes by identity and holds the tensor itself: an address may be reused by another tensor,
an object that is held cannot.
"""

from __future__ import annotations

import torch

from scratch.kernels import expand_pages, translate_locs


class SlotTranslator:
    """``loc -> page_pos[loc // page_size] * page_size + loc % page_size``.

    Args:
        page_pos: int32[num_pages], the planner's table; read at each call.
        page_size: tokens of a page.
        max_slots: how many slots the memo holds at most. The oldest tensor goes first, so that
            fresh tensors in every layer don't pile up.
    """

    __slots__ = ("_max_slots", "_memo", "_num_slots", "_page_pos", "_page_size")

    def __init__(self, page_pos: torch.Tensor, page_size: int, max_slots: int) -> None:
        self._page_pos = page_pos
        self._page_size = page_size
        self._max_slots = max_slots
        self._memo: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._num_slots = 0

    def translate(self, loc: torch.Tensor) -> torch.Tensor:
        """Return scratch rows: int64, the shape of ``loc`` (int32 or int64).

        Raises:
            ValueError: ``loc`` has another dtype.
        """
        _check_integer(loc, "loc")
        return translate_locs(loc, self._page_pos, self._page_size)

    def translate_cached(self, loc: torch.Tensor) -> torch.Tensor:
        """Return ``translate(loc)``, computed once for the same tensor until ``forget``.

        Tensors of more than ``max_slots`` slots together are forgotten before.
        """
        known = self._memo.get(id(loc))
        if known is not None:
            return known[1]
        rows = self.translate(loc)
        self._num_slots += loc.numel()
        while self._memo and self._num_slots > self._max_slots:
            oldest, _ = self._memo.pop(next(iter(self._memo)))
            self._num_slots -= oldest.numel()
        self._memo[id(loc)] = (loc, rows)
        return rows

    def translate_pages(self, pages: torch.Tensor) -> torch.Tensor:
        """Return the rows of whole pages in order: int64[len(pages) * page_size].

        Args:
            pages: int32 or int64[n] logical pages.
        """
        _check_integer(pages, "pages")
        return expand_pages(self._page_pos.index_select(0, pages), self._page_size)

    def forget(self) -> None:
        """Drop the memo: the table has changed."""
        self._memo.clear()
        self._num_slots = 0


def _check_integer(values: torch.Tensor, name: str) -> None:
    if values.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} has dtype {values.dtype}; pass int32 or int64")
