"""A sweep as tables for people, or as JSON for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from textwrap import fill
from typing import TypeAlias

import msgspec

from replay.result import Result, Sharding, Tiering
from replay.schedule import Schedule
from replay.sweep import Report
from replay.table import render

Cell: TypeAlias = Callable[[Result], str]

_TEXT_WIDTH = 80

_LEGEND = (
    "capacity: of one rank. 1x: every rank holds a copy of one pool; Nx: N ranks share one pool "
    "of N times the pages. Skew: free pages of the emptiest rank less those of the fullest, mean "
    "over requests. Stranded: free pages that no request could draw, the aggregate less the floor, "
    "mean over requests that had to evict. Declined: computed and not cached, as another rotation "
    "base was there first. Gather: pages moved for cached prefixes over pages needed."
)

_LANES_LEGEND = (
    "Layout: owner-lane puts a page on the rank that computes it, in a prefill split zigzag over "
    "the ranks; seam and chain are rotations of pages that go round the ranks."
)

_TIER_LEGEND = (
    "Device, host, disk: where a request found its pages; the hits of all three are their sum. "
    "Evicted pages are copied to the host, what the host evicts to the disk, and copies stay when "
    "they are loaded back, so capacities don't add up."
)

_SHARED_TIER_LEGEND = "Host and disk: of one rank, as the capacity; each rank keeps its own pages."


def to_table(report: Report) -> str:
    """Return the trace's facts, the tables and the definition of a hit.

    The text does not depend on the terminal: a table is never cut, and prose breaks at 80 columns.
    """
    unit = report.definition.unit
    hits = "hit\ntokens" if unit == "tokens" else f"hits\n({unit})"
    blocks = [_wrap(_facts(report))]
    if report.definition.schedules:
        blocks += _sharded_tables(report, hits)
    elif any(result.tiering for result in report.results):
        blocks += [_table(_tiered_columns(hits), report.results), _wrap(_TIER_LEGEND)]
    else:
        blocks.append(_table(_plain_columns(hits), report.results))
    blocks.append(_wrap(report.definition.describe()))
    return "\n\n".join(blocks)


def _facts(report: Report) -> str:
    facts = [report.trace.describe()]
    if report.span_ms > 0:
        facts.append(f"{report.span_ms / 1000:,.1f} s from first to last request")
    for result in report.results[:1]:
        plural = "" if result.requests == 1 else "s"
        facts.append(f"{result.requests:,} request{plural} of {result.input_tokens:,} tokens")
    return ", ".join(facts)


def _wrap(text: str) -> str:
    return fill(text, _TEXT_WIDTH, break_long_words=False, break_on_hyphens=False)


def _plain_columns(hits: str) -> dict[str, Cell]:
    return {
        "capacity\n(tokens)": lambda r: f"{r.capacity_tokens:,}",
        hits: lambda r: f"{r.hit.hits:,}",
        "hit rate": lambda r: f"{r.hit.rate:.6f}",
        "evicted\npages": lambda r: f"{r.evicted_pages:,}",
        "peak\npages": lambda r: f"{r.peak_pages:,}",
        "replay\n(s)": lambda r: f"{r.seconds:.2f}",
        "requests\nper s": lambda r: f"{r.requests_per_second:,.0f}",
    }


def _tier_columns() -> dict[str, Cell]:
    return {
        "host\n(tokens)": lambda r: f"{_tiers(r).host_pages * r.page_size:,}",
        "disk\n(tokens)": lambda r: f"{_tiers(r).disk_pages * r.page_size:,}",
        "device\nhits": lambda r: f"{_tiers(r).device_hits:,}",
        "host\nhits": lambda r: f"{_tiers(r).host_hits:,}",
        "disk\nhits": lambda r: f"{_tiers(r).disk_hits:,}",
    }


def _tiered_columns(hits: str) -> dict[str, Cell]:
    capacity: dict[str, Cell] = {"capacity\n(tokens)": lambda r: f"{r.capacity_tokens:,}"}
    gained: dict[str, Cell] = {
        hits: lambda r: f"{r.hit.hits:,}",
        "hit rate": lambda r: f"{r.hit.rate:.6f}",
        "replay\n(s)": lambda r: f"{r.seconds:.2f}",
    }
    return capacity | _tier_columns() | gained


def _tiers(result: Result) -> Tiering:
    assert result.tiering is not None, "a run with tiers counts them"
    return result.tiering


def _sharded_tables(report: Report, hits: str) -> list[str]:
    """Return the hits of all pools, the balance of those that ranks share, and the legend."""
    lanes = any(schedule.owner_lanes for schedule in report.definition.schedules)
    which: dict[str, Cell] = {
        "capacity\n(tokens)": lambda r: f"{r.capacity_tokens:,}",
        "pool": lambda r: f"{_of(r).schedule.ranks}x",
        "layout" if lanes else "rotation": lambda r: _placing(_of(r).schedule),
        "in\nflight": lambda r: f"{_of(r).schedule.in_flight:,}",
    }
    gained: dict[str, Cell] = {
        hits: lambda r: f"{r.hit.hits:,}",
        "hit rate": lambda r: f"{r.hit.rate:.6f}",
        "evicted\npages": lambda r: f"{r.evicted_pages:,}",
        "replay\n(s)": lambda r: f"{r.seconds:.2f}",
    }
    balance: dict[str, Cell] = {
        "skew\npages": lambda r: f"{_of(r).mean_skew_pages:,.1f}",
        "stranded\npages": lambda r: _mean_stranded(_of(r)),
        "declined\ninserts": lambda r: f"{_of(r).declined_inserts:,}",
        "declined\ntokens": lambda r: f"{_of(r).declined_tokens:,}",
        "gather": lambda r: f"{_of(r).gather_overhead:.2f}",
    }
    shared = [result for result in report.results if _is_shared(result)]
    tables = [_table(which | gained, report.results)]
    tiered = any(result.tiering for result in report.results)
    if tiered:
        tables.append(_table(which | _tier_columns(), report.results))
    if shared:
        tables.append(_table(which | balance, shared))
    legend = f"{_LEGEND} {_LANES_LEGEND}" if lanes else _LEGEND
    legends = [legend, f"{_TIER_LEGEND} {_SHARED_TIER_LEGEND}"] if tiered else [legend]
    return [*tables, *_switches(report), *map(_wrap, legends)]


def _placing(schedule: Schedule) -> str:
    """Return in a word how the pages of a pool lie on its ranks."""
    if schedule.ranks == 1:
        return "-"
    return schedule.layout if schedule.owner_lanes else schedule.rotation


def _switches(report: Report) -> list[str]:
    """Return what was turned off, in words, or nothing."""
    schedules = report.definition.schedules
    found = []
    if not all(schedule.use_leases for schedule in schedules):
        found.append("Without leases.")
    if not all(schedule.aimed_eviction for schedule in schedules):
        found.append("Blind eviction.")
    return [" ".join(found)] if found else []


def _mean_stranded(sharding: Sharding) -> str:
    return f"{sharding.mean_stranded_pages:,.1f}" if sharding.evictions else "-"


def _of(result: Result) -> Sharding:
    assert result.sharding is not None, "a run with schedules counts its sharding"
    return result.sharding


def _is_shared(result: Result) -> bool:
    return _of(result).schedule.ranks > 1


def _table(columns: dict[str, Cell], results: Iterable[Result]) -> str:
    """Return right-aligned columns under their headings."""
    return render(list(columns), [[cell(r) for cell in columns.values()] for r in results])


def to_json(report: Report) -> str:
    """Return one JSON object: `trace`, `definition`, `results`.

    Every counter is an integer; `hit_rate` is `hits / total` and the only other number.
    """
    trace, definition = report.trace, report.definition
    document = {
        "trace": {
            "name": trace.name,
            "format": trace.format,
            "compression": trace.compression,
            "block_size": trace.block_size,
            "tail": trace.tail,
            "scope": trace.scope,
            "time_unit": trace.time_unit,
            "span_ms": report.span_ms,
        },
        "definition": {
            "hit": definition.hit,
            "meaning": definition.meaning,
            "unit": definition.unit,
            "page_size": definition.page_size,
            "policy": definition.policy,
            "warm_up": "none",
            "order": "file",
        },
        "results": [_row(result) for result in report.results],
    }
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode()


def _row(result: Result) -> dict[str, object]:
    row: dict[str, object] = {
        "capacity_tokens": result.capacity_tokens,
        "capacity_pages": result.capacity_pages,
        "page_size": result.page_size,
        "requests": result.requests,
        "input_tokens": result.input_tokens,
        "hits": result.hit.hits,
        "total": result.hit.total,
        "hit_rate": result.hit.rate,
        "evicted_pages": result.evicted_pages,
        "peak_pages": result.peak_pages,
        "replay_microseconds": result.replay_ns // 1000,
        "requests_per_second": int(result.requests_per_second),
    }
    if result.sharding is not None:
        row["sharding"] = _sharding_row(result.sharding)
    if result.tiering is not None:
        row["tiers"] = msgspec.to_builtins(result.tiering)
    return row


def _sharding_row(sharding: Sharding) -> dict[str, object]:
    """Return a group's schedule and counters; what one rank alone cannot have is null."""
    row: dict[str, object] = msgspec.to_builtins(sharding)
    schedule = row.pop("schedule")
    assert isinstance(schedule, dict), "a schedule is a dataclass"
    if sharding.schedule.ranks == 1:
        schedule |= dict.fromkeys(("rotation", "use_leases", "aimed_eviction", "layout"))
    elif sharding.schedule.owner_lanes:
        schedule |= dict.fromkeys(("rotation", "use_leases"))
    return schedule | row
