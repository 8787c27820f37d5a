"""Microseconds of the classed allocator's calls, for pools of growing size; flat is the aim.

    python -m benchmarks alloc_classed [--pools 1e5,3e5,1e6] [--repeats 2000] [--json FILE]

8 ranks, pages of 64 tokens, host mode. A pool starts half full with its free pages in random
order. All pools and calls are timed in one process, in an order that is shuffled every round.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import IO

import click
import numpy as np

from alloc import PageInterleavePoolAllocator
from benchmarks.harness import Case, Timing, show, time_shuffled, write_json

RANKS, PAGE = 8, 64
REQUESTS, TOKENS = 8, 1024
FEW_PAGES = 32

PEER_SOURCE = (
    "8x1k: 8 requests of 1,024 tokens. peer: a public engine's classed allocator with device-side "
    "lists, measured on 2026-12-01 on a 2-core x86-64 VM, torch 2.13.0, one thread; draws from "
    "1e6 pages, frees into 1e5 and 1e6. On one H200 its 8x1k take 3,900. Not the same run: read "
    "the ratio as an order of magnitude."
)
PEER_US = {"alloc+free 8x1k, slots": "1,200+", "alloc 32 pages": "240", "free 32 pages": "160-910"}


def make_pool(num_pages: int, seed: int = 0) -> PageInterleavePoolAllocator:
    """Make a pool that is half full, its free pages in random order."""
    pool = PageInterleavePoolAllocator(num_pages // RANKS * PAGE, PAGE, RANKS, None, None, None)
    pages = pool.alloc_cyclic_pages(0, num_pages // RANKS * RANKS)
    assert pages is not None, "the pool is fresh"
    order = np.random.default_rng(seed).permutation(len(pages))[: len(pages) // 2]
    for some in np.array_split(pages[order], 1000):
        pool.free_pages(some)
    return pool


def cases_of(pool: PageInterleavePoolAllocator) -> dict[str, Case]:
    """Return what is timed on one pool; each case leaves the pool's counts as they were."""
    prefixes = np.zeros(REQUESTS, dtype=np.int64)
    lengths = np.full(REQUESTS, TOKENS, dtype=np.int64)
    last_locs = np.full(REQUESTS, -1, dtype=np.int64)

    def in_pages(_: None) -> None:
        drawn = pool.alloc_extend_pages(prefixes, lengths, [None] * REQUESTS)
        assert drawn is not None, "half the pool is free"
        pool.free_pages(drawn.pages)

    def in_slots(_: None) -> None:
        bases: list[int | None] = [None] * REQUESTS
        slots = pool.alloc_extend(
            prefixes, prefixes, lengths, lengths, last_locs, REQUESTS * TOKENS, bases
        )
        pool.free(slots)

    def draw() -> object:
        return pool.alloc_cyclic_pages(0, FEW_PAGES)

    return {
        "alloc+free 8x1k, page ids": Case(in_pages),
        "alloc+free 8x1k, slots": Case(in_slots),
        "alloc 32 pages": Case(lambda _: draw(), finish=pool.free_pages),
        "free 32 pages": Case(pool.free_pages, prepare=draw),
    }


def _cell(timing: Timing) -> str:
    return f"{timing.median_us:.1f} ({timing.min_us:.1f})"


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--pools", default="1e5,3e5,1e6", show_default=True, help="Pages of all ranks.")
@click.option("--repeats", default=2000, show_default=True, help="Timed runs of each call.")
@click.option("--json", "file", type=click.File("w"), help="Write the figures here.")
def main(pools: str, repeats: int, file: IO[str] | None) -> None:
    """Run and print."""
    sizes = [int(float(text)) for text in pools.split(",")]
    cases = {
        (name, size): case for size in sizes for name, case in cases_of(make_pool(size)).items()
    }
    keys = list(cases)
    timed = time_shuffled({str(i): cases[key] for i, key in enumerate(keys)}, repeats)
    found = {key: timed[str(i)] for i, key in enumerate(keys)}
    names = list(dict.fromkeys(name for name, _ in keys))
    rows = [
        [name, *(_cell(found[name, size]) for size in sizes), PEER_US.get(name, "")]
        for name in names
    ]
    show(
        "Classed allocator, 8 ranks, page 64, by pages of the pool: µs, median (min)",
        ["call", *(f"{size:,}" for size in sizes), "peer"],
        rows,
        PEER_SOURCE,
    )
    write_json(
        file,
        "alloc_classed",
        [{"call": name, "pool_pages": size, **asdict(t)} for (name, size), t in found.items()],
    )


if __name__ == "__main__":
    main()
