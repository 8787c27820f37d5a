"""Tokens evicted and hits kept when eviction aims at the ranks that are short, against blind.

    python -m benchmarks aimed_eviction [--requests 3000] [--trace FILE] [--json FILE]

Two figures for each replay. Of the whole replay: tokens that had to go for its placements, and the
hit rate. And tokens that go until every rank has a floor of free pages: now and then the process
forks, and a child of the same state raises the floor in either way.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import IO

import click

from benchmarks.chats import PAGE, TURN_PAGES, hot_prompt_chats, pool_pages
from benchmarks.harness import show, trace_name, write_json
from radix import EvictParams, EvictResult, UnifiedRadixCache, evict_until_allocatable
from replay.driver import Prompt, RunConfig
from replay.formats import open_trace
from replay.result import Result
from replay.schedule import ROTATIONS, Schedule
from replay.sharded import ShardedDriver
from replay.trace import Reader
from replay.units import plan_units

RANKS = 8
PROBES = 10
FLOOR_SHARE = 16
NOTE = (
    "traffic: a trace, or chats by their pages a turn; evicted tokens and hit rate: of the whole "
    "replay; tokens to a floor: what goes until each rank has 1/16 of its pages free, mean over "
    "10 states of the aimed replay, from which both start; needed: the least that could go. Blind "
    "takes the same rounds in policy order alone."
)


class Meter:
    """A cache's ``evict``, aimed or blind, that counts."""

    def __init__(self, cache: UnifiedRadixCache, aimed: bool) -> None:
        self.cache = cache
        self.aimed = aimed
        self.tokens = 0

    def evict(self, params: EvictParams) -> EvictResult:
        """Evict, with or without the classes that are short."""
        result = self.cache.evict(params if self.aimed else EvictParams(params.num_tokens))
        self.tokens += result.num_tokens_evicted
        return result


def in_child(compute: Callable[[], int]) -> int:
    """Run in a forked copy of this process, whose changes are lost with it."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(write_end, str(compute()).encode())
        finally:
            os._exit(0)
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(child, 0)
    if not text:
        raise RuntimeError("the forked copy failed")
    return int(text)


def tokens_to_floor(cache: UnifiedRadixCache, pages_per_rank: int, aimed: bool) -> int:
    """Evict until every rank has that many free pages; return the tokens that went."""
    meter = Meter(cache, aimed)
    wanted = pages_per_rank * RANKS * cache.page_size
    if not evict_until_allocatable(meter, cache.allocator, wanted):
        raise RuntimeError(f"no eviction leads to {pages_per_rank} free pages a rank")
    return meter.tokens


@dataclass
class Probes:
    """Tokens, summed over states, that bring every rank to a floor, and what it takes at least."""

    aimed: int = 0
    blind: int = 0
    needed: int = 0

    def take(self, cache: UnifiedRadixCache, floor: int) -> None:
        """Evict to the floor in both ways, from this state, and leave it as it is."""
        self.aimed += in_child(lambda: tokens_to_floor(cache, floor, aimed=True))
        self.blind += in_child(lambda: tokens_to_floor(cache, floor, aimed=False))
        deficits = cache.allocator.class_deficits([floor] * RANKS)
        self.needed += int(deficits.sum()) * cache.page_size


def replay(
    prompts: Sequence[Prompt], config: RunConfig, schedule: Schedule, probes: Probes | None
) -> Result:
    """Replay once, probing on the way where probes are given."""
    driver = ShardedDriver(config, schedule)
    step = -(-len(prompts) // (PROBES + 1))
    for start in range(0, len(prompts), step):
        if start and probes is not None:
            probes.take(driver.cache, floor_pages(config))
        driver.feed(prompts[start : start + step])
    driver.drain()
    return driver.result()


def floor_pages(config: RunConfig) -> int:
    """Return the free pages of a rank that probes ask for."""
    return max(1, config.capacity_pages // FLOOR_SHARE)


def compare(
    name: str, prompts: Sequence[Prompt], config: RunConfig, rotation: str
) -> list[dict[str, object]]:
    """Return an aimed and a blind row; the states of the aimed replay are probed in both ways."""
    probes = Probes()
    schedule = Schedule(RANKS, rotation=rotation)
    aimed = replay(prompts, config, schedule, probes)
    blind = replay(prompts, config, dataclasses.replace(schedule, aimed_eviction=False), None)
    tokens = config.page_size // config.tree_page_size  # behind one unit of the tree
    return [
        {
            "traffic": name,
            "rotation": rotation,
            "eviction": eviction,
            "evicted_tokens": result.evicted_pages * config.page_size,
            "hit_rate": result.hit.rate,
            "floor_pages": floor_pages(config),
            "tokens_to_floor": probed * tokens / PROBES,
            "tokens_needed": probes.needed * tokens / PROBES,
        }
        for eviction, result, probed in (
            ("aimed", aimed, probes.aimed),
            ("blind", blind, probes.blind),
        )
    ]


def rows_of(
    name: str, reader: Reader, pages: int, page_size: int | None
) -> list[dict[str, object]]:
    """Return the rows of one trace: both rotations, aimed and blind."""
    units = plan_units(reader.info, page_size=page_size, expand=False)
    prompts = [Prompt(units.key(r), units.pages(r), r.input_length) for r in reader]
    config = RunConfig(pages, units.page_size, units.tree_page_size)
    return [row for rotation in ROTATIONS for row in compare(name, prompts, config, rotation)]


def _cells(row: dict[str, object]) -> list[str]:
    return [
        f"{row['traffic']}",
        f"{row['rotation']}",
        f"{row['eviction']}",
        f"{row['evicted_tokens']:,}",
        f"{row['hit_rate']:.4f}",
        f"{row['tokens_to_floor']:,.0f}",
        f"{row['tokens_needed']:,.0f}",
    ]


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--requests", default=3000, show_default=True, help="Prompts of generated chats.")
@click.option("--seed", default=5, show_default=True, help="Seed of generated chats.")
@click.option("--trace", "paths", multiple=True, help="A trace to replay as well.")
@click.option("--pages", default=2818, show_default=True, help="Pages of one rank, for traces.")
@click.option("--json", "file", type=click.File("w"), help="Write the figures here.")
def main(
    requests: int, seed: int, paths: tuple[str, ...], pages: int, file: IO[str] | None
) -> None:
    """Run and print."""
    rows: list[dict[str, object]] = []
    for turn in TURN_PAGES:
        reader = hot_prompt_chats(turn, requests, seed)
        rows += rows_of(f"{turn} a turn", reader, pool_pages(turn) // RANKS, PAGE)
    for path in paths:
        rows += rows_of(trace_name(path), open_trace(path), pages, None)
    headings = ["traffic", "rotation", "eviction", "evicted\ntokens", "hit rate"]
    headings += ["tokens to\na floor", "needed"]
    show(f"Aimed and blind eviction, {RANKS} ranks", headings, [_cells(row) for row in rows], NOTE)
    write_json(file, "aimed_eviction", rows)


if __name__ == "__main__":
    main()
