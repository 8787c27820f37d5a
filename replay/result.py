"""What one replay found: counters with units, nothing that needs the cache any more."""

from __future__ import annotations

from dataclasses import dataclass

from replay.hits import HitCount
from replay.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Sharding:
    """What a run over the ranks of a group found besides its hits.

    Attributes:
        schedule: How many ranks, and how they served.
        placements: Requests that got their pages.
        skew_pages: Sum over the placements of the class skew just after: free pages of the rank
            with most, less those of the rank with fewest.
        max_skew_pages: The highest of them.
        evictions: Placements that had to evict.
        free_pages: Sum over those placements of the free pages just before, the aggregate.
        stranded_pages: Sum over those placements of the free pages that no chain could draw: the
            aggregate less the floor, which is ranks times the free pages of the fullest rank.
        max_stranded_pages: The highest of them.
        declined_inserts: Inserts that the tree refused for another base.
        declined_tokens: Prompt tokens that were computed and not cached because of that.
        prefix_pages: Cached pages that all requests together started with.
        block_pages: Sum over the requests of the most such pages on one rank; a gather moves
            `ranks` blocks of that size.
        waits: Times that a request had to wait for the oldest in flight to finish.
        cut_requests: Requests longer than the pool, of which only the leading pages fitted.
    """

    schedule: Schedule
    placements: int
    skew_pages: int
    max_skew_pages: int
    evictions: int
    free_pages: int
    stranded_pages: int
    max_stranded_pages: int
    declined_inserts: int
    declined_tokens: int
    prefix_pages: int
    block_pages: int
    waits: int
    cut_requests: int

    @property
    def mean_skew_pages(self) -> float:
        """Class skew after a placement, on average."""
        return self.skew_pages / self.placements if self.placements else 0.0

    @property
    def mean_stranded_pages(self) -> float:
        """Stranded pages of a placement that had to evict, on average."""
        return self.stranded_pages / self.evictions if self.evictions else 0.0

    @property
    def gather_overhead(self) -> float:
        """Pages that gathers move over the pages they are for; 1.0 is even, or no prefix."""
        if not self.prefix_pages:
            return 1.0
        return self.block_pages * self.schedule.ranks / self.prefix_pages


@dataclass(frozen=True, slots=True)
class Tiering:
    """What a run with tiers below the device found besides its hits, which are all tiers' sum.

    Attributes:
        host_pages: Pages of the host tier.
        disk_pages: Pages of the disk tier; 0 for none.
        device_hits: Hits in the pool itself, in the unit of the run's definition.
        host_hits: Hits that were loaded back from the host.
        disk_hits: Hits that came from the disk.
        loaded_pages: Pages copied back to the device.
        stored_pages: Pages copied to the host.
        dropped_pages: Pages evicted from the device that the host could not take.
        host_evicted_pages: Pages that the host evicted.
        fetched_pages: Pages that came back from the disk.
    """

    host_pages: int
    disk_pages: int
    device_hits: int
    host_hits: int
    disk_hits: int
    loaded_pages: int
    stored_pages: int
    dropped_pages: int
    host_evicted_pages: int
    fetched_pages: int


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
        tiering: What a run with `--host-capacity` found besides; None without.
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
    tiering: Tiering | None = None

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
        schedules: How ranks served; none without `--shards`.
    """

    hit: str
    meaning: str
    unit: str
    page_size: int
    policy: str
    schedules: tuple[Schedule, ...] = ()

    def describe(self) -> str:
        """Return denominator, tail rule, warm-up, order and policy in one line."""
        return (
            f"hit {self.hit}: {self.meaning}; page {self.page_size}; cold start, no warm-up; "
            f"file order, {self._order()}; {self.policy}; outputs not cached"
        )

    def _order(self) -> str:
        overlaps = dict.fromkeys(schedule.in_flight for schedule in self.schedules)
        if set(overlaps) <= {1}:
            return "one request at a time"
        return f"{' or '.join(map(str, overlaps))} requests in flight"
