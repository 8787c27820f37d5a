"""The two scratch slots of a pool, and which layer each of them holds."""

from __future__ import annotations

from typing import Any

import torch

from scratch.budget import NUM_SLOTS
from scratch.group import PendingGather


class ScratchSlot:
    """One scratch slot.

    Attributes:
        rows: integer[scratch_rows, width]; bits of the pool's dtype.
        layer_id: the layer whose rows it holds or awaits; None before a plan.
        pending: the gather that fills it; None when its prefix is there.
    """

    __slots__ = ("layer_id", "pending", "rows")

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.layer_id: int | None = None
        self.pending: PendingGather | None = None

    def take(self, layer_id: int) -> None:
        """Give the slot to a layer without a prefix, unless a later one has it already.

        A slot that never goes back to an earlier layer never returns one layer's rows as another's.
        """
        if self.layer_id is None or self.layer_id < layer_id:
            self.layer_id = layer_id

    def settle(self) -> None:
        """Wait for the gather that fills this slot, if there is one.

        Raises:
            RuntimeError: the gather failed; the slot then holds no layer.
        """
        pending, self.pending = self.pending, None
        if pending is not None:
            layer_id, self.layer_id = self.layer_id, None
            pending.wait()
            self.layer_id = layer_id


class ScratchSlots:
    """Both slots; consecutive layers alternate between them.

    Args:
        num_rows: rows of a slot, ``ScratchLayout.num_rows``.
        width: elements of a row.
        dtype: an integer dtype of the pool's element size.
        device: where they lie.
        start_layer: the first layer of the pool.
    """

    __slots__ = ("_slots", "_start_layer")

    def __init__(
        self, num_rows: int, width: int, dtype: torch.dtype, device: Any, start_layer: int
    ) -> None:
        self._start_layer = start_layer
        self._slots = [
            ScratchSlot(torch.zeros((num_rows, width), dtype=dtype, device=device))
            for _ in range(NUM_SLOTS)
        ]

    def of_layer(self, layer_id: int) -> ScratchSlot:
        """Return the slot that serves a layer."""
        return self._slots[(layer_id - self._start_layer) % NUM_SLOTS]

    def settle(self) -> None:
        """Wait for every gather in flight.

        Raises:
            RuntimeError: one failed; the others have been waited for all the same.
        """
        failed: RuntimeError | None = None
        for slot in self._slots:
            try:
                slot.settle()
            except RuntimeError as error:
                failed = failed or error
        if failed is not None:
            raise failed

    def forget(self) -> None:
        """Note that no slot holds a layer."""
        for slot in self._slots:
            slot.layer_id = None
