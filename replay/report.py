"""A sweep as a table for people, or as JSON for programs."""

from __future__ import annotations

import io

import msgspec

from replay.result import Result
from replay.sweep import Report

_COLUMNS = (
    "capacity (tokens)",
    "requests",
    "input tokens",
    "hit tokens",
    "hit rate",
    "evicted pages",
    "peak pages",
    "replay (s)",
    "requests/s",
)
_TABLE_WIDTH = 160


def to_table(report: Report) -> str:
    """Return the trace's facts, the table and the definition of a hit.

    The text does not depend on the terminal: a table is never cut.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    unit = report.definition.unit
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in _COLUMNS:
        heading = f"hits ({unit})" if column == "hit tokens" and unit != "tokens" else column
        table.add_column(heading, justify="right", no_wrap=True)
    for result in report.results:
        table.add_row(*_cells(result))
    out = io.StringIO()
    Console(file=out, width=_TABLE_WIDTH, force_terminal=False, color_system=None).print(table)
    lines = [line.rstrip() for line in out.getvalue().rstrip().splitlines()]
    return "\n".join([_facts(report), "", *lines, "", report.definition.describe()])


def _facts(report: Report) -> str:
    facts = report.trace.describe()
    if report.span_ms <= 0:
        return facts
    return f"{facts}, {report.span_ms / 1000:,.1f} s from first to last request"


def _cells(result: Result) -> list[str]:
    return [
        f"{result.capacity_tokens:,}",
        f"{result.requests:,}",
        f"{result.input_tokens:,}",
        f"{result.hit.hits:,}",
        f"{result.hit.rate:.6f}",
        f"{result.evicted_pages:,}",
        f"{result.peak_pages:,}",
        f"{result.seconds:.2f}",
        f"{result.requests_per_second:,.0f}",
    ]


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


def _row(result: Result) -> dict[str, int | float]:
    return {
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
