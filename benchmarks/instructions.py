"""Instructions per operation, counted instead of timed: repeatable however busy the machine is.

    python -m benchmarks.instructions [--count 1000]

Needs ``perf`` with hardware counters, or ``valgrind``. A child process runs an operation ``count``
times, another the same set-up without it; the difference is the operation's. The tree has 2,000
leaves of 4 pages of 16 tokens.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable

import click

from benchmarks import harness
from benchmarks.growth import LEAF_PAGES, PAGE, fill, make_cache
from radix import EvictParams, InsertParams, MatchPrefixParams, RadixKey, UnifiedRadixCache

LEAVES = 2000


def nothing(cache: UnifiedRadixCache, keys: list[RadixKey]) -> None:
    """Only set up."""


def match(cache: UnifiedRadixCache, keys: list[RadixKey]) -> None:
    """Match keys that are cached."""
    for key in keys:
        cache.match_prefix(MatchPrefixParams(key))


def miss(cache: UnifiedRadixCache, keys: list[RadixKey]) -> None:
    """Match keys that are not."""
    for key in keys:
        cache.match_prefix(MatchPrefixParams(key[1:]))


def lock(cache: UnifiedRadixCache, keys: list[RadixKey]) -> None:
    """Match and lock in one operation, then unlock."""
    for key in keys:
        cache.dec_lock_ref(cache.match_and_lock(MatchPrefixParams(key)).receipt)


def evict(cache: UnifiedRadixCache, keys: list[RadixKey]) -> None:
    """Evict a leaf."""
    for _ in keys:
        cache.evict(EvictParams(LEAF_PAGES * PAGE))


def insert(cache: UnifiedRadixCache, keys: list[RadixKey]) -> None:
    """Allocate and insert a leaf, in place of one that is evicted."""
    for key in keys:
        cache.evict(EvictParams(LEAF_PAGES * PAGE))
        pages = cache.allocator.alloc_pages(LEAF_PAGES - 1)
        cache.insert(InsertParams(key[1:], pages=pages))


OPERATIONS: dict[str, Callable[[UnifiedRadixCache, list[RadixKey]], None]] = {
    run.__name__: run for run in (nothing, match, miss, lock, evict, insert)
}


def counted(operation: str, count: int) -> int:
    """Return the instructions of a child process that runs an operation."""
    child = [sys.executable, "-m", "benchmarks.instructions", "--child", operation]
    child += ["--count", str(count)]
    environment = os.environ | {"PYTHONHASHSEED": "0", "OPENBLAS_NUM_THREADS": "1"}
    for tool, pattern in (
        (["perf", "stat", "-x,", "-e", "instructions:u"], r"^(\d+),,instructions"),
        (
            ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"],
            r"Collected : (\d+)",
        ),
    ):
        if shutil.which(tool[0]) is None:
            continue
        done = subprocess.run(
            [*tool, *child], env=environment, capture_output=True, text=True, check=True
        )
        found = re.search(pattern, done.stderr, re.M)
        if found is not None:
            return int(found.group(1))
    raise click.ClickException("neither perf with hardware counters nor valgrind is here")


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--count", default=1000, help="Times that an operation runs.")
@click.option("--child", type=click.Choice(list(OPERATIONS)), hidden=True)
def main(count: int, child: str | None) -> None:
    """Count and print, or run one operation as a child."""
    if child is not None:
        cache = make_cache(LEAVES * LEAF_PAGES)
        keys = [RadixKey(tokens) for tokens in fill(cache, LEAVES)]
        OPERATIONS[child](cache, keys[:count])
        return
    base = counted("nothing", count)
    rows = [
        [operation, f"{(counted(operation, count) - base) / count:,.0f}"]
        for operation in OPERATIONS
        if operation != "nothing"
    ]
    harness.show("Instructions per operation", ["operation", "instructions"], rows)


if __name__ == "__main__":
    main()
