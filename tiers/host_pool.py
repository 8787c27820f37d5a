"""One rank's rows on the host: the same layers as its device pool, rows of bits, no plan."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from alloc import IntArray, PageIds, PageLayout


class LayeredPool(Protocol):
    """What a pool shows of itself to be copied; the pools of ``scratch`` do."""

    page_size: int

    def layer_rows(self) -> list[tuple[torch.Tensor, ...]]:
        """Return each layer's tensors as integer[rows, width]; a row is a token."""

    def describe(self) -> str:
        """Return what the bits of a row mean: kind, dtype, shape and layers."""


class HostKVPool:
    """CPU copies of one rank's pages, pinned where there is CUDA.

    Args:
        pool: the device pool; layers, widths and description are taken from it.
        layout: the layout of the host pages (``HostTier.layout``).
        rank: whose pages these are; 0 unsharded.
        pin: pin the memory; default where the device pool lies on CUDA.

    Attributes:
        layout, rank: as given.

    Raises:
        ValueError: the page sizes differ, or the rank is not a class of the layout.
    """

    def __init__(
        self, pool: LayeredPool, layout: PageLayout, rank: int = 0, *, pin: bool | None = None
    ) -> None:
        if pool.page_size != layout.page_size:
            raise ValueError(
                f"the pool has page_size={pool.page_size}, the host layout {layout.page_size}"
            )
        if not 0 <= rank < layout.num_classes:
            raise ValueError(f"rank={rank} must be in [0, {layout.num_classes})")
        layers = pool.layer_rows()
        pinned = layers[0][0].is_cuda if pin is None else pin
        self.layout = layout
        self.rank = rank
        self._description = pool.describe()
        self._layers = [
            tuple(
                torch.zeros((layout.rank_rows, part.shape[1]), dtype=part.dtype, pin_memory=pinned)
                for part in parts
            )
            for parts in layers
        ]

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.layout.page_size

    @property
    def num_bytes(self) -> int:
        """Bytes of all rows."""
        return sum(part.nbytes for parts in self._layers for part in parts)

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, all layers together."""
        return self.num_bytes // (self.layout.pages_per_class + 1)

    def layer_rows(self) -> list[tuple[torch.Tensor, ...]]:
        """Return each layer's tensors: integer[layout.rank_rows, width] on the CPU."""
        return self._layers

    def describe(self) -> str:
        """Return what a payload's bytes depend on: the device pool's description."""
        return self._description

    def local_pages(self, pages: PageIds) -> IntArray:
        """Return the local pages of those that this rank owns, in the given order."""
        return self.layout.local_page(pages[self.layout.class_of(pages) == self.rank])

    def read(self, pages: PageIds) -> bytes:
        """Return this rank's bytes of some pages: by layer, part, page. Waits for no transfer."""
        local = torch.from_numpy(self.local_pages(pages))
        paged = (self._paged(part) for parts in self._layers for part in parts)
        return b"".join(part.index_select(0, local).numpy().tobytes() for part in paged)

    def write(self, pages: PageIds, payload: bytes, skip_pages: int = 0) -> bool:
        """Write this rank's bytes of some pages; waits for no transfer.

        Args:
            pages: int64[n] where the bytes go; those of other ranks are passed over.
            payload: from a ``read`` of ``skip_pages`` owned pages followed by these.
            skip_pages: leading owned pages of the payload to leave out.

        Returns:
            Whether the payload has the size that this takes; else nothing was written.
        """
        local = torch.from_numpy(self.local_pages(pages))
        num_pages = skip_pages + len(local)
        if len(payload) != num_pages * self.page_bytes:
            return False
        offset = 0
        for part in (self._paged(part) for parts in self._layers for part in parts):
            count = num_pages * part.shape[1]
            values = np.frombuffer(payload, part.numpy().dtype, count, offset)
            rows = torch.tensor(values.reshape(num_pages, part.shape[1])[skip_pages:])
            part.index_copy_(0, local, rows)
            offset += values.nbytes
        return True

    def _paged(self, part: torch.Tensor) -> torch.Tensor:
        """Return a tensor of rows with a page in each row, of the same memory."""
        return part.view(-1, self.page_size * part.shape[1])
