"""The key of a prefix: token ids as owned int64 bytes, in a namespace.

Bytes because ``bytes.startswith(edge, start)`` compares a whole edge in one memcmp without slicing,
and because they are immutable: later changes to the caller's list or array never reach the tree.

>>> key = RadixKey([5, 6, 7, 8, 9])
>>> len(key), key.tokens().tolist(), len(key[:4])
(5, [5, 6, 7, 8, 9], 4)
>>> RadixKey([5, 6, 7], is_bigram=True).tokens().tolist()
[[5, 6], [6, 7]]
"""

from __future__ import annotations

from array import array
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

TOKEN_BYTES = 8

Separator: TypeAlias = "str | bytes | int | tuple[Separator, ...] | None"
"""What separates namespaces: values whose ``repr`` is the same in every process."""

Namespace: TypeAlias = tuple[Separator, Separator, bool]
"""``(extra_key, cache_salt, is_bigram)``: a match never crosses it."""

PLAIN: Namespace = (None, None, False)
"""The namespace of keys without extra key and salt; shared, so that nodes hold one tuple."""


class RadixKey:
    """Token ids in one namespace.

    Args:
        token_ids: any integer sequence or buffer: list, tuple, range, ``array``, NumPy array,
            memoryview; ``bytes`` are taken as native int64 tokens without a copy. Ids are
            int64; a bool in a list counts as the integer it is.
        extra_key: separates namespaces (LoRA adapter, tenant): None, a str, bytes, int, or a tuple
            of these. None and "" differ. No subclasses, no bools, no floats: replicas must agree on
            its ``repr``, and 1, True and 1.0 would meet.
        cache_salt: a second, independent separator; the same types.
        is_bigram: units are pairs of neighbours, so n + 1 tokens give n units.

    ``len`` and slices count units (tokens, or bigrams).

    Raises:
        ValueError: the ids are not integers or leave int64, the bytes are not whole tokens, or
            a separator has another type.
    """

    __slots__ = ("data", "namespace", "unit_bytes")

    data: bytes
    namespace: Namespace
    unit_bytes: int

    def __init__(
        self,
        token_ids: Any,
        extra_key: Separator = None,
        cache_salt: Separator = None,
        is_bigram: bool = False,
    ) -> None:
        data = _token_bytes(token_ids)
        if is_bigram:
            data = _pairs(data)
            self.unit_bytes = 2 * TOKEN_BYTES
        else:
            self.unit_bytes = TOKEN_BYTES
        self.data = data
        if extra_key is None and cache_salt is None and not is_bigram:
            self.namespace = PLAIN
        else:
            _check_separator(extra_key, "extra_key")
            _check_separator(cache_salt, "cache_salt")
            self.namespace = (extra_key, cache_salt, bool(is_bigram))

    @classmethod
    def of_units(cls, data: bytes, namespace: Namespace) -> RadixKey:
        """Return a key over unit bytes that another key made."""
        key = cls.__new__(cls)
        key.data = data
        key.namespace = namespace
        key.unit_bytes = unit_bytes_of(namespace)
        return key

    @property
    def extra_key(self) -> Separator:
        """The first namespace separator."""
        return self.namespace[0]

    @property
    def cache_salt(self) -> Separator:
        """The second namespace separator."""
        return self.namespace[1]

    @property
    def is_bigram(self) -> bool:
        """Whether a unit is a pair of tokens."""
        return self.namespace[2]

    def __len__(self) -> int:
        return len(self.data) // self.unit_bytes

    def __getitem__(self, units: slice) -> RadixKey:
        """Return the key of a range of units; the step must be 1."""
        try:
            start, stop, step = units.indices(len(self))
        except (AttributeError, TypeError):
            raise ValueError(
                f"a key is indexed by {units!r}; pass a slice of integers, as in key[:4]"
            ) from None
        if step != 1:
            raise ValueError(f"step={step} must be 1: a key is a run of consecutive units")
        width = self.unit_bytes
        return RadixKey.of_units(self.data[start * width : stop * width], self.namespace)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RadixKey):
            return NotImplemented
        return self.data == other.data and self.namespace == other.namespace

    def __hash__(self) -> int:
        return hash((self.data, self.namespace))

    def __repr__(self) -> str:
        space = "" if self.namespace == PLAIN else f", namespace={self.namespace!r}"
        return f"RadixKey({len(self)} units{space})"

    def tokens(self) -> NDArray[np.int64]:
        """Return int64[n], or int64[n, 2] for bigrams; read-only."""
        flat = np.frombuffer(self.data, dtype=np.int64)
        return flat.reshape(-1, 2) if self.is_bigram else flat


def unit_bytes_of(namespace: Namespace) -> int:
    """Return the bytes of one unit of a namespace's keys."""
    return 2 * TOKEN_BYTES if namespace[2] else TOKEN_BYTES


def common_units(a: bytes, a_start: int, b: bytes, b_stop: int, unit_bytes: int) -> int:
    """Return how many leading units of ``b[:b_stop]`` equal ``a[a_start:]``.

    Args:
        a: bytes of whole units.
        a_start: offset in bytes.
        b: bytes of whole units.
        b_stop: end in bytes.
        unit_bytes: width of the unit that counts, a multiple of 8; a page is a fine unit.

    Cost: O(bytes up to the first difference), in blocks that double.
    """
    stop = min(len(a) - a_start, b_stop) // unit_bytes * unit_bytes
    done, block = 0, 1024
    while done < stop:
        count = (min(block, stop - done)) // TOKEN_BYTES
        differs = np.frombuffer(a, np.int64, count, a_start + done) != np.frombuffer(
            b, np.int64, count, done
        )
        first = int(differs.argmax())
        if differs[first]:
            return (done + first * TOKEN_BYTES) // unit_bytes
        done += count * TOKEN_BYTES
        block *= 4
    return stop // unit_bytes


def _token_bytes(token_ids: Any) -> bytes:
    if isinstance(token_ids, bytes):
        if len(token_ids) % TOKEN_BYTES:
            raise ValueError(
                f"{len(token_ids)} bytes are not whole int64 tokens; pass a multiple of "
                f"{TOKEN_BYTES} bytes"
            )
        return token_ids
    if isinstance(token_ids, array) and token_ids.typecode == "q":
        return token_ids.tobytes()
    if isinstance(token_ids, (list, tuple, range)):
        try:
            return array("q", token_ids).tobytes()
        except (TypeError, OverflowError) as error:
            raise ValueError(f"token ids must be int64 integers: {error}") from None
    try:
        values = np.asarray(token_ids)
    except (TypeError, RuntimeError) as error:  # a tensor that NumPy can't hold
        raise ValueError(f"token ids must be int64 integers: {error}") from None
    if values.ndim != 1:
        raise ValueError(f"token ids have shape {values.shape}; pass one dimension")
    if values.size and values.dtype.kind not in "iu":
        raise ValueError(f"token ids have dtype {values.dtype}; pass integers")
    if values.dtype == np.uint64 and values.size and values.max() > np.iinfo(np.int64).max:
        raise ValueError(f"token id {int(values.max())} leaves int64")
    return values.astype(np.int64, copy=False).tobytes()


def _check_separator(value: Any, name: str) -> None:
    if value is None or type(value) in (str, bytes, int):
        return
    if type(value) is not tuple:
        raise ValueError(
            f"{name} has a {type(value).__name__}, {value!r}; pass None, a str, bytes, int or a "
            f"tuple of these"
        )
    for part in value:
        _check_separator(part, name)


def _pairs(data: bytes) -> bytes:
    tokens = np.frombuffer(data, dtype=np.int64)
    if len(tokens) < 2:
        return b""
    return np.stack([tokens[:-1], tokens[1:]], axis=1).tobytes()
