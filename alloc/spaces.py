"""Names for the integer spaces that the library's arrays live in. No logic but validation.

The spaces never mix: a page id is not a slot, a slot is not a row. Arrays carry no tag at run
time, so the suffix of a variable says its space: ``*_pages``, ``*_locs``, ``*_rows``,
``*_lens`` (tokens), ``*_classes``.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

IntArray: TypeAlias = NDArray[np.int64]
"""int64[n], host: counts, lengths, classes."""

PageIds: TypeAlias = NDArray[np.int64]
"""int64[num_pages], host: logical page ids ``l = loc // page_size``."""

Locs: TypeAlias = NDArray[np.int64]
"""int64[num_tokens], host: logical token slots."""

Slots: TypeAlias = Any
"""Token slots as the caller sees them: ``Locs`` in host mode, an int64 tensor with a device."""


def ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor`` rounded up, for ``value >= 0`` and ``divisor > 0``."""
    return -(-value // divisor)


def exclusive_sum(counts: IntArray) -> IntArray:
    """Return where each of consecutive runs starts: the sum of the counts before it."""
    ends: IntArray = counts.cumsum()
    ends -= counts
    return ends


def as_int64(values: Any, name: str) -> IntArray:
    """Return ``values`` as a one-dimensional int64 array, copying only to widen.

    Args:
        values: any integer sequence or NumPy array.
        name: what the values are, for the error.

    Raises:
        ValueError: the values are not integers (floats and bools are refused), or not 1-D.
    """
    array = np.asarray(values)
    if array.dtype != np.int64:
        if array.size == 0:
            array = array.astype(np.int64)
        elif array.dtype.kind not in "iu":
            raise ValueError(f"{name} have dtype {array.dtype}; pass integers")
        else:
            array = array.astype(np.int64)
    if array.ndim != 1:
        raise ValueError(f"{name} have shape {array.shape}; pass one dimension")
    return array


def pages_of_runs(locs: Locs, page_size: int) -> PageIds:
    """Return the pages of slots that are whole consecutive pages: int64[len(locs) / page_size].

    Raises:
        ValueError: the slots are not whole pages, or a page's slots are not consecutive.
    """
    if len(locs) % page_size:
        raise ValueError(f"{len(locs)} slots are not whole pages of {page_size} tokens")
    runs = locs.reshape(-1, page_size)
    pages = runs[:, 0] // page_size
    if not np.array_equal(runs, pages[:, None] * page_size + np.arange(page_size)):
        raise ValueError(f"the slots are not whole consecutive pages of {page_size} tokens")
    return pages
