"""One pass over a trace that feeds every capacity at once.

The trace is decoded once and every key is built once, whatever the number of capacities; memory
is the sum of the caches and one batch of requests, and standard input can be swept too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from replay.capacity import MAX_PAGES, Capacity
from replay.driver import Driver, Prompt, RunConfig
from replay.errors import ReplayError
from replay.hits import DEFAULT, MEANINGS, UNITS
from replay.result import Definition, Result
from replay.schedule import Schedule
from replay.sharded import ShardedDriver
from replay.sharded_tiers import TieredShardedDriver
from replay.tiered import TieredDriver, TierOptions
from replay.trace import Reader, Request, TraceInfo
from replay.units import Units, plan_units

BATCH = 64


@dataclass(frozen=True, slots=True)
class SweepConfig:
    """What to replay.

    Attributes:
        capacities: Capacities, in the order of the results.
        page_size: Tokens in a page; None for the trace's own.
        policy: Eviction policy.
        definition: Hit definition, `D1` to `D5`.
        expand: Make every block `block_size` tokens.
        limit: Requests to replay; None for all.
        schedules: Groups of ranks to compare at each capacity, which is then one rank's; none for
            one pool fed one request at a time.
        tiers: Tiers below each pool; None for none.
    """

    capacities: tuple[Capacity, ...]
    page_size: int | None = None
    policy: str = "lru"
    definition: str = DEFAULT
    expand: bool = False
    limit: int | None = None
    schedules: tuple[Schedule, ...] = ()
    tiers: TierOptions | None = None


@dataclass(frozen=True, slots=True)
class Report:
    """Everything a report shows.

    Attributes:
        trace: What was detected about the trace.
        definition: What a hit is.
        results: One per capacity and schedule.
        span_ms: Milliseconds from the first request to the last, as a check of the time unit; 0
            if the trace has no clock of its own.
    """

    trace: TraceInfo
    definition: Definition
    results: tuple[Result, ...]
    span_ms: int = 0


def sweep(
    reader: Reader, config: SweepConfig, on_progress: Callable[[float], None] | None = None
) -> Report:
    """Replay a trace at every capacity.

    Args:
        reader: The trace.
        config: What to replay.
        on_progress: Called now and then with the share of the trace that was read.

    Returns:
        The results, in the order of the capacities and, at each, of the schedules.

    Raises:
        ReplayError: If the page size or a capacity does not fit the trace.
        TraceError: At the first bad line.
    """
    units = plan_units(reader.info, page_size=config.page_size, expand=config.expand)
    drivers = _drivers(reader, config, units)
    requests = 0
    first: Request | None = None
    last: Request | None = None
    for batch in _batches(_limited(reader, config.limit)):
        first, last = first or batch[0], batch[-1]
        prompts = [Prompt(units.key(r), units.pages(r), r.input_length) for r in batch]
        for driver in drivers:
            driver.feed(prompts)
        requests += len(batch)
        if on_progress is not None:
            on_progress(_share(reader, requests, config.limit))
    for driver in drivers:
        driver.drain()
    results = tuple(driver.result() for driver in drivers)
    span_ms = _span_ms(reader.info, first, last)
    return Report(reader.info, _definition(config, units), results, span_ms)


def _definition(config: SweepConfig, units: Units) -> Definition:
    return Definition(
        config.definition,
        MEANINGS[config.definition],
        UNITS[config.definition],
        units.page_size,
        config.policy,
        config.schedules,
    )


def _drivers(reader: Reader, config: SweepConfig, units: Units) -> Sequence[Driver | ShardedDriver]:
    working_set = _working_set_if_needed(reader, config, units)
    below = config.tiers and config.tiers.pages(units.page_size, working_set)
    runs = _runs(config, units, working_set, below.host + below.disk if below else 0)
    if not config.schedules:
        return [TieredDriver(run, below) if below else Driver(run) for run in runs]
    return [
        TieredShardedDriver(run, schedule, below) if below else ShardedDriver(run, schedule)
        for run in runs
        for schedule in config.schedules
    ]


def _span_ms(info: TraceInfo, first: Request | None, last: Request | None) -> int:
    if first is None or last is None or info.scope == "local":
        return 0
    return round(last.timestamp_ms - first.timestamp_ms)


def _working_set_if_needed(reader: Reader, config: SweepConfig, units: Units) -> int:
    """Return the pages that an unbounded pool needs; 0 where none is asked for."""
    bounded = [c for c in config.capacities if c.amount is not None]
    for capacity in bounded:
        capacity.pages(units.page_size, 0)
    if len(bounded) < len(config.capacities) or (config.tiers and config.tiers.unbounded):
        return _working_set(reader, config, units)
    return 0


def _runs(config: SweepConfig, units: Units, working_set: int, below: int) -> list[RunConfig]:
    """Return a run for each capacity; ``below`` are the pages of its other tiers."""
    pools = [capacity.pages(units.page_size, working_set) for capacity in config.capacities]
    ranks = [schedule.ranks for schedule in config.schedules] or [1]
    pages = (sum(pools) + below * len(pools)) * sum(ranks)
    if pages > MAX_PAGES:
        raise ReplayError(
            f"--capacity: {pages} pages in {len(pools) * len(ranks)} pools; one sweep holds at "
            f"most {MAX_PAGES}, replay fewer at a time"
        )
    return [
        RunConfig(pages, units.page_size, units.tree_page_size, config.policy, config.definition)
        for pages in pools
    ]


def _working_set(reader: Reader, config: SweepConfig, units: Units) -> int:
    """Return the pages of all requests together: enough for a pool that never evicts."""
    if not reader.rewindable:
        raise ReplayError(
            "--capacity unbounded: the trace is counted first, and standard input cannot be read "
            "twice; save it to a file, or give a number"
        )
    per_page = units.tree_page_size
    return sum(
        len(request.ids) * units.units_per_id // per_page
        for request in _limited(reader, config.limit)
    )


def _limited(reader: Reader, limit: int | None) -> Iterable[Request]:
    return reader if limit is None else islice(reader, limit)


def _batches(requests: Iterable[Request]) -> Iterator[Sequence[Request]]:
    iterator = iter(requests)
    while batch := list(islice(iterator, BATCH)):
        yield batch


def _share(reader: Reader, requests: int, limit: int | None) -> float:
    by_limit = requests / limit if limit else 0.0
    return max(reader.progress(), by_limit)
