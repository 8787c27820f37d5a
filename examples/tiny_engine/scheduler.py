"""Plans prefill batches over a prefix cache: match, cut chunks, place, cache, preempt.

Batches overlap: the next one is planned while one is computed, before its pages are cached.

    compute  |  batch 0  |  batch 1  |  batch 2  |
    plan     0           1           2           3
    cache                0           1           2

What a batch in flight reads is locked or held, so planning the next one can't evict it. A request
in flight is in no other batch, and two that share an uncached prefix may both compute it: the
second insert then frees its duplicates. Every rank runs this file by itself, to the same state,
because nothing here depends on time or on the rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from alloc import PageIds, ceil_div
from radix import (
    ExtendAllocation,
    InsertParams,
    InsertResult,
    LockReceipt,
    NodeId,
    UnifiedRadixCache,
    alloc_for_extend,
)
from scratch import ScratchBudget


@dataclass(slots=True)
class Kv:
    """The KV fields of a request; see ``radix.params.ReqKv``."""

    req_pool_idx: int | None = None
    cache_protected_len: int = 0
    allocated_len: int = 0


@dataclass(slots=True, eq=False)
class Request:
    """One turn of a chat: the ``Req`` protocol, and what the engine needs to answer it.

    Attributes:
        chat: number of the chat.
        turn: number of the turn.
        answer_len: tokens to generate.
        answer: what was generated so far. Its KV is the decode pool's business, so that for the
            cache a request is its prompt, and ``output_ids`` stays empty.
        fill_len: tokens that have KV, or get it in the chunk being planned.
        decode_slots: where the rank-local decode pool keeps prompt and answer.
    """

    chat: int
    turn: int
    origin_input_ids: Sequence[int]
    answer_len: int
    answer: list[int] = field(default_factory=list)
    output_ids: Sequence[int] = ()
    fill_len: int = 0
    decode_slots: Any = None
    kv: Kv = field(default_factory=Kv)
    extra_key: None = None
    cache_salt: None = None
    prefix_indices: Any = ()
    last_node: NodeId | None = None
    lock_receipt: LockReceipt | None = None
    priority: int = 0
    kv_rotation_base: int | None = None
    kv_rotation_lease: Any = None

    @property
    def prompt_len(self) -> int:
        """Tokens to prefill."""
        return len(self.origin_input_ids)

    @property
    def is_started(self) -> bool:
        """Whether it holds a row, and pages in it."""
        return self.kv.req_pool_idx is not None

    def get_fill_ids(self) -> Sequence[int]:
        """Return the tokens that have KV, up to the chunk being planned."""
        return self.origin_input_ids[: self.fill_len]


@dataclass(slots=True)
class Stats:
    """What the scheduler counted. Tokens are prompt tokens unless said otherwise.

    Attributes:
        prompt_tokens: of all requests.
        computed_tokens: went through the model, preempted work included.
        evicted_pages: left the cache to make room.
        declined_inserts: refused because their rotation base was not their chain's.
        preemptions: started requests that gave up their pages to others.
        batches: prefill batches.
        overlapped_batches: planned before the insert of the batch before them.
    """

    prompt_tokens: int = 0
    computed_tokens: int = 0
    evicted_pages: int = 0
    declined_inserts: int = 0
    preemptions: int = 0
    batches: int = 0
    overlapped_batches: int = 0

    @property
    def saved_tokens(self) -> int:
        """Prompt tokens that did not have to be computed; below 0 if preemptions cost more."""
        return self.prompt_tokens - self.computed_tokens


class CountingCache(UnifiedRadixCache):
    """The cache, counting the inserts that it declined."""

    declined_inserts = 0

    def insert(self, params: InsertParams) -> InsertResult:
        """Insert, and count a decline."""
        result = super().insert(params)
        self.declined_inserts += result.rotation_tail_declined
        return result


@dataclass(frozen=True, slots=True, eq=False)
class PrefillBatch:
    """The next chunk of some requests.

    Attributes:
        reqs: the requests.
        new_slots: int64[n] slots of their new tokens, in batch order.
        prefix_lens: of each, the tokens that have KV already; whole pages.
        seq_lens: of each, the tokens that have KV afterwards.
    """

    reqs: list[Request]
    new_slots: Any
    prefix_lens: list[int]
    seq_lens: list[int]

    @property
    def num_new_tokens(self) -> int:
        """Tokens to compute."""
        return sum(self.seq_lens) - sum(self.prefix_lens)


class Scheduler:
    """Owns the queue of requests that are to be prefilled, and the cache.

    Args:
        cache: the cache with its request rows and allocator.
        chunk_tokens: new tokens of a batch, in whole pages.
        max_batch: requests of a batch.
        budget: the scratch of a sharded pool; None unsharded.
    """

    def __init__(
        self,
        cache: CountingCache,
        *,
        chunk_tokens: int,
        max_batch: int,
        budget: ScratchBudget | None,
    ) -> None:
        self.cache = cache
        self.stats = Stats()
        self.waiting: deque[Request] = deque()
        self.in_flight: list[PrefillBatch] = []
        self._chunk_tokens = chunk_tokens
        self._max_batch = max_batch
        self._budget = budget

    def add(self, req: Request) -> None:
        """Queue a request."""
        self.waiting.append(req)
        self.stats.prompt_tokens += req.prompt_len

    def live(self) -> list[Request]:
        """Return the requests that may hold locks or pages."""
        return [*self.waiting, *(req for batch in self.in_flight for req in batch.reqs)]

    # Plan

    def plan(self) -> PrefillBatch | None:
        """Match, cut and place the next batch; None if nothing waits or nothing fits yet.

        Raises:
            RuntimeError: a request doesn't fit a pool that it has to itself.
        """
        while self.waiting:
            reqs = self._choose()
            placed = self._place(reqs)
            if placed is not None:
                return self._launch(reqs, placed)
            if self.in_flight:
                return None
            self._preempt()
        return None

    def _choose(self) -> list[Request]:
        """Return requests from the queue's front with their next chunks, within the limits."""
        chosen: list[Request] = []
        room = self._chunk_tokens
        for req in self.waiting:
            if not room or len(chosen) == self._max_batch:
                break
            if not req.is_started:
                req.fill_len = req.prompt_len
                self.cache.match_req(req)
            start = len(req.prefix_indices)
            req.fill_len = chunk_end(start, req.prompt_len, room, self.cache.page_size)
            if not self._fits_scratch([*chosen, req]):
                self._hold_back(req)
                break
            room -= ceil_div(req.fill_len - start, self.cache.page_size) * self.cache.page_size
            chosen.append(req)
        return chosen

    def _fits_scratch(self, reqs: Sequence[Request]) -> bool:
        """Say whether the scratch of a sharded pool holds a batch's prefixes and chunks."""
        if self._budget is None:
            return True
        prefix_pages = [self._prefix_pages(req) for req in reqs]
        return self._budget.fits_pages(prefix_pages, [req.fill_len for req in reqs])

    def _prefix_pages(self, req: Request) -> PageIds:
        """Return the pages of the tokens that have KV already."""
        if req.kv.req_pool_idx is not None:
            return self.cache.pool().pages(req.kv.req_pool_idx, 0, len(req.prefix_indices))
        assert req.last_node is not None, "a request without a row has been matched"
        return self.cache.tree_core.path_pages(req.last_node)

    def _place(self, reqs: list[Request]) -> ExtendAllocation | None:
        """Give a batch its pages; requests at its end that don't fit the pool are left out."""
        while reqs:
            placed = alloc_for_extend(self.cache, reqs)
            if placed is not None:
                return placed
            self._hold_back(reqs.pop())
        return None

    def _launch(self, reqs: list[Request], placed: ExtendAllocation) -> PrefillBatch:
        for _ in reqs:
            self.waiting.popleft()
        batch = PrefillBatch(
            reqs,
            placed.out_cache_loc,
            [len(req.prefix_indices) for req in reqs],
            [req.fill_len for req in reqs],
        )
        self.stats.batches += 1
        self.stats.overlapped_batches += bool(self.in_flight)
        self.stats.computed_tokens += batch.num_new_tokens
        self.stats.evicted_pages += placed.num_tokens_evicted // self.cache.page_size
        self.in_flight.append(batch)
        return batch

    def _hold_back(self, req: Request) -> None:
        """Leave a request in the queue; one without pages must not keep its prefix locked."""
        if not req.is_started:
            self.cache.retract(req)

    def _preempt(self) -> None:
        """Take the pages of the started request that is last in the queue."""
        started = [req for req in self.waiting if req.is_started and req is not self.waiting[0]]
        if not started:
            raise RuntimeError(
                f"a prompt of {self.waiting[0].prompt_len} tokens doesn't fit the pool or the "
                f"scratch; make them larger"
            )
        self.cache.retract(started[-1])
        self.stats.preemptions += 1

    # Cache

    def complete(self, batch: PrefillBatch) -> list[Request]:
        """Cache a batch that has been computed; requests with chunks to come go to the front.

        Returns:
            The requests whose prompts are done: they hold nothing here any more.
        """
        self.in_flight.remove(batch)
        going_on: list[Request] = []
        done: list[Request] = []
        for req in batch.reqs:
            if req.fill_len < req.prompt_len:
                self.cache.cache_unfinished_req(req)
                going_on.append(req)
            else:
                self._finish(req)
                done.append(req)
        self.waiting.extendleft(reversed(going_on))
        self.stats.declined_inserts = self.cache.declined_inserts
        return done

    def _finish(self, req: Request) -> None:
        """Cache a prompt's whole pages and give back everything else, its row too."""
        self.cache.cache_finished_req(req)
        assert req.kv.req_pool_idx is not None, "a request in flight has a row"
        self.cache.pool().free(req.kv.req_pool_idx)
        req.kv.req_pool_idx = None


def chunk_end(start: int, stop: int, room: int, page_size: int) -> int:
    """Return where a chunk from ``start`` ends: at ``stop``, or at the last page that fits.

    A sharded pool takes whole pages, all but a prompt's last one.

    >>> chunk_end(16, 50, 64, page_size=8), chunk_end(16, 50, 24, page_size=8)
    (50, 40)
    """
    return stop if stop - start <= room else (start + room) // page_size * page_size
