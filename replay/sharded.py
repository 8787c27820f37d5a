"""One pool of N ranks of one capacity, fed requests that overlap: the calls that a scheduler makes.

A request is matched and locked, placed, and inserted; up to K requests are placed and not inserted
yet. They finish in file order, the oldest before the next is planned:

    K = 3    plan 0 | plan 1 | plan 2 | insert 0, plan 3 | insert 1, plan 4 | ...

K = 1 is the sequential order, and with one rank that gives the hits of ``replay.driver``. Requests
go through ``match_req``, ``alloc_for_extend`` and ``cache_finished_req``, so that bases, leases,
seams, owner lanes and aimed eviction are those of a serving engine and not a copy of them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any

from alloc import IntArray, ReqToTokenPool
from radix import (
    CacheInitParams,
    ExtendAllocation,
    LockReceipt,
    NodeId,
    UnifiedRadixCache,
    alloc_for_extend,
    preview_extend,
)
from replay.driver import Prompt, RunConfig
from replay.hits import make_counter
from replay.layouts import pool_layout
from replay.result import Result, Sharding
from replay.schedule import Schedule

FIRST_ROW_PAGES = 1024
"""Pages that a request row has room for at first; longer requests make the rows longer."""


@dataclass(slots=True)
class _Kv:
    """The KV fields of a request."""

    req_pool_idx: int | None = None
    cache_protected_len: int = 0


@dataclass(slots=True, eq=False)
class ShardedRequest:
    """A prompt on its way through the scheduler's calls: the ``Req`` protocol, and what it found.

    Attributes:
        from_host: Cached pages that were loaded for it from the host.
        from_disk: Cached pages that were loaded for it from the disk.
    """

    prompt: Prompt
    origin_input_ids: Any
    output_ids: Sequence[int] = ()
    kv: _Kv = field(default_factory=_Kv)
    extra_key: None = None
    cache_salt: None = None
    prefix_indices: Any = None
    last_node: NodeId | None = None
    lock_receipt: LockReceipt | None = None
    priority: int = 0
    kv_rotation_base: int | None = None
    kv_rotation_lease: Any = None
    from_host: int = 0
    from_disk: int = 0

    def get_fill_ids(self) -> Any:
        """Return all tokens: a prompt is one chunk."""
        return self.origin_input_ids


@dataclass(slots=True)
class _Spread:
    """Sum and maximum of one figure."""

    count: int = 0
    total: int = 0
    highest: int = 0

    def add(self, value: int) -> None:
        """Take one more value into account."""
        self.count += 1
        self.total += value
        self.highest = max(self.highest, value)


class ShardedDriver:
    """Feeds one pool of N ranks and counts.

    Args:
        config: The run; its capacity is one rank's.
        schedule: Ranks, and how requests overlap and are placed.
    """

    def __init__(self, config: RunConfig, schedule: Schedule) -> None:
        self._config = config
        self._ranks = schedule.ranks
        self._schedule = schedule
        self._page = config.tree_page_size
        self._pool_layout = pool_layout(schedule)
        self._allocator = self._pool_layout.make_allocator(config)
        self._cache = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self._make_rows(FIRST_ROW_PAGES),
                token_to_kv_pool_allocator=self._allocator,
                page_size=self._page,
                eviction_policy=config.policy,
                rotation=schedule.rotation,
                use_leases=schedule.use_leases,
                aimed_eviction=schedule.aimed_eviction,
            )
        )
        self._flying: deque[ShardedRequest] = deque()
        self._counter = make_counter(config.definition, config.page_size)
        self._requests = self._input_tokens = self._evicted = self._peak = self._nanoseconds = 0
        self._skew, self._stranded = _Spread(), _Spread()
        self._free = 0
        self._prefix_pages = self._block_pages = 0
        self._declined_inserts = self._declined_tokens = self._waits = self._cut = 0

    @property
    def cache(self) -> UnifiedRadixCache:
        """The cache that is fed."""
        return self._cache

    def feed(self, prompts: Sequence[Prompt]) -> None:
        """Serve prompts in order; the last ones stay in flight.

        Cost: O(pages of the prompts), whatever the capacity.
        """
        start = perf_counter_ns()
        for prompt in prompts:
            if len(self._flying) == self._schedule.in_flight:
                self._finish_oldest()
            self._plan(prompt)
            self._input_tokens += prompt.input_length
        self._requests += len(prompts)
        self._nanoseconds += perf_counter_ns() - start

    def drain(self) -> None:
        """Finish the requests in flight."""
        start = perf_counter_ns()
        while self._flying:
            self._finish_oldest()
        self._nanoseconds += perf_counter_ns() - start

    def _plan(self, prompt: Prompt) -> None:
        """Match, lock and place a prompt.

        Where it doesn't fit beside what is locked, the oldest in flight finishes first. Where it
        doesn't fit a pool with nothing in flight, its leading pages that fit are served.
        """
        request = self._request(prompt)
        while True:
            cached = self._match(request)
            free = self._allocator.free_list.counts()
            placed = self._place(request)
            if placed is not None:
                break
            if self._flying:
                self._waits += 1
                self._finish_oldest()
            else:
                self._cut += 1
                self._cut_to_fit(request)
        self._flying.append(request)
        pages = cached // self._page
        self._record(request, pages)
        self._count_placement(placed, free)
        self._count_prefix(request, pages)

    def _match(self, request: ShardedRequest) -> int:
        """Match and lock all of a request; returns the units that were cached."""
        return self._cache.match_req(request, max_prefix_len=len(request.origin_input_ids))

    def _place(self, request: ShardedRequest) -> ExtendAllocation | None:
        """Make room for a request and draw its pages; None where it doesn't fit."""
        return alloc_for_extend(self._cache, [request], page_owners=self._owners(request))

    def _record(self, request: ShardedRequest, cached: int) -> None:
        """Count a request of which so many leading pages were cached."""
        prompt = request.prompt
        self._counter.record(min(cached, prompt.pages), prompt.pages, prompt.input_length)

    def _owners(self, request: ShardedRequest) -> list[IntArray] | None:
        """Return where a prefill of what is not cached puts its pages; None without owner lanes."""
        cached, units = len(request.prefix_indices), len(request.origin_input_ids)
        owners = self._pool_layout.owners(cached, units)
        return None if owners is None else [owners]

    def _request(self, prompt: Prompt) -> ShardedRequest:
        """Return the request of a prompt's whole pages, as many as the pool has."""
        limit = self._config.capacity_pages * self._ranks
        pages = min(len(prompt.key) // self._page, limit)
        if pages * self._page > self._cache.pool().max_context_len:
            self._lengthen_rows(pages)
        return ShardedRequest(prompt, prompt.key.tokens()[: pages * self._page])

    def _cut_to_fit(self, request: ShardedRequest) -> None:
        """Keep the leading pages of a request that fit beside nothing but its own prefix."""
        need = preview_extend(self._cache, [request], page_owners=self._owners(request))
        room = need.free_by_class + need.evictable_by_class
        prefix = len(request.prefix_indices) // self._page
        fits = self._pool_layout.num_fitting(room, need, prefix)
        request.origin_input_ids = request.origin_input_ids[: (prefix + fits) * self._page]

    def _finish_oldest(self) -> None:
        """Insert the oldest request in flight, and give back its lock and row."""
        request = self._flying.popleft()
        cache = self._cache
        inserted = cache.cache_finished_req(request)
        if inserted is not None and inserted.rotation_tail_declined:
            self._declined_inserts += 1
            self._declined_tokens += self._tokens(request, len(request.origin_input_ids))
            self._declined_tokens -= self._tokens(request, inserted.prefix_len)
        row = request.kv.req_pool_idx
        assert row is not None, "a request in flight has a row"
        cache.pool().free(row)

    def _tokens(self, request: ShardedRequest, units: int) -> int:
        """Return the prompt tokens in the first units of a request."""
        return min(units // self._page * self._config.page_size, request.prompt.input_length)

    def _count_placement(self, placed: ExtendAllocation, before: IntArray) -> None:
        after = self._allocator.free_list.counts()
        self._skew.add(int(after.max() - after.min()))
        self._peak = max(self._peak, self._allocator.layout.capacity_pages - int(after.sum()))
        if placed.num_tokens_evicted:
            self._evicted += placed.num_tokens_evicted // self._page
            self._free += int(before.sum())
            self._stranded.add(int(before.sum() - before.min() * self._ranks))

    def _count_prefix(self, request: ShardedRequest, pages: int) -> None:
        """Count what a gather of the cached prefix would move: the largest rank sets the block."""
        self._prefix_pages += pages
        if self._ranks == 1 or not pages:
            self._block_pages += pages
            return
        ids = request.prefix_indices[:: self._page] // self._page
        self._block_pages += int(self._allocator.layout.count_classes(ids).max())

    def _make_rows(self, pages: int) -> ReqToTokenPool:
        return ReqToTokenPool(
            self._schedule.in_flight, pages * self._page, None, page_size=self._page
        )

    def _lengthen_rows(self, pages: int) -> None:
        """Move the requests in flight to rows of twice the pages needed now."""
        old, new = self._cache.pool(), self._make_rows(2 * pages)
        for request in self._flying:
            row, fresh = request.kv.req_pool_idx, new.alloc(1)
            assert row is not None, "a request in flight has a row"
            assert fresh is not None, "there is a row for each request in flight"
            new.write(fresh[0], 0, pages=old.pages(row, 0, old.mirrored_len(row)))
            request.kv.req_pool_idx = fresh[0]
        self._cache.req_to_token_pool = new

    def check_invariants(self) -> None:
        """Check tree, allocator and the requests in flight against each other.

        Raises:
            RuntimeError: Naming the rules that are broken.
        """
        self._cache.check_invariants(self._flying)

    def result(self) -> Result:
        """Return the counters so far; ``drain`` first to count every insert."""
        return Result(
            capacity_pages=self._config.capacity_pages,
            page_size=self._config.page_size,
            requests=self._requests,
            input_tokens=self._input_tokens,
            hit=self._counter.count(),
            evicted_pages=self._evicted,
            peak_pages=self._peak,
            replay_ns=self._nanoseconds,
            sharding=Sharding(
                schedule=self._schedule,
                placements=self._skew.count,
                skew_pages=self._skew.total,
                max_skew_pages=self._skew.highest,
                evictions=self._stranded.count,
                free_pages=self._free,
                stranded_pages=self._stranded.total,
                max_stranded_pages=self._stranded.highest,
                declined_inserts=self._declined_inserts,
                declined_tokens=self._declined_tokens,
                prefix_pages=self._prefix_pages,
                block_pages=self._block_pages,
                waits=self._waits,
                cut_requests=self._cut,
            ),
        )
