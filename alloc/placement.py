"""The page-interleave placement: which rank owns a slot, and in which row it keeps it.

Every N consecutive logical pages form a group; rank r owns the r-th page of each group. All
arithmetic is elementwise on int64 and stateless: the rank is always an argument. The formulas
accept NumPy arrays and torch tensors alike.

>>> import numpy as np
>>> spec = PageShardSpec(shard_rank=1, shard_size=4, page_size=16,
...                      max_prefix_tokens=4096, chunk_tokens=512)
>>> placement = PageInterleavePlacement(spec)
>>> locs = np.array([0, 16, 31, 32, 80, 2**40 + 3])
>>> placement.owner_of(locs).tolist()
[0, 1, 1, 2, 1, 0]
>>> placement.filter_local(locs, 1).tolist()
[0, 15, 16]
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from alloc.layout import PageLayout
from alloc.spaces import as_count, holds_integers, widened


@dataclass(frozen=True, slots=True)
class PageShardSpec:
    """How one model's KV pages are spread over a group of ranks, and the scratch they need.

    Attributes:
        shard_rank: this rank, in ``[0, shard_size)``.
        shard_size: ranks of the group, N.
        page_size: tokens of a physical page.
        max_prefix_tokens: scratch tokens for gathered prefixes, a multiple of N * page_size.
        chunk_tokens: scratch tokens for the chunk being computed, a multiple of page_size.

    Raises:
        ValueError: a field is not an integer or out of its range; the message names it and the
            rule.
    """

    shard_rank: int
    shard_size: int
    page_size: int
    max_prefix_tokens: int
    chunk_tokens: int

    def __post_init__(self) -> None:
        """Make every field an int and validate them against each other."""
        for field in fields(self):
            object.__setattr__(self, field.name, as_count(getattr(self, field.name), field.name))
        if self.shard_size < 1:
            raise ValueError(f"shard_size={self.shard_size} must be at least 1")
        if not 0 <= self.shard_rank < self.shard_size:
            raise ValueError(f"shard_rank={self.shard_rank} must be in [0, {self.shard_size})")
        if self.page_size < 1:
            raise ValueError(f"page_size={self.page_size} must be at least 1")
        group = self.logical_page_size
        if self.max_prefix_tokens < 0 or self.max_prefix_tokens % group:
            raise ValueError(
                f"max_prefix_tokens={self.max_prefix_tokens} must be a multiple of "
                f"shard_size * page_size = {group}"
            )
        if self.chunk_tokens < 0 or self.chunk_tokens % self.page_size:
            raise ValueError(
                f"chunk_tokens={self.chunk_tokens} must be a multiple of page_size={self.page_size}"
            )

    @property
    def logical_page_size(self) -> int:
        """Tokens of one group: a page on every rank."""
        return self.shard_size * self.page_size

    @property
    def scratch_rows(self) -> int:
        """Rows of one scratch slot ``[prefix | chunk | trash page]``."""
        return self.max_prefix_tokens + self.chunk_tokens + self.page_size

    def layout(self, pages_per_rank: int) -> PageLayout:
        """Return the page-interleave layout of a pool with ``pages_per_rank`` pages a rank."""
        return PageLayout.interleave(self.page_size, self.shard_size, pages_per_rank)


class PageInterleavePlacement:
    """Owner and local row of logical slots under a ``PageShardSpec``.

    Every method takes int32 or int64 slots (NumPy or torch) and computes in int64, so slots
    beyond 2**31 are exact; floats and bools are a ValueError. Reserved slots are accepted: they lie
    in local page 0.
    """

    __slots__ = ("spec",)

    def __init__(self, spec: PageShardSpec) -> None:
        self.spec = spec

    def owner_of(self, locs: Any) -> Any:
        """Return the rank that owns each slot: ``(loc % (N * ps)) // ps``."""
        return (_widen(locs) % self.spec.logical_page_size) // self.spec.page_size

    def local_index(self, locs: Any) -> Any:
        """Return each slot's row in its owner's pool; the owner does not enter the row."""
        wide = _widen(locs)
        ps = self.spec.page_size
        return (wide // self.spec.logical_page_size) * ps + wide % ps

    def local_mask(self, locs: Any, rank: int) -> Any:
        """Return a bool mask of the slots that ``rank`` owns."""
        return self.owner_of(locs) == self._check_rank(rank)

    def filter_local(self, locs: Any, rank: int) -> Any:
        """Return the rows of the slots that ``rank`` owns, in their order."""
        wide = _widen(locs)
        return self.local_index(wide[self.local_mask(wide, rank)])

    def loc_of(self, owners: Any, rows: Any) -> Any:
        """Return the slot that ``owner`` keeps in ``row``: the inverse mapping."""
        wide = _widen(rows)
        ps = self.spec.page_size
        group = self.spec.logical_page_size
        return (wide // ps) * group + _widen(owners) * ps + wide % ps

    def _check_rank(self, rank: int) -> int:
        rank = as_count(rank, "rank")
        if not 0 <= rank < self.spec.shard_size:
            raise ValueError(f"rank={rank} must be in [0, {self.spec.shard_size})")
        return rank


def _widen(values: Any) -> Any:
    """Return int64 of whatever array it is; a torch tensor is known by its ``long`` method."""
    if not hasattr(values, "long"):
        return widened(values, "slots")
    if not holds_integers(values):
        raise ValueError(f"slots have dtype {values.dtype}; pass integers")
    return values.long()
