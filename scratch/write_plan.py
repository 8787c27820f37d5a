"""Which rows of a chunk this rank keeps, and where: computed once a batch, used in every layer."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from alloc import PageLayout

NOT_OWNED = -1
"""The pool row of a slot that another rank owns."""


class Placement(Protocol):
    """Owner and local row of slots: ``alloc.PageInterleavePlacement``, or ``LayoutPlacement``."""

    def local_mask(self, locs: Any, rank: int) -> Any:
        """Return a bool mask of the slots that ``rank`` owns."""

    def local_index(self, locs: Any) -> Any:
        """Return each slot's row in its owner's pool: int64."""


class LayoutPlacement:
    """The ``Placement`` of any ``PageLayout``, owner lanes included."""

    __slots__ = ("layout",)

    def __init__(self, layout: PageLayout) -> None:
        self.layout = layout

    def local_mask(self, locs: Any, rank: int) -> Any:
        """Return a bool mask of the slots that ``rank`` owns."""
        return self.layout.class_of(locs // self.layout.page_size) == rank

    def local_index(self, locs: Any) -> Any:
        """Return each slot's row in its owner's pool; reserved slots lie in local page 0."""
        return self.layout.local_row(locs)


class WritePlanCache:
    """The last write plan, kept by the identity of its slots and an epoch.

    The same plan in two forms: ``get`` lists the owned rows, ``pool_rows`` has an entry for every
    slot and never waits for a device.

    Args:
        placement: where slots lie.
        rank: this rank.
    """

    __slots__ = ("_epoch", "_loc", "_plan", "_rows", "placement", "rank")

    def __init__(self, placement: Placement, rank: int) -> None:
        self.placement = placement
        self.rank = rank
        self._epoch: int | None = None
        self._loc: torch.Tensor | None = None
        self._rows: torch.Tensor | None = None
        self._plan: tuple[torch.Tensor, torch.Tensor] | None = None

    def get(self, loc: torch.Tensor, *, epoch: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the owned positions of ``loc`` and their local rows.

        Args:
            loc: int32 or int64[n] slots. The cache holds it: don't change it under one epoch.
            epoch: the plan in force; another epoch renews the answer.

        Returns:
            int64[m] positions in ``loc`` and int64[m] pool rows; m may be 0.

        Cost: O(n) the first time, which waits for the device on CUDA to learn m; then free.
        """
        rows = self.pool_rows(loc, epoch=epoch)
        if self._plan is None:
            owned = (rows != NOT_OWNED).nonzero(as_tuple=True)[0]
            self._plan = owned, rows.index_select(0, owned)
        return self._plan

    def pool_rows(self, loc: torch.Tensor, *, epoch: int) -> torch.Tensor:
        """Return this rank's pool row of each slot, ``NOT_OWNED`` for other ranks' slots.

        Args:
            loc: int32 or int64[n] slots. The cache holds it: don't change it under one epoch.
            epoch: the plan in force; another epoch renews the answer.

        Returns:
            int64[n] on the device of ``loc``.

        Cost: O(n) the first time, then free; never waits for the device.
        """
        if self._rows is None or self._loc is not loc or self._epoch != epoch:
            self._rows = self.compute_pool_rows(loc)
            self._loc, self._epoch, self._plan = loc, epoch, None
        return self._rows

    def compute_pool_rows(self, loc: torch.Tensor) -> torch.Tensor:
        """Return what ``pool_rows`` returns, remembering nothing."""
        wide = loc.to(torch.int64)
        rows: torch.Tensor = self.placement.local_index(wide)
        return torch.where(self.placement.local_mask(wide, self.rank), rows, NOT_OWNED)
