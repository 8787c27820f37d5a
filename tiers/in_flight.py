"""Copies that have been started and not confirmed: plain data about ranges, never about nodes.

A node may be split, trimmed and grown while a copy of it is on its way; the range that is copied
stays what it was.
"""

from __future__ import annotations

from dataclasses import dataclass

from alloc import PageIds
from radix import LockReceipt, RadixKey
from tiers.transfer import Ticket


@dataclass(frozen=True, slots=True, eq=False)
class WriteInFlight:
    """A copy to the host that no match can see yet.

    Attributes:
        key: the path to the end of the range.
        start: position-page where the range starts; the host holds what is above.
        host_pages: int64[n] drawn host pages of the range, each of its original's owner.
        ticket: of the transfer.
        device_receipt: keeps the originals until the copy has arrived.
        host_receipt: keeps the host's copies above the range.
    """

    key: RadixKey
    start: int
    host_pages: PageIds
    ticket: Ticket
    device_receipt: LockReceipt
    host_receipt: LockReceipt

    def is_along(self, path: RadixKey) -> bool:
        """Say whether this write's path and another are one, as far as both go."""
        if self.key.namespace != path.namespace:
            return False
        mine, other = self.key.data, path.data
        return mine.startswith(other) or other.startswith(mine)


@dataclass(frozen=True, slots=True, eq=False)
class LoadInFlight:
    """A copy to the device, of which the first layers may be read already.

    Attributes:
        ticket: of the transfer.
        device_receipt: keeps the pages that are being filled.
        host_receipt: keeps the copies that they are filled from.
    """

    ticket: Ticket
    device_receipt: LockReceipt
    host_receipt: LockReceipt
