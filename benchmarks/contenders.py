"""One cache behind the few operations that the tree benchmark times.

``Ours`` drives the library; ``benchmarks.peers`` has the same for an engine that is installed.
"""

from __future__ import annotations

from array import array
from typing import Any, Protocol

import numpy as np

from alloc import IntArray, PagedTokenToKVPoolAllocator
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    RadixKey,
    UnifiedRadixCache,
)


class Contender(Protocol):
    """A prefix cache over a pool. One request at a time goes through the calls in this order."""

    name: str

    def key(self, tokens: array[int]) -> None:
        """Make a prompt's key."""

    def match(self) -> int:
        """Match the key; returns the tokens that were found."""

    def lock(self) -> None:
        """Lock what was matched."""

    def indices(self) -> int:
        """Put together the pages or slots of the match; returns their number."""

    def room(self, tokens: int) -> bool:
        """Say whether the pool has this many free slots."""

    def evict(self, tokens: int) -> None:
        """Evict at least this much."""

    def alloc(self, tokens: int) -> None:
        """Take pages for the rest of the prompt, whole pages."""

    def prepare_insert(self) -> None:
        """Put together what the insert is given; not timed."""

    def insert(self) -> None:
        """Insert the whole pages of the prompt."""

    def unlock(self) -> None:
        """Give the lock back."""


class Ours:
    """The library.

    Args:
        pool_tokens: size of the pool.
        page_size: tokens of a page.
        use_handle: insert from the match's handle, else from the root.
        fused: match and lock in one operation, counted as ``match``.
        policy: eviction policy.
    """

    def __init__(
        self,
        pool_tokens: int,
        page_size: int,
        *,
        use_handle: bool = True,
        fused: bool = False,
    ) -> None:
        self.name = "ours" if use_handle else "ours, from root"
        self.page_size = page_size
        size = pool_tokens // page_size * page_size
        self.pool = PagedTokenToKVPoolAllocator(
            size, page_size, dtype=None, device=None, kvcache=None
        )
        self.cache = UnifiedRadixCache(CacheInitParams(False, None, self.pool, page_size))
        self.use_handle = use_handle
        self.fused = fused
        self._params: Any = None
        self._match: Any = None
        self._receipt: Any = None
        self._key: Any = None
        self._new: IntArray = np.empty(0, dtype=np.int64)

    def key(self, tokens: array[int]) -> None:
        """Copy the tokens into a key."""
        self._key = RadixKey(tokens)

    def match(self) -> int:
        """Match."""
        params = MatchPrefixParams(self._key)
        if self.fused:
            match = self._match = self.cache.match_and_lock(params)
        else:
            match = self._match = self.cache.match_prefix(params)
        return match.device_prefix_len

    def lock(self) -> None:
        """Lock what was matched."""
        if self.fused:
            self._receipt = self._match.receipt
        else:
            self._receipt = self.cache.inc_lock_ref(self._match.last_device_node)

    def indices(self) -> int:
        """Put together page ids."""
        return len(self._match.pages)

    def room(self, tokens: int) -> bool:
        """Say whether the pool has this many free slots."""
        return tokens <= self.pool.available_size()

    def evict(self, tokens: int) -> None:
        """Evict."""
        self.cache.evict(EvictParams(tokens))

    def alloc(self, tokens: int) -> None:
        """Take page ids."""
        pages = self.pool.alloc_pages(tokens // self.page_size)
        assert pages is not None, "the caller made room"
        self._new = pages

    def prepare_insert(self) -> None:
        """Join the matched and the new page ids, as a request's row does."""
        self._params = InsertParams(
            self._key,
            pages=np.concatenate([self._match.pages, self._new]),
            handle=self._match.handle if self.use_handle else None,
        )

    def insert(self) -> None:
        """Insert page ids."""
        self.cache.insert(self._params)

    def unlock(self) -> None:
        """Give the lock back."""
        self.cache.dec_lock_ref(self._receipt)
