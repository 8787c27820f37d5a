"""Correctness and speed of everything that runs on a GPU, in one table.

    python -m benchmarks.gpu [--json F] [--repeats 50]

Needs one CUDA device. Every line is checked against its plain reference on fresh random data before
it is timed; a wrong result ends the run. The columns:

    call µs    host time of a call, calls back to back, the device awaited after the last of them
    alone µs   host time of one call with an idle device before it and a synchronize after it
    device µs  time between events around the call; the L2 cache is overwritten before each, which
               takes long enough that no launch is waited for
    GB/s       bytes over device time, each byte counted once read and once written
    of copy    rate over that of a device-to-device copy of as many bytes in the same run
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter_ns

import click
import numpy as np
import torch
from rich.console import Console
from rich.table import Table

from alloc import PagedTokenToKVPoolAllocator, PageInterleavePoolAllocator, PageShardSpec
from scratch import ShardExtendPlanner
from scratch.kernels import pack_pages, store_rows, translate_locs

RANKS, PAGE, POOL_PAGES = 8, 64, 1_000_000
PREFIX, CHUNK, REQUESTS = 65_536, 1024, 8
CHUNK_ROWS = 8192
MLA_WIDTHS, HEAD_WIDTH = (512, 64), 8 * 128


@dataclass
class Line:
    """One measurement; 0 stands for what a line has not.

    Attributes:
        name: what ran.
        call_us: host microseconds of a call, back to back.
        alone_us: host microseconds until the device is done, by itself.
        device_us: device microseconds.
        gbytes_s: bytes moved over the device time.
        share: of the rate of a copy of as many bytes.
    """

    name: str
    call_us: float = 0.0
    alone_us: float = 0.0
    device_us: float = 0.0
    gbytes_s: float = 0.0
    share: float = 0.0


class Bench:
    """Times calls and collects lines."""

    def __init__(self, repeats: int) -> None:
        self.repeats = repeats
        self.lines: list[Line] = []
        self._flush = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device="cuda")
        self._copied = torch.empty_like(self._flush)

    def call(self, run: Callable[[], object]) -> float:
        """Return the host time of a call, calls back to back, the device's rest included."""
        for _ in range(self.repeats):
            run()
        spent = []
        for _ in range(5):
            torch.cuda.synchronize()
            start = perf_counter_ns()
            for _ in range(self.repeats):
                run()
            torch.cuda.synchronize()
            spent.append((perf_counter_ns() - start) / 1e3 / self.repeats)
        return statistics.median(spent)

    def alone(self, run: Callable[[], object]) -> float:
        """Return the median host time of one call and the device work it started."""
        spent = []
        for _ in range(self.repeats):
            torch.cuda.synchronize()
            start = perf_counter_ns()
            run()
            torch.cuda.synchronize()
            spent.append((perf_counter_ns() - start) / 1e3)
        return statistics.median(spent)

    def device(self, run: Callable[[], object]) -> float:
        """Return the median time between events around a call, with a cold L2."""
        for _ in range(10):
            run()
        events = []
        for _ in range(self.repeats):
            self._flush.add_(1)
            pair = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            pair[0].record()
            run()
            pair[1].record()
            events.append(pair)
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) * 1e3 for a, b in events)

    def copy_rate(self, moved: int) -> float:
        """Return GB/s of a copy that reads and writes ``moved`` bytes in all."""
        size = min(moved // 2, len(self._flush))
        spent = self.device(lambda: self._copied[:size].copy_(self._flush[:size]))
        return 2 * size / spent / 1e3

    def add_host(self, name: str, run: Callable[[], object]) -> None:
        """Time a call that is the host's work for the most part."""
        self.lines.append(Line(name, self.call(run), self.alone(run)))

    def add_device(self, name: str, run: Callable[[], object], moved: int) -> None:
        """Time a call that moves bytes: ``moved`` of them read and written."""
        spent = self.device(run)
        rate = moved / spent / 1e3
        self.lines.append(Line(name, 0.0, 0.0, spent, rate, rate / self.copy_rate(moved)))


def require(condition: bool, what: str) -> None:
    """Stop when a result is wrong: its time would mean nothing."""
    if not condition:
        raise click.ClickException(f"wrong result: {what}")


def copy_ceiling(bench: Bench) -> None:
    """Measure the fastest copy that there is."""
    rate = bench.copy_rate(2 << 30)
    bench.lines.append(Line("copy of 1 GiB", 0.0, 0.0, (2 << 30) / rate / 1e3, rate, 1.0))


def allocation(bench: Bench) -> None:
    """Allocate 8 requests of 1,024 tokens as device slots, and free their pages."""
    sharded = PageInterleavePoolAllocator(
        POOL_PAGES // RANKS * PAGE, PAGE, RANKS, torch.bfloat16, "cuda", None, False
    )
    paged = PagedTokenToKVPoolAllocator(
        POOL_PAGES * PAGE, PAGE, torch.bfloat16, "cuda", None, False
    )
    lens = [CHUNK] * REQUESTS
    zeros = [0] * REQUESTS
    out = torch.empty(sum(lens), dtype=torch.int64, device="cuda")

    def sharded_round() -> None:
        placed = sharded.alloc_extend_pages(zeros, lens, [None] * REQUESTS)
        assert placed is not None, "the pool is large enough"
        sharded.io.fill_pages(out, placed.pages, PAGE)
        sharded.free_pages(placed.pages)

    def paged_round() -> None:
        placed = paged.alloc_extend_pages(zeros, lens, [None] * REQUESTS)
        assert placed is not None, "the pool is large enough"
        paged.io.fill_pages(out, placed.pages, PAGE)
        paged.free_pages(placed.pages)

    placed = sharded.alloc_extend_pages(zeros, lens, [None] * REQUESTS)
    assert placed is not None, "the pool is large enough"
    sharded.io.fill_pages(out, placed.pages, PAGE)
    expected = placed.pages[:, None] * PAGE + np.arange(PAGE)
    require(bool((out.cpu().numpy() == expected.reshape(-1)).all()), "slots of pages")
    sharded.free_pages(placed.pages)
    bench.add_host("alloc + free 8 x 1k, 8 ranks, 1M pages", sharded_round)
    bench.add_host("alloc + free 8 x 1k, unsharded", paged_round)


def planning(bench: Bench) -> None:
    """Plan 8 requests of 64k prefix and 1k chunk, and translate all their slots."""
    spec = PageShardSpec(0, RANKS, PAGE, REQUESTS * PREFIX, REQUESTS * CHUNK)
    pool = PageInterleavePoolAllocator(
        POOL_PAGES // RANKS * PAGE, PAGE, RANKS, None, None, None, False
    )
    seq = PREFIX + CHUNK
    placed = pool.alloc_extend_pages([0] * REQUESTS, [seq] * REQUESTS, [None] * REQUESTS)
    assert placed is not None, "the pool is large enough"
    table = placed.pages.reshape(REQUESTS, -1)
    rows, prefixes, lens = list(range(REQUESTS)), [PREFIX] * REQUESTS, [seq] * REQUESTS
    planner = ShardExtendPlanner(spec, layout=pool.layout, device="cuda")
    twin = ShardExtendPlanner(spec, layout=pool.layout, device="cpu")

    def plan() -> object:
        return planner.begin_shard_extend(table, rows, prefixes, lens)

    plan()
    twin.begin_shard_extend(table, rows, prefixes, lens)
    require(bool((planner.page_pos.cpu() == twin.page_pos).all()), "page table of a plan")
    bench.add_host("plan 8 x 64k + 1k, host page table", plan)
    slots = (table[:, :, None] * PAGE + np.arange(PAGE)).reshape(-1)
    host = torch.from_numpy(slots)
    for dtype in (torch.int64, torch.int32):
        loc = host.to("cuda", dtype)
        expected = translate_locs(host, twin.page_pos, PAGE)
        got = translate_locs(loc, planner.page_pos, PAGE)
        require(bool((got.cpu() == expected).all()), f"translation of {dtype}")
        bench.add_device(
            f"translate {loc.numel():,} slots, {str(dtype).removeprefix('torch.')}",
            lambda loc=loc: translate_locs(loc, planner.page_pos, PAGE),
            loc.numel() * (loc.element_size() + 8),
        )


def packing(bench: Bench) -> None:
    """Pack this rank's pages of a 512k-token prefix into its send block."""
    pages = REQUESTS * PREFIX // PAGE // RANKS
    rng = np.random.default_rng(1)
    pool_pages = 4 * pages
    send = torch.from_numpy(rng.permutation(pool_pages)[:pages]).to("cuda")
    for name, widths in (("MLA 576", (sum(MLA_WIDTHS),)), ("K + V 8x128", (HEAD_WIDTH,) * 2)):
        parts = [
            torch.randint(-9999, 9999, (pool_pages * PAGE, w), dtype=torch.int16, device="cuda")
            for w in widths
        ]
        out = torch.empty(pages * PAGE, sum(widths), dtype=torch.int16, device="cuda")
        pack_pages(out, parts, send, PAGE)
        expected = torch.cat(
            [p.view(-1, PAGE, p.shape[1])[send].view(-1, p.shape[1]) for p in parts], dim=1
        )
        require(torch.equal(out, expected), f"pack of {name}")
        bench.add_device(
            f"pack {name}, {pages} pages",
            lambda out=out, parts=parts: pack_pages(out, parts, send, PAGE),
            2 * out.numel() * out.element_size(),
        )


def writing(bench: Bench) -> None:
    """Write a chunk of 8k tokens: all rows to the scratch, the owned eighth to the pool."""
    pages = CHUNK_ROWS // PAGE
    rng = np.random.default_rng(2)
    local = torch.from_numpy(rng.permutation(4 * pages)[:pages])
    rows = (local[:, None] * PAGE + torch.arange(PAGE)).view(-1)
    owned = torch.arange(pages).repeat_interleave(PAGE) % RANKS == 0
    pool_rows = torch.where(owned, rows, -1).to("cuda")
    scratch_rows = torch.arange(CHUNK_ROWS, device="cuda") + 2 * PAGE
    for name, widths in (("MLA 512 + 64", MLA_WIDTHS), ("K + V 8x128", (HEAD_WIDTH,) * 2)):
        values = [torch.randn(CHUNK_ROWS, w, device="cuda").bfloat16() for w in widths]
        targets = [
            torch.zeros(4 * pages * PAGE, w, dtype=torch.int16, device="cuda") for w in widths
        ]
        scratch = torch.zeros(CHUNK_ROWS + 3 * PAGE, sum(widths), dtype=torch.int16, device="cuda")

        def store(
            values: list[torch.Tensor] = values,
            targets: list[torch.Tensor] = targets,
            scratch: torch.Tensor = scratch,
        ) -> None:
            store_rows(values, torch.bfloat16, targets, pool_rows, scratch, scratch_rows)

        store()
        bits = torch.cat(values, dim=1).view(torch.int16)
        require(torch.equal(scratch[2 * PAGE : 2 * PAGE + CHUNK_ROWS], bits), f"stage {name}")
        kept = [v.view(torch.int16)[owned.to("cuda")] for v in values]
        found = [t[pool_rows[pool_rows >= 0]] for t in targets]
        require(all(map(torch.equal, kept, found)), f"persist {name}")
        moved = bits.numel() * 2 * 2 + sum(k.numel() for k in kept) * 2
        bench.add_device(f"write 8k rows, {name}", store, moved)


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--repeats", default=50, help="Calls of each measurement; figures are medians.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Write figures here.")
def main(repeats: int, json_path: Path | None) -> None:
    """Check, time and print."""
    if not torch.cuda.is_available():
        raise click.ClickException("no CUDA device is here")
    bench = Bench(repeats)
    for section in (copy_ceiling, allocation, planning, packing, writing):
        section(bench)
    table = Table(title=f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for column in ("", "call µs", "alone µs", "device µs", "GB/s", "of copy"):
        table.add_column(column, justify="right" if column else "left")
    for line in bench.lines:
        times = (line.call_us, line.alone_us, line.device_us)
        table.add_row(
            line.name,
            *(f"{spent:.1f}" if spent else "-" for spent in times),
            f"{line.gbytes_s:,.0f}" if line.gbytes_s else "-",
            f"{line.share:.0%}" if line.share else "-",
        )
    Console(width=100).print(table)
    if json_path is not None:
        json_path.write_text(json.dumps([asdict(line) for line in bench.lines], indent=2))


if __name__ == "__main__":
    main()
