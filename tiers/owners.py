"""What of a host run a device chain takes: rows can't move between ranks, so owners decide."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alloc import PageIds, PageLayout
from radix import MatchHandle, UnifiedRadixCache


@dataclass(frozen=True, slots=True)
class LoadablePart:
    """Pages that are inserted together.

    Attributes:
        stop: pages from the start of the run to the end of this part.
        base: their rotation base; None where the pool has none.
    """

    stop: int
    base: int | None


def loadable_parts(
    device: UnifiedRadixCache, handle: MatchHandle, layout: PageLayout, run: PageIds
) -> list[LoadablePart]:
    """Cut a run of copies into parts of one rotation base, as far as the device's chain takes them.

    Args:
        device: the device's cache.
        handle: where its chain ends and the run starts.
        layout: of the host pages.
        run: int64[n] host pages from there on.

    Returns:
        The parts in order: one for a pool without rotation bases; none where the chain lies under
        another base than the copies, or requests in flight are about to start it under another.
    """
    if not len(run):
        return []
    if not device.is_sharded:
        return [LoadablePart(len(run), None)]
    breaks = (np.diff(layout.class_of(run)) - 1) % layout.num_classes != 0
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    chain_base = device.rotation_base_of(handle.node_id) if handle.end else _leased(device, handle)
    bound = handle.end > 0 or chain_base is not None
    parts: list[LoadablePart] = []
    for first, stop in zip(starts, [*starts[1:], len(run)], strict=True):
        base = layout.base_of(int(run[first]), handle.end + first)
        if bound and device.rotation.declines(chain_base, base):
            break
        parts.append(LoadablePart(stop, base))
        chain_base, bound = base, True
    return parts


def num_loadable(parts: list[LoadablePart]) -> int:
    """Return the pages of all parts."""
    return parts[-1].stop if parts else 0


def _leased(device: UnifiedRadixCache, handle: MatchHandle) -> int | None:
    """Return the base under which requests in flight start this chain; None without any."""
    first = handle.key[: device.page_size]
    return device.leases.base_of((first.namespace, first.data))
