"""What one replay found: counters with units, nothing that needs the cache any more."""

from __future__ import annotations

from dataclasses import dataclass

from replay.hits import HitCount


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a run over the ranks of a group found besides its hits.

    Attributes:
        ranks: Ranks that share the pool; 1 where each holds a copy of it.
        skew_pages: Sum over the requests of the class skew after the placement: free pages of the
            rank with most, less those of the rank with fewest.
        max_skew_pages: The highest of them.
        evictions: Placements that had to evict.
        stranded_pages: Sum over those placements of the free pages, just before, that no chain
            could draw: all free pages less the floor, ranks times those of the fullest rank.
        max_stranded_pages: The highest of them.
        declined_inserts: Inserts that the tree refused for another base.
        declined_tokens: Prompt tokens that were computed and not cached because of that.
        prefix_pages: Cached pages that all requests together started with.
        block_pages: Sum over the requests of the most such pages on one rank; a gather moves
            `ranks` blocks of that size.
        waits: Times that a request had to wait for the oldest in flight to finish.
        cut_requests: Requests longer than the pool, of which only the leading pages fitted.
    """

    ranks: int
    skew_pages: int
    max_skew_pages: int
    evictions: int
    stranded_pages: int
    max_stranded_pages: int
    declined_inserts: int
    declined_tokens: int
    prefix_pages: int
    block_pages: int
    waits: int
    cut_requests: int

    @property
    def mean_stranded_pages(self) -> float:
        """Stranded pages of a placement that had to evict, on average."""
        return self.stranded_pages / self.evictions if self.evictions else 0.0

    @property
    def gather_overhead(self) -> float:
        """Pages that gathers move over the pages they are for; 1.0 is even, or no prefix."""
        return self.block_pages * self.ranks / self.prefix_pages if self.prefix_pages else 1.0


@dataclass(frozen=True, slots=True)
class Result:
    """Counters of one run at one capacity.

    Attributes:
        capacity_pages: Pages of the pool, without reserved ones; of one rank where ranks share it.
        page_size: Tokens in a page.
        requests: Requests replayed.
        input_tokens: Prompt tokens of all requests.
        hit: Hits over their denominator, by the run's definition.
        evicted_pages: Pages taken from the cache to make room.
        peak_pages: Most pages in use at once.
        replay_ns: Nanoseconds spent in tree and allocator; reading the trace is apart.
        sharding: What a run with `--shards` found besides; None without.
    """

    capacity_pages: int
    page_size: int
    requests: int
    input_tokens: int
    hit: HitCount
    evicted_pages: int
    peak_pages: int
    replay_ns: int
    sharding: Sharding | None = None

    @property
    def capacity_tokens(self) -> int:
        """Capacity in tokens."""
        return self.capacity_pages * self.page_size

    @property
    def seconds(self) -> float:
        """Seconds spent in tree and allocator."""
        return self.replay_ns / 1e9

    @property
    def requests_per_second(self) -> float:
        """Requests per second of `seconds`."""
        return self.requests / self.seconds if self.replay_ns else 0.0


@dataclass(frozen=True, slots=True)
class Definition:
    """What a hit rate means: without it the number says nothing.

    Attributes:
        hit: `D1` to `D5`.
        meaning: The definition in words.
        unit: Unit of numerator and denominator.
        page_size: Tokens in a page.
        policy: Eviction policy.
        in_flight: Requests that overlap; 1 is one after the other.
    """

    hit: str
    meaning: str
    unit: str
    page_size: int
    policy: str
    in_flight: int = 1

    def describe(self) -> str:
        """Return denominator, tail rule, warm-up, order and policy in one line."""
        order = "one request at a time"
        if self.in_flight > 1:
            order = f"{self.in_flight} requests in flight"
        return (
            f"hit {self.hit}: {self.meaning}; page {self.page_size}; cold start, no warm-up; "
            f"file order, {order}; {self.policy}; outputs not cached"
        )
