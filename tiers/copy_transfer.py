"""Copies between a device pool and a host pool: plain on a CPU, on a side stream on CUDA.

    compute   … write pages | evict: wait for the store's event | reuse the pages …
    side            [ store, all layers ]      [ load 0 ] [ load 1 ] [ load 2 ] …
    compute                                    read 0 waits for ↑, read 1 for the next, …

One side stream carries both directions, so a load never overtakes the store of the same host pages.
It waits for the compute stream where a transfer is started. Pages in long runs travel as copies,
one a run; scattered ones through one kernel a tensor, where Triton is there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import torch

from alloc import IntArray, PageIds, PageLayout
from tiers.host_pool import HostKVPool, LayeredPool
from tiers.transfer import DONE, Ticket

_LONG_RUN = 32
"""Pages of a run, on average, from which a copy for each run keeps up with the link."""


class CopyTransfer:
    """The transfer of one rank: its rows of a device pool, and their host copies.

    Args:
        pool: the device pool, its tensors laid out by ``layout``.
        layout: of the device pages (the allocator's).
        host: the host pool.
        start_layer: id of the pool's first layer.

    Raises:
        ValueError: the layouts differ in page size or classes.
    """

    def __init__(
        self, pool: LayeredPool, layout: PageLayout, host: HostKVPool, start_layer: int = 0
    ) -> None:
        if (layout.page_size, layout.num_classes) != (host.page_size, host.layout.num_classes):
            raise ValueError(
                f"the device pool has pages of {layout.page_size} in {layout.num_classes} classes, "
                f"the host pool of {host.page_size} in {host.layout.num_classes}"
            )
        self._layout = layout
        self._host = host
        self._start_layer = start_layer
        self._page_size = layout.page_size
        self._layers = [
            tuple(zip(device, copies, strict=True))
            for device, copies in zip(pool.layer_rows(), host.layer_rows(), strict=True)
        ]
        device = self._layers[0][0][0].device
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._side = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._filled: list[torch.cuda.Event | None] = [None] * len(self._layers)

    def store(self, device_pages: PageIds, host_pages: PageIds) -> Ticket:
        """Start copying device pages to the host; see ``Transfer.store``."""
        local, copies = self._own_pages(device_pages, host_pages)
        if self._side is None:
            for pairs in self._layers:
                for device, host in pairs:
                    _copy_pages(device, host, local, copies, self._page_size)
            return DONE
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            moves = _moves(local, copies, self._page_size, self._side.device)
            for pairs in self._layers:
                for device, host in pairs:
                    moves(device, host)
            return _StreamTicket(self._side)

    def load(self, host_pages: PageIds, device_pages: PageIds) -> Ticket:
        """Start copying host pages to the device, layer by layer; see ``Transfer.load``."""
        local, copies = self._own_pages(device_pages, host_pages)
        if self._side is None:
            for pairs in self._layers:
                for device, host in pairs:
                    _copy_pages(host, device, copies, local, self._page_size)
            return DONE
        self._side.wait_stream(torch.cuda.current_stream(self._side.device))
        with torch.cuda.stream(self._side):
            moves = _moves(copies, local, self._page_size, self._side.device)
            for index, pairs in enumerate(self._layers):
                for device, host in pairs:
                    moves(host, device)
                self._filled[index] = self._side.record_event()
            return _StreamTicket(self._side)

    def wait_layer(self, layer_id: int) -> None:
        """Make the current stream wait until every load so far has filled a layer.

        A page-interleave pool starts the gather of layer l + 1 when layer l is read, so there wait
        for layer 0 before planning, and for layer l + 1 before reading layer l.

        Raises:
            ValueError: the layer is not one of the pool's.
        """
        index = layer_id - self._start_layer
        if not 0 <= index < len(self._filled):
            raise ValueError(
                f"layer_id={layer_id} is not in "
                f"[{self._start_layer}, {self._start_layer + len(self._filled)})"
            )
        event = self._filled[index]
        if self._side is not None and event is not None:
            torch.cuda.current_stream(self._side.device).wait_event(event)

    def drain(self) -> None:
        """Wait on the host until every transfer so far is done."""
        if self._side is not None:
            self._side.synchronize()

    def _own_pages(self, device_pages: PageIds, host_pages: PageIds) -> tuple[IntArray, IntArray]:
        """Return this rank's local pages on both sides, in the same order."""
        layout, host = self._layout, self._host
        owners = layout.class_of(device_pages)
        wrong = owners != host.layout.class_of(host_pages)
        if wrong.any():
            i = int(wrong.argmax())
            raise ValueError(
                f"device page {int(device_pages[i])} lies on rank {int(owners[i])}, its host page "
                f"{int(host_pages[i])} on rank {int(host.layout.class_of(int(host_pages[i])))}; "
                f"draw pages of the recorded owners"
            )
        return layout.local_page(device_pages[owners == host.rank]), host.local_pages(host_pages)


class _StreamTicket:
    """A point of the side stream."""

    __slots__ = ("_device", "_event")

    def __init__(self, side: torch.cuda.Stream) -> None:
        self._device = side.device
        self._event = side.record_event()

    def is_done(self) -> bool:
        return bool(self._event.query())

    def fence(self) -> None:
        torch.cuda.current_stream(self._device).wait_event(self._event)


def _copy_pages(
    source: torch.Tensor, target: torch.Tensor, sources: IntArray, targets: IntArray, page_size: int
) -> None:
    """Copy whole pages between CPU tensors of rows."""
    width = page_size * source.shape[1]
    taken = source.view(-1, width).index_select(0, torch.from_numpy(sources))
    target.view(-1, width).index_copy_(0, torch.from_numpy(targets), taken)


def _moves(
    sources: IntArray, targets: IntArray, page_size: int, device: torch.device
) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """Return what starts copying these pages from one tensor of rows to another.

    One of the tensors is on the device, the other pinned. The choice depends on the pages alone and
    is made once for all layers.
    """
    runs = list(_runs(sources, targets))
    if len(runs) <= 1 + len(sources) // _LONG_RUN or find_spec("triton") is None:
        return partial(_copy_runs, sources.tolist(), targets.tolist(), runs, page_size)
    from tiers.page_kernel import copy_pages

    places = torch.from_numpy(np.stack([sources, targets])).pin_memory()
    on_device = places.to(device, non_blocking=True)
    return partial(copy_pages, places=on_device, page_size=page_size)


def _copy_runs(
    sources: list[int],
    targets: list[int],
    runs: list[tuple[int, int]],
    page_size: int,
    source: torch.Tensor,
    target: torch.Tensor,
) -> None:
    """Start a copy for each run of pages that both sides have in a row."""
    for first, stop in runs:
        rows = (stop - first) * page_size
        start, to = sources[first] * page_size, targets[first] * page_size
        target[to : to + rows].copy_(source[start : start + rows], non_blocking=True)


def _runs(sources: IntArray, targets: IntArray) -> Iterator[tuple[int, int]]:
    """Yield index ranges in which both sides go up by one page at a time."""
    breaks = (np.diff(sources) != 1) | (np.diff(targets) != 1)
    bounds = [0, *(np.flatnonzero(breaks) + 1).tolist(), len(sources)]
    for first, stop in pairwise(bounds):
        if stop > first:
            yield first, stop
