"""Names for the integer spaces that the library's arrays live in. No logic but validation.

The spaces never mix: a page id is not a slot, a slot is not a row. Arrays carry no tag at run
time, so the suffix of a variable says its space: ``*_pages``, ``*_locs``, ``*_rows``,
``*_lens`` (tokens), ``*_classes``.
"""

from __future__ import annotations

import operator
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

_INT64 = np.dtype(np.int64)
_MAX_INT64 = 2**63 - 1


def ceil_div(value: int, divisor: int) -> int:
    """Return ``value / divisor`` rounded up, for ``value >= 0`` and ``divisor > 0``."""
    return -(-value // divisor)


def exclusive_sum(counts: IntArray) -> IntArray:
    """Return where each of consecutive runs starts: the sum of the counts before it."""
    ends: IntArray = counts.cumsum()
    ends -= counts
    return ends


def frozen_copy(values: IntArray) -> IntArray:
    """Return a copy that can't be written to."""
    copy = values.copy()
    copy.flags.writeable = False
    return copy


def as_count(value: Any, name: str) -> int:
    """Return a count, size, length or index as a Python int.

    Args:
        value: an int, or what stands for one (``np.int64``, an integer tensor of one element).
        name: what the value is, for the error.

    Raises:
        ValueError: the value is not an integer; floats, strings and bools are refused.
    """
    if type(value) is int:
        return value
    try:
        if not isinstance(value, bool):
            return int(operator.index(value))
    except TypeError:
        pass
    raise ValueError(f"{name}={value!r} must be an integer")


def holds_integers(values: Any) -> bool:
    """Say whether a NumPy array or a tensor holds nothing but integers; bools are none."""
    dtype = values.dtype
    whole = dtype.kind in "iu" if isinstance(dtype, np.dtype) else "int" in str(dtype)
    return whole or 0 in values.shape


def widened(values: Any, name: str) -> IntArray:
    """Return ``values`` as an int64 array of their shape, copying only to widen.

    Raises:
        ValueError: the values are not integers (floats and bools are refused), or leave int64.
    """
    try:
        array = np.asarray(values)
    except (TypeError, RuntimeError) as error:  # a tensor that NumPy can't hold
        raise ValueError(f"{name} can't be read as integers: {error}") from None
    if array.dtype != _INT64:
        if not holds_integers(array):
            raise ValueError(f"{name} have dtype {array.dtype}; pass integers")
        if array.dtype == np.uint64 and array.size and array.max() > _MAX_INT64:
            raise ValueError(f"{name} hold {int(array.max())}, which leaves int64")
        array = array.astype(_INT64)
    return array


def as_int64(values: Any, name: str) -> IntArray:
    """Return ``values`` as a one-dimensional int64 array, copying only to widen.

    Args:
        values: any integer sequence or NumPy array.
        name: what the values are, for the error.

    Raises:
        ValueError: the values are not integers (floats and bools are refused), leave int64, or
            are not 1-D.
    """
    array = widened(values, name)
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
