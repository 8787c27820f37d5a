"""Bandwidth of the gather one layer ahead, and how much of it hides behind a layer's arithmetic.

    python -m benchmarks gather [--ranks 2] [--backend nccl] [--compute 0.5,1.25,2] [--json FILE]

Every rank is a process; over NCCL it has a GPU. One batch's prefix, its pages at random places of
the pool, is gathered layer by layer under one plan. What arrives is checked before it is timed.

    bare       all-gathers of as many bytes in place, on the same communicator
    gather     the gather's own all-gathers, from the end of packing until they can be read
    + packing  layer after layer as pools do it, nothing computed in between
    hidden     share of that which adds nothing to the time of layers that compute; the first
               layer's gather, which no layer precedes, is left out

Bus bandwidth is bytes gathered * (N - 1) / N over time. Times are from CUDA events, over Gloo from
the host's clock; each is the slowest rank's. What is compared is timed in turn, in shuffled order.
Over Gloo ranks share the cores that their gathers need, so only GPUs say what hides.
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from time import perf_counter
from typing import IO, Any

import click
import numpy as np
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from alloc import IntArray, PageShardSpec
from benchmarks.harness import show, write_json
from scratch import (
    GatherGroup,
    PageInterleaveMHATokenToKVPool,
    PageInterleaveMLATokenToKVPool,
    PendingGather,
    ShardGroup,
)

DTYPE = torch.bfloat16
KINDS = {"MLA 512 + 64": (512, 64), "K + V 8x128": (8, 128)}
"""What a row is: latent and rope of MLA, or heads and their size."""

Row = dict[str, object]


@dataclass(frozen=True)
class Setup:
    """What is measured.

    Attributes:
        backend: nccl or gloo.
        ranks: processes.
        prefix_tokens: tokens gathered for each layer, whole pages on all ranks.
        page: tokens of a page.
        layers: layers of the pool; all but the first are timed.
        tokens: rows of a layer's matrices.
        hidden: columns of a layer's matrices.
        compute: times of a layer's arithmetic to try, in times of a gather.
        repeats: runs of each measurement.
    """

    backend: str
    ranks: int
    prefix_tokens: int
    page: int
    layers: int
    tokens: int
    hidden: int
    compute: tuple[float, ...]
    repeats: int


class Clock:
    """Marks moments of one rank: CUDA events on the current stream, or the host's time."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.on_gpu = device.type == "cuda"

    def mark(self) -> Any:
        """Return this moment."""
        if not self.on_gpu:
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def ms(self, start: Any, end: Any) -> float:
        """Return milliseconds between two moments that have passed."""
        return float(start.elapsed_time(end)) if self.on_gpu else (end - start) * 1e3

    def align(self) -> None:
        """Wait for all ranks and for all work on this one's device."""
        dist.all_reduce(torch.zeros(1, device=self.device))
        self.finish()

    def finish(self) -> None:
        """Wait for all work on the device."""
        if self.on_gpu:
            torch.cuda.synchronize(self.device)


@dataclass
class TimedGroup:
    """A group that notes the moments around each of its gathers.

    Attributes:
        group: the ranks.
        clock: what notes them.
        spans: start and end of every gather that was waited for.
    """

    group: GatherGroup
    clock: Clock
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def rank(self) -> int:
        """This rank."""
        return self.group.rank

    @property
    def size(self) -> int:
        """Ranks of the group."""
        return self.group.size

    def all_gather(self, blocks: torch.Tensor) -> TimedGather:
        """Start a gather; see ``GatherGroup``."""
        start = self.clock.mark()
        return TimedGather(self, start, self.group.all_gather(blocks))


@dataclass
class TimedGather:
    """A gather that was started at a known moment."""

    group: TimedGroup
    start: Any
    pending: PendingGather

    def wait(self) -> None:
        """Wait, and note when it was over for whoever waits."""
        self.pending.wait()
        self.group.spans.append((self.start, self.group.clock.mark()))


class World:
    """One rank's pool, with a plan whose prefix lies anywhere in it.

    Args:
        setup: sizes.
        kind: a name of ``KINDS``.
        group: the ranks.
    """

    def __init__(self, setup: Setup, kind: str, group: TimedGroup) -> None:
        self.setup, self.group, self.clock = setup, group, group.clock
        self.device = group.clock.device
        spec = PageShardSpec(group.rank, group.size, setup.page, setup.prefix_tokens, setup.page)
        pages = setup.prefix_tokens // setup.page
        mla, mha = PageInterleaveMLATokenToKVPool, PageInterleaveMHATokenToKVPool
        make = mla if kind.startswith("MLA") else mha
        self.pool = make(
            2 * pages // group.size * setup.page,
            setup.page,
            DTYPE,
            *KINDS[kind],
            setup.layers,
            self.device,
            shard_spec=spec,
            shard_group=group,
        )
        for layer_id, parts in enumerate(self.pool.layer_rows()):
            self._fill(layer_id, parts)
        tokens = setup.prefix_tokens
        self.plan = self.pool.begin_shard_extend(self._table(pages), [0], [tokens], [tokens])
        self.pool.end_shard_extend()
        self.gather = self.pool.shard.gather
        width, rows = self.pool.row_bytes // DTYPE.itemsize, setup.prefix_tokens
        self.bare_slots = [
            torch.zeros((rows, width), dtype=torch.int16, device=self.device) for _ in range(2)
        ]

    @property
    def gathered_bytes(self) -> int:
        """Bytes that each rank has after a gather."""
        return self.setup.prefix_tokens * self.pool.row_bytes

    def _table(self, pages: int) -> IntArray:
        """Return pages on consecutive ranks, at random places of each: int64[1, pages]."""
        layout, ranks = self.pool.shard.planner.layout, self.setup.ranks
        rng = np.random.default_rng(0)
        table = np.empty((1, pages), dtype=np.int64)
        for owner in range(ranks):
            local = rng.permutation(layout.pages_per_class)[: pages // ranks] + 1
            table[0, owner::ranks] = layout.page_at(np.full(len(local), owner), local)
        return table

    def _fill(self, layer_id: int, parts: tuple[torch.Tensor, ...]) -> None:
        rows = torch.arange(len(parts[0]), device=self.device)
        values = self._pattern(layer_id, torch.full_like(rows, self.group.rank), rows)
        drawn = torch.split(values, [part.shape[1] for part in parts], dim=1)
        for part, bits in zip(parts, drawn, strict=True):
            part.copy_(bits)

    def _pattern(self, layer_id: int, owners: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """Return what lies in rows of ranks' pools: int16[n, width]."""
        width = self.pool.row_bytes // DTYPE.itemsize
        columns = torch.arange(width, dtype=torch.int32, device=self.device)
        firsts = ((rows * 31 + owners * 7 + layer_id * 3) % 32749).to(torch.int32)
        return ((firsts[:, None] + columns) % 32749).to(torch.int16)

    def check(self) -> None:
        """Gather every layer and compare all that arrives."""
        layout, page = self.pool.shard.planner.layout, self.setup.page
        pages = self.plan.prefix_pages[np.argsort(self.plan.prefix_places)]
        owners = torch.from_numpy(layout.class_of(pages)).to(self.device).repeat_interleave(page)
        firsts = torch.from_numpy(layout.local_page(pages)).to(self.device) * page
        rows = (firsts[:, None] + torch.arange(page, device=self.device)).view(-1)
        self.gather.begin(self.plan)
        for layer_id in range(self.setup.layers):
            found = self.gather.read(layer_id)[: self.setup.prefix_tokens]
            if not torch.equal(found, self._pattern(layer_id, owners, rows)):
                raise RuntimeError(f"wrong result: layer {layer_id} on rank {self.group.rank}")
        self.gather.end()

    def bare(self) -> float:
        """Return milliseconds of bare all-gathers, one for every layer but the first."""
        self.clock.align()
        start = self.clock.mark()
        for layer_id in range(1, self.setup.layers):
            self.group.group.all_gather(self.bare_slots[layer_id % 2]).wait()
        end = self.clock.mark()
        self.clock.finish()
        return self.clock.ms(start, end)

    def layered(self, compute: Callable[[], None] = lambda: None) -> tuple[float, float]:
        """Return milliseconds from the first layer's prefix to the last's, and of the gathers.

        Args:
            compute: what a layer does between its read and the next.
        """
        self.clock.align()
        self.group.spans.clear()
        self.gather.begin(self.plan)
        self.gather.read(0)
        start = self.clock.mark()
        for layer_id in range(1, self.setup.layers):
            compute()
            self.gather.read(layer_id)
        end = self.clock.mark()
        self.gather.end()
        self.clock.finish()
        return self.clock.ms(start, end), sum(self.clock.ms(*s) for s in self.group.spans[1:])

    def computed(self, compute: Callable[[], None]) -> float:
        """Return milliseconds of as many layers' arithmetic alone."""
        self.clock.align()
        start = self.clock.mark()
        for _ in range(1, self.setup.layers):
            compute()
        end = self.clock.mark()
        self.clock.finish()
        return self.clock.ms(start, end)


class Layer:
    """A layer's arithmetic: matrix products, as many as its time takes.

    Args:
        setup: sizes.
        device: where.
    """

    def __init__(self, setup: Setup, device: torch.device) -> None:
        dtype = DTYPE if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        shapes = (setup.tokens, setup.hidden), (setup.hidden, setup.hidden)
        self._x, self._w = (
            torch.randn(shape, dtype=dtype, device=device, generator=generator) for shape in shapes
        )
        self._out = torch.empty_like(self._x)
        self.products = 1

    def __call__(self) -> None:
        """Multiply."""
        for _ in range(self.products):
            torch.mm(self._x, self._w, out=self._out)


def slowest(times: list[float], clock: Clock) -> list[float]:
    """Return each time of the rank that took longest; every rank calls it."""
    values = torch.tensor(times, dtype=torch.float64, device=clock.device)
    dist.all_reduce(values, op=dist.ReduceOp.MAX)
    return [float(value) for value in values.tolist()]


def measure(setup: Setup, kind: str, group: TimedGroup) -> list[Row]:
    """Check, then time one kind of rows; every rank calls it and returns the same."""
    world = World(setup, kind, group)
    world.check()
    times = _time_shuffled({"bare": lambda: (world.bare(),), "layered": world.layered}, world)
    steps = setup.layers - 1
    (bare,), (layered, collective) = (
        np.median(times[name], axis=0) / steps for name in ("bare", "layered")
    )
    moved = world.gathered_bytes * (setup.ranks - 1) / setup.ranks
    bandwidth: Row = {
        "measure": "bandwidth",
        "kind": kind,
        "gathered_bytes": world.gathered_bytes,
        "bare_gbytes_s": moved / bare / 1e6,
        "gather_gbytes_s": moved / collective / 1e6,
        "gather_of_bare": bare / collective,
        "with_packing_gbytes_s": moved / layered / 1e6,
        "with_packing_of_bare": bare / layered,
    }
    return [bandwidth, *(measure_hidden(world, kind, n, float(layered)) for n in setup.compute)]


def measure_hidden(world: World, kind: str, wanted: float, gather_ms: float) -> Row:
    """Time layers that compute for ``wanted`` times as long as their gather, with it and without.

    Args:
        world: the pool.
        kind: what its rows are.
        wanted: times of a gather.
        gather_ms: milliseconds of a layer's gather with packing, nothing computed.
    """
    setup, layer = world.setup, Layer(world.setup, world.device)
    world.computed(layer)  # the first products choose their kernels
    layer.products = 10
    unit = slowest([min(world.computed(layer) for _ in range(3))], world.clock)[0]
    unit /= (setup.layers - 1) * layer.products
    layer.products = max(1, math.ceil(wanted * gather_ms / unit))
    cases = {"alone": lambda: (world.computed(layer),), "both": lambda: world.layered(layer)}
    times = _time_shuffled(cases, world)
    steps = setup.layers - 1
    alone, both = times["alone"][:, 0] / steps, times["both"][:, 0] / steps
    exposed = max(0.0, float(np.median(both - alone)))
    return {
        "measure": "hidden",
        "kind": kind,
        "compute_wanted": wanted,
        "compute_of_gather": float(np.median(alone)) / gather_ms,
        "gather_ms": gather_ms,
        "compute_ms": float(np.median(alone)),
        "both_ms": float(np.median(both)),
        "hidden": 1.0 - exposed / gather_ms,
    }


def _time_shuffled(
    cases: dict[str, Callable[[], tuple[float, ...]]], world: World
) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
    """Run all cases in turn, every round in another order: the slowest rank's times, by name."""
    order, names = Random(0), list(cases)
    for run in cases.values():
        run()
    found: dict[str, list[list[float]]] = {name: [] for name in names}
    for _ in range(world.setup.repeats):
        order.shuffle(names)
        for name in names:
            found[name].append(slowest(list(cases[name]()), world.clock))
    return {name: np.array(times) for name, times in found.items()}


def _run_rank(rank: int, setup: Setup, folder: str) -> None:
    """Be one rank; rank 0 leaves the figures in the folder."""
    torch.set_num_threads(1)
    device = torch.device("cpu")
    if setup.backend == "nccl":
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")  # multicast is the host's, not one group's
        device = torch.device("cuda", rank)
        torch.cuda.set_device(device)
    store = Path(folder, "store").as_uri()
    dist.init_process_group(setup.backend, init_method=store, rank=rank, world_size=setup.ranks)
    group = TimedGroup(ShardGroup.dedicated(), Clock(device))
    rows = [row for kind in KINDS for row in measure(setup, kind, group)]
    if rank == 0:
        Path(folder, "figures.json").write_text(json.dumps(rows))
    dist.destroy_process_group()  # after an error it could wait for ranks that are gone


def run(setup: Setup) -> list[Row]:
    """Start the ranks and return their figures."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_run_rank, (setup, folder), nprocs=setup.ranks)  # type: ignore[no-untyped-call]
        rows: list[Row] = json.loads(Path(folder, "figures.json").read_text())
    return rows


def report(setup: Setup, rows: list[Row]) -> None:
    """Print both tables."""
    bandwidth, hidden = [], []
    for row in rows:
        figures: dict[str, Any] = row
        if row["measure"] == "bandwidth":
            rates = ("bare_gbytes_s", "gather_gbytes_s", "with_packing_gbytes_s")
            bare, gather, packing = (f"{figures[name]:,.2f}" for name in rates)
            shares = ("gather_of_bare", "with_packing_of_bare")
            of_bare, packing_of_bare = (f"{figures[name]:.1%}" for name in shares)
            mib = f"{figures['gathered_bytes'] / 2**20:,.1f}"
            bandwidth.append(
                [figures["kind"], mib, bare, gather, of_bare, packing, packing_of_bare]
            )
        else:
            times = (f"{figures[name]:.3f}" for name in ("gather_ms", "compute_ms", "both_ms"))
            ratio = f"{figures['compute_of_gather']:.2f}"
            hidden.append([figures["kind"], ratio, *times, f"{figures['hidden']:.1%}"])
    what = f"{setup.ranks} ranks over {setup.backend}, {setup.prefix_tokens:,} prefix tokens"
    headings = ["a layer's rows", "MiB", "bare", "gather", "of bare", "+ packing", "of bare"]
    show(f"Bus bandwidth in GB/s: {what}, page {setup.page}", headings, bandwidth)
    click.echo()
    headings = [
        "a layer's rows",
        "compute /\ngather",
        "gather ms",
        "compute ms",
        "both ms",
        "hidden",
    ]
    note = (
        "both: a layer that computes while the next one's prefix travels; hidden: share of the "
        "gather, with packing, that it does not pay for"
    )
    show("Gather behind compute, a layer", headings, hidden, note)


def make_setup(backend: str | None, ranks: int, prefix_tokens: int | None, **rest: Any) -> Setup:
    """Return what to measure; small on CPUs.

    Raises:
        click.ClickException: NCCL was asked for, and there are fewer GPUs than ranks.
    """
    gpus = torch.cuda.device_count()
    backend = backend or ("nccl" if gpus >= ranks else "gloo")
    if backend == "nccl" and gpus < ranks:
        raise click.ClickException(
            f"--backend nccl needs a GPU a rank: {ranks} ranks, {gpus} GPUs here; "
            f"take fewer --ranks, or --backend gloo"
        )
    on_gpu = backend == "nccl"
    tokens, hidden = (1024, 4096) if on_gpu else (64, 128)
    groups = -(-(prefix_tokens or (131_072 if on_gpu else 4096)) // (ranks * rest["page"]))
    whole = groups * ranks * rest["page"]
    return Setup(backend, ranks, whole, tokens=tokens, hidden=hidden, **rest)


@click.command(help=(__doc__ or "").splitlines()[0])
@click.option("--backend", type=click.Choice(["nccl", "gloo"]), help="Default: NCCL with GPUs.")
@click.option("--ranks", type=click.IntRange(2), default=2, show_default=True)
@click.option("--prefix-tokens", type=click.IntRange(1), help="Gathered for each layer.")
@click.option("--page", type=click.IntRange(1), default=64, show_default=True)
@click.option("--layers", type=click.IntRange(2), default=9, show_default=True)
@click.option("--compute", default="0.5,1.25,2", show_default=True, help="Times of a gather.")
@click.option("--repeats", type=click.IntRange(1), default=20, show_default=True)
@click.option("--json", "file", type=click.File("w"), help="Write the figures here.")
def main(
    backend: str | None,
    ranks: int,
    prefix_tokens: int | None,
    page: int,
    layers: int,
    compute: str,
    repeats: int,
    file: IO[str] | None,
) -> None:
    """Run and print."""
    try:
        times = tuple(float(part) for part in compute.split(","))
    except ValueError:
        times = (0.0,)
    if min(times) <= 0:
        raise click.BadParameter(f"--compute {compute!r}: give times above 0, as in 0.5,2")
    setup = make_setup(
        backend, ranks, prefix_tokens, page=page, layers=layers, compute=times, repeats=repeats
    )
    rows = run(setup)
    report(setup, rows)
    write_json(file, "gather", rows)


if __name__ == "__main__":
    main()
