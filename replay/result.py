"""What one replay found: counters with units, nothing that needs the cache any more."""

from __future__ import annotations

from dataclasses import dataclass

from replay.hits import HitCount


@dataclass(frozen=True, slots=True)
class Result:
    """Counters of one run at one capacity.

    Attributes:
        capacity_pages: Pages of the pool, without reserved ones.
        page_size: Tokens in a page.
        requests: Requests replayed.
        input_tokens: Prompt tokens of all requests.
        hit: Hits over their denominator, by the run's definition.
        evicted_pages: Pages taken from the cache to make room.
        peak_pages: Most pages in use at once.
        replay_ns: Nanoseconds spent in tree and allocator; reading the trace is apart.
    """

    capacity_pages: int
    page_size: int
    requests: int
    input_tokens: int
    hit: HitCount
    evicted_pages: int
    peak_pages: int
    replay_ns: int

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
    """

    hit: str
    meaning: str
    unit: str
    page_size: int
    policy: str

    def describe(self) -> str:
        """Return denominator, tail rule, warm-up, order and policy in one line."""
        return (
            f"hit {self.hit}: {self.meaning}; page {self.page_size}; cold start, no warm-up; "
            f"file order, one request at a time; {self.policy}; outputs not cached"
        )
