"""What one rotation base per chain strands, and what seams give back: the same replay under both.

    python -m benchmarks stranding [--requests 3000] [--trace FILE --capacity 10000p] [--json FILE]

Stranded pages are free and useless: some rank has none left, so no chain can draw. Generated chats
have one hot system prompt; a trace may be given beside them, more than once.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import IO

import click

from benchmarks.chats import PAGE, TURN_PAGES, hot_prompt_chats, pool_pages
from benchmarks.harness import show, trace_name, write_json
from replay.capacity import parse_capacities
from replay.formats import open_trace
from replay.result import Result
from replay.schedule import ROTATIONS, Schedule
from replay.sweep import SweepConfig, sweep
from replay.trace import Reader

NOTE = (
    "traffic: a trace, or chats by their pages a turn; stranded: aggregate free pages less the "
    "floor, mean over placements that had to evict; skew: free pages of the emptiest rank less "
    "those of the fullest, mean over placements; gather: pages moved for cached prefixes over "
    "pages needed; hit rate by tokens (D2)"
)


def replay(
    name: str, reader: Reader, capacity: str, ranks: int, page_size: int | None = None
) -> Iterator[dict[str, object]]:
    """Replay a trace under both rotations and yield a row for each."""
    schedules = tuple(Schedule(ranks, rotation=rotation) for rotation in ROTATIONS)
    config = SweepConfig(parse_capacities(capacity), page_size, schedules=schedules)
    for result in sweep(reader, config).results:
        yield row_of(name, result)


def row_of(name: str, result: Result) -> dict[str, object]:
    """Return one run's figures."""
    sharding = result.sharding
    assert sharding is not None, "a sharded run"
    pool = result.capacity_pages * sharding.schedule.ranks
    return {
        "traffic": name,
        "ranks": sharding.schedule.ranks,
        "pool_pages": pool,
        "rotation": sharding.schedule.rotation,
        "stranded_pages": sharding.mean_stranded_pages,
        "stranded_share": sharding.mean_stranded_pages / pool,
        "skew_pages": sharding.mean_skew_pages,
        "hit_rate": result.hit.rate,
        "gather_overhead": sharding.gather_overhead,
        "evicted_pages": result.evicted_pages,
    }


def _cells(row: dict[str, object]) -> list[str]:
    return [
        f"{row['traffic']}",
        f"{row['ranks']}",
        f"{row['pool_pages']:,}",
        f"{row['rotation']}",
        f"{row['stranded_pages']:,.1f}",
        f"{row['stranded_share']:.1%}",
        f"{row['skew_pages']:,.1f}",
        f"{row['hit_rate']:.4f}",
        f"{row['gather_overhead']:.3f}",
    ]


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--requests", default=3000, show_default=True, help="Prompts of generated chats.")
@click.option("--seed", default=5, show_default=True, help="Seed of generated chats.")
@click.option("--ranks", "ranks_text", default="4,8", show_default=True, help="Ranks of a group.")
@click.option("--trace", "paths", multiple=True, help="A trace to replay as well.")
@click.option("--capacity", default="10000p", show_default=True, help="Of one rank, for traces.")
@click.option("--json", "file", type=click.File("w"), help="Write the figures here.")
def main(
    requests: int,
    seed: int,
    ranks_text: str,
    paths: tuple[str, ...],
    capacity: str,
    file: IO[str] | None,
) -> None:
    """Run and print."""
    all_ranks = [int(text) for text in ranks_text.split(",")]
    rows: list[dict[str, object]] = []
    for turn in TURN_PAGES:
        for ranks in all_ranks:
            pages = f"{pool_pages(turn) // ranks}p"
            reader = hot_prompt_chats(turn, requests, seed)
            rows += replay(f"{turn} a turn", reader, pages, ranks, PAGE)
    for path in paths:
        for ranks in all_ranks:
            rows += replay(trace_name(path), open_trace(path), capacity, ranks)
    headings = ["traffic", "ranks", "pool\npages", "rotation", "stranded\npages", "of the\npool"]
    headings += ["skew\npages", "hit rate", "gather"]
    title = "Free pages that no request could draw, under chain and seam"
    show(title, headings, [_cells(row) for row in rows], NOTE)
    write_json(file, "stranding", rows)


if __name__ == "__main__":
    main()
