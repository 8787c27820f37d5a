"""A pool of N ranks with copies below it: each rank keeps copies of the pages that lie on it."""

from __future__ import annotations

from dataclasses import replace

from radix import ExtendAllocation
from replay.driver import RunConfig
from replay.result import Result
from replay.schedule import Schedule
from replay.sharded import ShardedDriver, ShardedRequest
from replay.tiered import TierHits, TierPages, tiers_below


class TieredShardedDriver(ShardedDriver):
    """Feeds one pool of N ranks with tiers below it, and counts by tier.

    Args:
        config: The run; its capacity is one rank's.
        schedule: Ranks, and how requests overlap and are placed.
        pages: The tiers below, of one rank.
    """

    def __init__(self, config: RunConfig, schedule: Schedule, pages: TierPages) -> None:
        super().__init__(config, schedule)
        self._pages = pages
        self._tiered = tiers_below(self._cache, pages, config.policy)
        self._tier_hits = TierHits(config.definition, config.page_size)

    def _match(self, request: ShardedRequest) -> int:
        """Match all of a request, and load what the tiers below have past the device."""
        tiered = self._tiered
        before = tiered.counters.loaded, tiered.counters.missed, tiered.host.counters.fetched
        cached = tiered.match_req(request, max_prefix_len=len(request.origin_input_ids))
        loaded = tiered.counters.loaded - before[0]
        missed = tiered.counters.missed - before[1]
        # What came from the disk ends the run that the host then had; its tail may be missed.
        fetched = tiered.host.counters.fetched - before[2]
        from_disk = max(0, min(fetched, loaded + missed) - missed)
        request.from_host += loaded - from_disk
        request.from_disk += from_disk
        return cached

    def _place(self, request: ShardedRequest) -> ExtendAllocation | None:
        """Make room for a request, copying what has to go, and draw its pages: one step."""
        placed = self._tiered.alloc_for_extend([request], page_owners=self._owners(request))
        self._tiered.poll()
        return placed

    def _record(self, request: ShardedRequest, cached: int) -> None:
        """Count a request for all tiers together, for the upper two, and for the device."""
        super()._record(request, cached)
        upper = max(0, cached - request.from_disk)
        on_device = max(0, upper - request.from_host)
        prompt = request.prompt
        self._tier_hits.record(on_device, upper, prompt.pages, prompt.input_length)

    def check_invariants(self) -> None:
        """Check every tier and the requests in flight.

        Raises:
            RuntimeError: Naming the rules that are broken.
        """
        self._tiered.check_invariants(self._flying)

    def result(self) -> Result:
        """Return the counters so far; ``drain`` first to count every insert."""
        result, counters = super().result(), self._tiered.counters
        return replace(
            result,
            evicted_pages=counters.kept + counters.dropped,
            tiering=self._tier_hits.tiering(self._tiered, self._pages, result.hit.hits),
        )
