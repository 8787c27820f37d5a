"""Where page groups go below the host: anything that keeps named bytes, for a while.

A store may forget any blob at any time and never returns wrong bytes. What the names mean, and
whether ranks agree, is ``tiers.groups``' business.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol


class BlobStore(Protocol):
    """Named blobs of a header and a body."""

    def __contains__(self, name: str) -> bool:
        """Say whether the store believes it has a blob; cheap."""

    def put(self, name: str, header: bytes, body: bytes) -> bool:
        """Keep a blob, in place of one of its name; say whether it is kept.

        A store that is full, failing or closed says no.
        """

    def header(self, name: str) -> bytes | None:
        """Return an intact header, or None."""

    def body(self, name: str) -> bytes | None:
        """Return an intact body, or None."""

    def use(self, name: str) -> None:
        """Count a use, if the blob is there."""


class MemoryStore:
    """Blobs in a dictionary, the least recently used go first.

    Args:
        capacity: blobs to keep, whatever their size; 0 keeps none.
    """

    def __init__(self, capacity: int) -> None:
        if capacity < 0:
            raise ValueError(f"capacity={capacity} must not be negative")
        self._capacity = capacity
        self._blobs: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blobs)

    def __contains__(self, name: str) -> bool:
        return name in self._blobs

    def put(self, name: str, header: bytes, body: bytes) -> bool:
        """Keep a blob, in place of one of its name."""
        if not self._capacity:
            return False
        if name not in self._blobs and len(self._blobs) == self._capacity:
            self._blobs.popitem(last=False)
        self._blobs[name] = (header, body)
        self._blobs.move_to_end(name)
        return True

    def header(self, name: str) -> bytes | None:
        """Return a header, or None."""
        blob = self._blobs.get(name)
        return None if blob is None else blob[0]

    def body(self, name: str) -> bytes | None:
        """Return a body, or None."""
        blob = self._blobs.get(name)
        return None if blob is None else blob[1]

    def use(self, name: str) -> None:
        """Count a use, if the blob is there."""
        if name in self._blobs:
            self._blobs.move_to_end(name)
