"""What benchmarks share: timing in shuffled order, tables, JSON."""

from __future__ import annotations

import gc
import json
import platform
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import fill
from time import perf_counter_ns
from typing import IO, Any

import click
import numpy as np

from replay.table import render


@dataclass(frozen=True)
class Case:
    """One thing to time.

    Attributes:
        run: What is timed; gets what `prepare` returned.
        prepare: Called before each run, outside the clock.
        finish: Called after each run with what `run` returned, outside the clock.
    """

    run: Callable[[Any], Any]
    prepare: Callable[[], Any] = lambda: None
    finish: Callable[[Any], Any] = lambda result: None


@dataclass(frozen=True)
class Timing:
    """Microseconds of one case over all its runs."""

    median_us: float
    min_us: float
    runs: int


def time_shuffled(cases: Mapping[str, Case], repeats: int, seed: int = 0) -> dict[str, Timing]:
    """Time all cases in one process, every round in another order, after a tenth as warm-up.

    A machine whose speed drifts then drifts for all cases alike, so ratios hold.

    Args:
        cases: By name.
        repeats: Runs of each case that count.
        seed: Seed of the orders.
    """
    order, names = random.Random(seed), list(cases)
    warm_up = repeats // 10
    spent: dict[str, list[int]] = {name: [] for name in cases}
    gc.collect()
    gc.disable()
    try:
        for turn in range(warm_up + repeats):
            order.shuffle(names)
            for name in names:
                nanoseconds = _once(cases[name])
                if turn >= warm_up:
                    spent[name].append(nanoseconds)
    finally:
        gc.enable()
    return {
        name: Timing(median(times) / 1e3, min(times) / 1e3, len(times))
        for name, times in spent.items()
    }


def _once(case: Case) -> int:
    given = case.prepare()
    start = perf_counter_ns()
    result = case.run(given)
    nanoseconds = perf_counter_ns() - start
    case.finish(result)
    return nanoseconds


def show(
    title: str, headings: Sequence[str], rows: Sequence[Sequence[str]], note: str = ""
) -> None:
    """Print a title, a table and a note; a line break in a heading makes the head taller."""
    blocks = [title, render(headings, rows)]
    if note:
        blocks.append(fill(note, 80))
    click.echo("\n\n".join(blocks))


def trace_name(path: str) -> str:
    """Return what tables call a trace file.

    >>> trace_name("traces/conversation_trace.jsonl")
    'conversation'
    """
    return Path(path).stem.removesuffix("_trace")


def write_json(file: IO[str] | None, name: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Write the figures of one benchmark and the machine they are from; nothing without a file."""
    if file is None:
        return
    machine = {
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "system": platform.system(),
    }
    json.dump({"benchmark": name, "environment": machine, "results": rows}, file, indent=2)
    file.write("\n")
