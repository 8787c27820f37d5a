"""Microseconds of planning a sharded extend batch, nanoseconds of translating its slots.

    python -m benchmarks.plan [--pages 1e5,1e6] [--repeats 300] [--json FILE]

8 ranks, pages of 64 tokens, every chain's pages at random places of the pool, on the CPU with one
thread. A plan is made from a host page table and replaces the plan of the run before, so that its
undo is part of the time; all sizes are timed in one process, in an order that is shuffled every
round. ``over seams`` has four rotation bases in each prefix and plans with exact blocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import IO

import click
import numpy as np
import torch

from alloc import PageLayout, PageShardSpec
from benchmarks.harness import Case, show, time_shuffled, write_json
from scratch import ShardExtendPlanner

RANKS, PAGE = 8, 64
PREFIX, CHUNK = 65_536, 1024
SEAMS = 3

PEER_SOURCE = (
    "peer: a public engine's sharded pool, measured on 2026-12-01 on a 2-core x86-64 VM (torch "
    "2.13.0 on the CPU, one thread) and on one H200; its prefix alone, in a table of 1e6 pages"
)
PEERS = {
    "plan 8 x 64k + 1k": "1,800 µs (H200: 1,770 µs)",
    "plan 1 x 64k + 1k": "350 µs",
    "translate, by slot": "11.8-13.8 ns",
}


@dataclass(frozen=True)
class Batch:
    """Arguments of a plan over pages drawn at random.

    Attributes:
        layout: the pool.
        table: int32[requests, pages] host page table.
        num_seams: changes of the rotation base in each prefix.
    """

    layout: PageLayout
    table: np.ndarray[tuple[int, int], np.dtype[np.int32]]
    num_seams: int

    @classmethod
    def draw(cls, num_pages: int, requests: int, num_seams: int = 0) -> Batch:
        """Draw every page at random from a pool of ``num_pages``."""
        layout = PageLayout.interleave(PAGE, RANKS, num_pages // RANKS - 1)
        rng = np.random.default_rng(0)
        columns = (PREFIX + CHUNK) // PAGE
        run = -(-columns // (num_seams + 1))
        positions = np.arange(columns)
        owners = np.array(
            [(request + positions + positions // run * 3) % RANKS for request in range(requests)]
        )
        table = np.empty((requests, columns), dtype=np.int32)
        for owner in range(RANKS):
            mine = owners == owner
            drawn = rng.choice(layout.pages_per_class, int(mine.sum()), replace=False) + 1
            table[mine] = layout.page_at(np.full(len(drawn), owner), drawn)
        return cls(layout, table, num_seams)

    def planner(self) -> ShardExtendPlanner:
        """Make a planner whose scratch holds the batch, with room for uneven blocks."""
        requests = len(self.table)
        spec = PageShardSpec(0, RANKS, PAGE, 2 * requests * PREFIX, requests * CHUNK)
        return ShardExtendPlanner(spec, layout=self.layout, exact_blocks=self.num_seams > 0)

    def plan(self, planner: ShardExtendPlanner) -> object:
        """Plan the batch."""
        requests = len(self.table)
        lens = [PREFIX] * requests, [PREFIX + CHUNK] * requests
        return planner.begin_shard_extend(self.table, range(requests), *lens)


def plan_cases(pages: list[int]) -> dict[tuple[str, int], Case]:
    """Return what is timed, by name and size of the page table."""
    cases = {}
    for num_pages in pages:
        for name, requests, seams in (
            ("plan 8 x 64k + 1k", 8, 0),
            ("plan 1 x 64k + 1k", 1, 0),
            ("plan 8 x 64k + 1k, over seams", 8, SEAMS),
        ):
            batch = Batch.draw(num_pages, requests, seams)
            cases[name, num_pages] = Case(_planning(batch))
    return cases


def _planning(batch: Batch) -> Callable[[object], object]:
    planner = batch.planner()
    return lambda _: batch.plan(planner)


def translate_cases(pages: list[int]) -> tuple[int, dict[tuple[str, int], Case]]:
    """Return the number of slots of a batch of 8, and how they are translated."""
    cases, num_slots = {}, 0
    for num_pages in pages:
        batch = Batch.draw(num_pages, 8)
        planner = batch.planner()
        batch.plan(planner)
        ids = torch.from_numpy(batch.table.reshape(-1).astype(np.int64))
        locs = (ids[:, None] * PAGE + torch.arange(PAGE)).view(-1)
        if not torch.equal(planner.translate_pages(ids), planner.translate_loc_to_scratch(locs)):
            raise click.ClickException("wrong result: by page and by slot differ")
        num_slots = len(locs)
        cases["translate, by slot", num_pages] = Case(_call(planner.translate_loc_to_scratch, locs))
        cases["translate, by page", num_pages] = Case(_call(planner.translate_pages, ids))
    return num_slots, cases


def _call(
    function: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor
) -> Callable[[object], object]:
    return lambda _: function(values)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--pages", default="1e5,1e6", show_default=True, help="Pages of all ranks.")
@click.option("--repeats", default=300, show_default=True, help="Timed runs of each plan.")
@click.option("--json", "file", type=click.File("w"), help="Write the figures here.")
def main(pages: str, repeats: int, file: IO[str] | None) -> None:
    """Run and print."""
    torch.set_num_threads(1)
    sizes = [int(float(text)) for text in pages.split(",")]
    num_slots, translations = translate_cases(sizes)
    found = {}
    for cases, turns in ((plan_cases(sizes), repeats), (translations, max(10, repeats // 10))):
        keys = list(cases)
        timed = time_shuffled({str(i): cases[key] for i, key in enumerate(keys)}, turns)
        found.update({key: timed[str(i)] for i, key in enumerate(keys)})
    rows, results = [], []
    for name in dict.fromkeys(name for name, _ in found):
        per_slot = name.startswith("translate")
        scale, unit = (1e3 / num_slots, "ns a slot") if per_slot else (1.0, "µs")
        cells = []
        for size in sizes:
            timing = found[name, size]
            cells.append(f"{timing.median_us * scale:.3g} ({timing.min_us * scale:.3g})")
            results.append(
                {"call": name, "table_pages": size, "slots": num_slots, **asdict(timing)}
            )
        rows.append([name, unit, *cells, PEERS.get(name, "")])
    headings = ["call", "unit", *(f"{size:,} pages" for size in sizes), "peer"]
    title = f"Plan and translation, 8 ranks, page 64, {num_slots:,} slots: median (min)"
    show(title, headings, rows, PEER_SOURCE)
    write_json(file, "plan", results)


if __name__ == "__main__":
    main()
