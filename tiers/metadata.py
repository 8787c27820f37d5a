"""What must be known of a run of pages to bring it back: who owned which page when it was written.

A rank stores only its own rows, so a page that comes back under another owner would show rows that
nobody loaded. A page on the host has the class of its original; in files the metadata says it.

>>> owners = OwnerMetadata.of([0, 1, 0], rank=0, page_size=2)
>>> owners.owned_positions.tolist()
[0, 1, 4, 5]
>>> [part.owned_positions.tolist() for part in owners.split(2)]
[[0, 1], [2, 3]]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from alloc import IntArray

OwnerArray = NDArray[np.int8]

MAX_OWNERS = 128
"""Ranks that an int8 tells apart."""


@dataclass(frozen=True, slots=True, eq=False)
class OwnerMetadata:
    """Owners of one write of whole pages. Arrays are copied and read-only.

    Attributes:
        owned_positions: int64[n] positions of the write, in tokens, that this rank owns; ascending.
        page_owners: int8[num_pages] owner of each page, the same on all ranks.
        page_size: tokens of a page.

    Raises:
        ValueError: a dtype or shape is wrong, or the positions are not exactly the pages of one
            owner.
    """

    owned_positions: IntArray
    page_owners: OwnerArray
    page_size: int

    def __post_init__(self) -> None:
        """Check the arrays against each other and keep copies."""
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size} must be at least 1")
        owners = _frozen(self.page_owners, np.int8, "page_owners")
        positions = _frozen(self.owned_positions, np.int64, "owned_positions")
        if len(owners) and owners.min() < 0:
            raise ValueError(f"page_owners hold {int(owners.min())}; owners are at least 0")
        object.__setattr__(self, "page_owners", owners)
        object.__setattr__(self, "owned_positions", positions)
        if not len(positions):
            return
        if positions[0] < 0 or positions[-1] >= self.num_tokens:
            raise ValueError(
                f"owned_positions [{int(positions[0])}, {int(positions[-1])}] leave the write's "
                f"{self.num_tokens} tokens"
            )
        rank = int(owners[positions[0] // self.page_size])
        if not np.array_equal(positions, _positions(owners, rank, self.page_size)):
            raise ValueError(
                f"owned_positions are not the positions of the pages of owner {rank}; a rank owns "
                f"whole pages, and all of its pages of the write"
            )

    @classmethod
    def of(cls, page_owners: Any, rank: int, page_size: int) -> OwnerMetadata:
        """Return the metadata of pages with these owners, as ``rank`` sees it.

        Raises:
            ValueError: an owner is not in [0, 128), or the rank is negative.
        """
        owners = np.asarray(page_owners, dtype=np.int64)
        if rank < 0 or (len(owners) and (owners.min() < 0 or owners.max() >= MAX_OWNERS)):
            raise ValueError(f"rank={rank} and owners {owners.tolist()} must be in [0, 128)")
        if page_size < 1:
            raise ValueError(f"page_size={page_size} must be at least 1")
        narrow = owners.astype(np.int8)
        return cls(_positions(narrow, rank, page_size), narrow, page_size)

    @property
    def num_tokens(self) -> int:
        """Tokens of the write."""
        return len(self.page_owners) * self.page_size

    @property
    def num_owned_pages(self) -> int:
        """Pages of the write that this rank owns."""
        return len(self.owned_positions) // self.page_size

    def classes(self) -> IntArray:
        """Return the owner of each page, as a draw takes it: int64[num_pages]."""
        return self.page_owners.astype(np.int64)

    def split(self, num_tokens: int) -> tuple[OwnerMetadata, OwnerMetadata]:
        """Return the metadata of the first ``num_tokens`` and of the rest.

        Raises:
            ValueError: not a page boundary of the write.
        """
        if num_tokens % self.page_size or not 0 <= num_tokens <= self.num_tokens:
            raise ValueError(
                f"split({num_tokens}) is not a page boundary: pass a multiple of "
                f"page_size={self.page_size} up to {self.num_tokens}"
            )
        cut = int(np.searchsorted(self.owned_positions, num_tokens))
        page = num_tokens // self.page_size
        head = OwnerMetadata(self.owned_positions[:cut], self.page_owners[:page], self.page_size)
        rest = self.owned_positions[cut:] - num_tokens
        return head, OwnerMetadata(rest, self.page_owners[page:], self.page_size)


def _positions(owners: OwnerArray, rank: int, page_size: int) -> IntArray:
    """Return the positions in pages of ``rank``: int64[n], ascending."""
    pages = np.flatnonzero(owners == rank).astype(np.int64)
    return (pages[:, None] * page_size + np.arange(page_size)).reshape(-1)


def _frozen(values: Any, dtype: Any, name: str) -> Any:
    array = np.array(values)
    if array.dtype != dtype or array.ndim != 1:
        raise ValueError(
            f"{name} are {array.dtype}{list(array.shape)}; pass {np.dtype(dtype)} in one dimension"
        )
    array.flags.writeable = False
    return array
