"""One cache of one capacity, fed requests: the real tree on the real allocator, in host mode.

A request is served in the order that makes LRU exact: match and lock, evict exactly the
shortfall, allocate, insert, unlock. Outputs are not inserted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from alloc import PagedTokenToKVPoolAllocator
from radix import (
    CacheInitParams,
    EvictParams,
    InsertParams,
    MatchPrefixParams,
    MatchResult,
    RadixKey,
    UnifiedRadixCache,
)
from radix.scheduling import Evicts
from replay.hits import make_counter
from replay.result import Result, Tiering


@dataclass(frozen=True, slots=True)
class RunConfig:
    """One run.

    Attributes:
        capacity_pages: Pages of the pool, without reserved ones.
        page_size: Tokens in a page.
        tree_page_size: Units of the tree in a page.
        policy: Eviction policy of the tree.
        definition: Hit definition, `D1` to `D5`.
    """

    capacity_pages: int
    page_size: int
    tree_page_size: int
    policy: str = "lru"
    definition: str = "D2"


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request ready for any number of caches.

    Attributes:
        key: Its units.
        pages: Its pages that can be cached and hold prompt tokens.
        input_length: Prompt tokens.
    """

    key: RadixKey
    pages: int
    input_length: int


class Driver:
    """Feeds one cache and counts.

    Args:
        config: The run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        ps = config.tree_page_size
        self._allocator = PagedTokenToKVPoolAllocator(
            config.capacity_pages * ps,
            ps,
            dtype=None,
            device=None,
            kvcache=None,
            need_sort=False,
        )
        self._cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=None,
                token_to_kv_pool_allocator=self._allocator,
                page_size=ps,
                eviction_policy=config.policy,
            )
        )
        self._evicts: Evicts = self._cache
        self._counter = make_counter(config.definition, config.page_size)
        self._requests = 0
        self._input_tokens = 0
        self._evicted = 0
        self._peak = 0
        self._nanoseconds = 0

    def feed(self, prompts: Sequence[Prompt]) -> None:
        """Serve prompts in order.

        Cost: O(pages of the prompts), whatever the capacity.
        """
        start = perf_counter_ns()
        for prompt in prompts:
            cached = self._serve(prompt.key)
            self._record(min(cached, prompt.pages), prompt.pages, prompt.input_length)
            self._input_tokens += prompt.input_length
        self._requests += len(prompts)
        self._nanoseconds += perf_counter_ns() - start

    def _record(self, cached: int, pages: int, input_length: int) -> None:
        """Count one request, of whose pages the first ones were cached."""
        self._counter.record(cached, pages, input_length)

    def _cut(self, key: RadixKey) -> RadixKey:
        """Keep the leading pages of a key longer than the pool: its tail would be evicted first."""
        ps, capacity = self._config.tree_page_size, self._config.capacity_pages
        return key[: capacity * ps] if len(key) // ps > capacity else key

    def _serve(self, key: RadixKey) -> int:
        """Serve one key and return how many of its leading pages were cached."""
        ps = self._config.tree_page_size
        key = self._cut(key)
        pages = len(key) // ps
        match = self._cache.match_and_lock(MatchPrefixParams(key=key))
        cached = match.device_prefix_len // ps
        if cached < pages:
            self._extend(key, match, pages - cached)
        assert match.receipt is not None, "match_and_lock always locks"
        self._cache.dec_lock_ref(match.receipt)
        return cached

    def _extend(self, key: RadixKey, match: MatchResult, missing: int) -> None:
        """Make room for the missing pages and insert the whole key."""
        ps = self._config.tree_page_size
        free = self._allocator.available_size() // ps
        if free < missing:
            evicted = self._evicts.evict(EvictParams(num_tokens=(missing - free) * ps))
            num_evicted = evicted.num_tokens_evicted // ps
            self._evicted += num_evicted
            free += num_evicted
        fresh = self._allocator.alloc_pages(missing)
        assert fresh is not None, "everything but the locked path can be evicted"
        self._peak = max(self._peak, self._config.capacity_pages - free + missing)
        pages = np.concatenate([match.pages, fresh])
        self._cache.insert(InsertParams(key=key, pages=pages, handle=match.handle))

    def drain(self) -> None:
        """Finish the requests in flight: none, since each is served at once."""

    def check_invariants(self) -> None:
        """Check tree and allocator against each other.

        Raises:
            RuntimeError: Naming the first rule that is broken.
        """
        self._cache.check_invariants()

    def result(self) -> Result:
        """Return the counters so far."""
        return self._result()

    def _result(self, tiering: Tiering | None = None) -> Result:
        return Result(
            capacity_pages=self._config.capacity_pages,
            page_size=self._config.page_size,
            requests=self._requests,
            input_tokens=self._input_tokens,
            hit=self._counter.count(),
            evicted_pages=self._evicted,
            peak_pages=self._peak,
            replay_ns=self._nanoseconds,
            tiering=tiering,
        )
