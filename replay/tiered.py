"""A pool with copies below it: what device, host and disk would each have served.

What a request finds below the device is loaded back before room is made for the rest. Evicted pages
are copied to the host, pages that the host evicts to the disk, and a copy stays when it is loaded
back, so the tiers overlap: capacities don't add up.
"""

from __future__ import annotations

from dataclasses import dataclass

from radix import RadixKey, UnifiedRadixCache
from replay.capacity import Capacity, parse_capacities
from replay.driver import Driver, RunConfig
from replay.errors import ReplayError
from replay.hits import make_counter
from replay.result import Result, Tiering
from tiers import GroupTier, HostTier, MemoryStore, NoRows, TieredCache, host_layout


@dataclass(frozen=True, slots=True)
class TierPages:
    """Pages below the device.

    Attributes:
        host: Of the host tier; of one rank where ranks share a pool.
        disk: Of the disk tier; 0 for none.
    """

    host: int
    disk: int = 0


@dataclass(frozen=True, slots=True)
class TierOptions:
    """The capacities below the device as the user gave them.

    Attributes:
        host: Of the host tier.
        disk: Of the disk tier; None for none.
    """

    host: Capacity
    disk: Capacity | None = None

    @classmethod
    def read(cls, host: str | None, disk: str | None) -> TierOptions | None:
        """Read `--host-capacity` and `--disk-capacity`; None without them.

        Raises:
            ReplayError: If one is no single capacity, or has nothing to stand on.
        """
        if host is None:
            if disk is not None:
                raise ReplayError(
                    "--disk-capacity: the disk holds what the host evicts; add --host-capacity"
                )
            return None
        return cls(
            _one_capacity("--host-capacity", host),
            None if disk is None else _one_capacity("--disk-capacity", disk),
        )

    @property
    def unbounded(self) -> bool:
        """Whether a tier is as large as the trace needs."""
        return self.host.amount is None or (self.disk is not None and self.disk.amount is None)

    def pages(self, page_size: int, working_set: int) -> TierPages:
        """Return the tiers in whole pages.

        Raises:
            ReplayError: If a tier is less than a page, or too large.
        """
        host = _pages("--host-capacity", self.host, page_size, working_set)
        if self.disk is None:
            return TierPages(host)
        return TierPages(host, _pages("--disk-capacity", self.disk, page_size, working_set))


def _one_capacity(option: str, text: str) -> Capacity:
    try:
        capacities = parse_capacities(text)
    except ReplayError as error:
        raise _renamed(option, error) from None
    if len(capacities) != 1:
        raise ReplayError(f"{option} {text}: give one capacity; --capacity takes a list")
    return capacities[0]


def _pages(option: str, capacity: Capacity, page_size: int, working_set: int) -> int:
    try:
        return capacity.pages(page_size, working_set)
    except ReplayError as error:
        raise _renamed(option, error) from None


def _renamed(option: str, error: ReplayError) -> ReplayError:
    return ReplayError(str(error).replace("--capacity", option, 1))


def tiers_below(cache: UnifiedRadixCache, pages: TierPages, policy: str) -> TieredCache:
    """Return a cache with tiers below it: of each rank, pages of the host and of the disk.

    One store stands for the disks of all ranks.
    """
    layout = host_layout(cache.allocator.layout, pages.host)
    groups = None
    if pages.disk:
        # A group of one page: the figure is then one of capacity alone.
        store = MemoryStore(pages.disk * layout.num_classes)
        groups = GroupTier(store, NoRows(), layout, model_id="replay", group_pages=1)
    return TieredCache(cache, HostTier(layout, groups=groups, eviction_policy=policy))


class TierHits:
    """Hits by tier; those of all tiers together are counted elsewhere.

    Args:
        definition: `D1` to `D5`.
        page_size: Tokens in a page.
    """

    def __init__(self, definition: str, page_size: int) -> None:
        self._device = make_counter(definition, page_size)
        self._upper = make_counter(definition, page_size)

    def record(self, on_device: int, upper: int, pages: int, input_length: int) -> None:
        """Count a request.

        Args:
            on_device: Leading pages that the device had.
            upper: Leading pages that device or host had.
            pages: Pages of the request.
            input_length: Prompt tokens.
        """
        self._device.record(min(on_device, pages), pages, input_length)
        self._upper.record(min(upper, pages), pages, input_length)

    def tiering(self, tiered: TieredCache, pages: TierPages, all_hits: int) -> Tiering:
        """Return what the tiers did."""
        on_device, upper = self._device.count().hits, self._upper.count().hits
        counters = tiered.counters
        return Tiering(
            host_pages=pages.host,
            disk_pages=pages.disk,
            device_hits=on_device,
            host_hits=upper - on_device,
            disk_hits=all_hits - upper,
            loaded_pages=counters.loaded,
            stored_pages=counters.stored,
            dropped_pages=counters.dropped,
            host_evicted_pages=tiered.host.counters.evicted,
            fetched_pages=tiered.host.counters.fetched,
        )


class TieredDriver(Driver):
    """Feeds one pool with copies below it, and counts by tier.

    Args:
        config: The run.
        pages: The tiers below.
    """

    def __init__(self, config: RunConfig, pages: TierPages) -> None:
        super().__init__(config)
        self._pages = pages
        self._tiered = tiers_below(self._cache, pages, config.policy)
        self._evicts = self._tiered
        self._tier_hits = TierHits(config.definition, config.page_size)
        self._found = (0, 0)

    def _serve(self, key: RadixKey) -> int:
        """Serve one key; returns how many of its leading pages were in some tier."""
        ps = self._config.tree_page_size
        key = self._cut(key)
        match = self._tiered.match(key)
        on_device = match.device.handle.end
        upper = on_device + (match.host_hit_length - match.file_hit_length) // ps
        if match.host_hit_length:
            match = self._tiered.load_back(match) or match
        cached = match.device.handle.end
        self._found = (on_device, min(upper, cached))
        free = self._allocator.available_size() // ps
        self._peak = max(self._peak, self._config.capacity_pages - free)
        pages = len(key) // ps
        if cached < pages:
            self._extend(key, match.device, pages - cached)
        assert match.device.receipt is not None, "a match is locked"
        self._cache.dec_lock_ref(match.device.receipt)
        self._tiered.poll()
        return cached

    def _record(self, cached: int, pages: int, input_length: int) -> None:
        """Count a request for all tiers together, for the upper two, and for the device."""
        super()._record(cached, pages, input_length)
        self._tier_hits.record(*self._found, pages, input_length)

    def check_invariants(self) -> None:
        """Check every tier.

        Raises:
            RuntimeError: Naming the rules that are broken.
        """
        self._tiered.check_invariants()

    def result(self) -> Result:
        """Return the counters so far."""
        counters = self._tiered.counters
        self._evicted = counters.kept + counters.dropped
        hits = self._counter.count().hits
        return self._result(tiering=self._tier_hits.tiering(self._tiered, self._pages, hits))
