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
        another base than the copies.
    """
    if not len(run):
        return []
    if not device.is_sharded:
        return [LoadablePart(len(run), None)]
    breaks = (np.diff(layout.class_of(run)) - 1) % layout.num_classes != 0
    starts = [0, *(np.flatnonzero(breaks) + 1).tolist()]
    chain_base = device.rotation_base_of(handle.node_id)
    parts: list[LoadablePart] = []
    for first, stop in zip(starts, [*starts[1:], len(run)], strict=True):
        base = layout.base_of(int(run[first]), handle.end + first)
        if (handle.end or parts) and device.rotation.declines(chain_base, base):
            break
        parts.append(LoadablePart(stop, base))
        chain_base = base
    return parts
