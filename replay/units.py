"""How the ids of a trace become units of the tree, and how requests become keys.

Three ways, with equal hit rates where they overlap:

    token trace          a unit is a token;  a tree page is `page_size` units
    block trace          a unit is a page;   a block is block_size / page_size units
    block trace, expand  a unit is a token;  a block is block_size units

Of the units of a block the first is the block's id and the others are their place in the block:
a tree compares whole paths, so a path says which block they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from radix import RadixKey
from replay.errors import ReplayError
from replay.trace import Request, TraceInfo

DEFAULT_TOKEN_PAGE = 16


@dataclass(frozen=True, slots=True)
class Units:
    """The conversion for one trace and one page size.

    Attributes:
        page_size: Tokens in a page; capacities and hits are counted in these.
        tree_page_size: Units in a page of the tree and the allocator.
        units_per_id: Units that one id of the trace becomes.
    """

    page_size: int
    tree_page_size: int
    units_per_id: int

    def key(self, request: Request) -> RadixKey:
        """Return the request's key; one for all capacities, since keys own their bytes.

        Cost: O(units of the request).
        """
        ids = np.asarray(request.ids, dtype=np.int64)
        if self.units_per_id > 1:
            units = np.empty((len(ids), self.units_per_id), dtype=np.int64)
            units[:] = np.arange(self.units_per_id)
            units[:, 0] = ids
            ids = units.reshape(-1)
        return RadixKey(ids)

    def pages(self, request: Request) -> int:
        """Return the pages of the request that can be cached and hold prompt tokens."""
        pages = len(request.ids) * self.units_per_id // self.tree_page_size
        return min(pages, -(-request.input_length // self.page_size))


def plan_units(info: TraceInfo, *, page_size: int | None, expand: bool) -> Units:
    """Decide how a trace becomes units.

    Args:
        info: The trace.
        page_size: Tokens in a page; None for the trace's block size, or 16 for a token trace.
        expand: Make every block `block_size` tokens, to drive pages of several units.

    Raises:
        ReplayError: If a page holds less than a token, a block is not a whole number of pages, or
            a token trace is to be expanded.
    """
    if page_size is not None and page_size < 1:
        raise ReplayError(f"--page-size {page_size}: a page holds at least one token")
    if not info.has_blocks:
        if expand:
            raise ReplayError("--expand: the trace holds token ids already; leave the option out")
        size = page_size or DEFAULT_TOKEN_PAGE
        return Units(size, size, 1)
    size = page_size or info.block_size
    if info.block_size % size:
        raise ReplayError(
            f"--page-size {size}: an id of this trace stands for {info.block_size} tokens, which "
            f"is no whole number of pages of {size}; give a divisor of {info.block_size}"
        )
    if expand:
        return Units(size, size, info.block_size)
    return Units(size, 1, info.block_size // size)
