"""Microseconds of the tree's operations on workloads a to d, ours and, if importable, peers'.

    python -m benchmarks.tree [--workload a,b] [--page 16,64] [--scale 0.1] [--peer PATH] [--json F]

All contenders run in one process, in an order that is shuffled in every round; each figure is the
median of the rounds. ``loop`` is the sum of a request's operations; the room for it is part of it.
"""

from __future__ import annotations

import gc
import random
from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter_ns
from typing import IO

import click

from benchmarks import harness
from benchmarks.contenders import Contender, Ours
from benchmarks.workloads import Workload, unique, workloads

OPERATIONS = ("key", "match", "miss", "lock", "indices", "evict", "alloc", "insert", "unlock")
COLUMNS = (*OPERATIONS, "loop")
MISSES = 200
Maker = Callable[[int, int], Contender]


@dataclass
class Times:
    """Nanoseconds and calls of each operation in one run."""

    total: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERATIONS, 0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(OPERATIONS, 0))
    requests: int = 0

    def add(self, operation: str, nanoseconds: int) -> None:
        """Count one call."""
        self.total[operation] += nanoseconds
        self.calls[operation] += 1

    def microseconds(self) -> dict[str, float]:
        """Return the mean of each operation that was called, and of the loop."""
        means = {op: self.total[op] / n / 1e3 for op, n in self.calls.items() if n}
        if self.requests:
            spent = sum(ns for op, ns in self.total.items() if op != "miss")
            means["loop"] = spent / self.requests / 1e3
        return means


def serve(contender: Contender, prompts: Iterable[array[int]], page_size: int) -> Times:
    """Send prompts through match, lock, room, insert, unlock."""
    times, now = Times(), perf_counter_ns
    for tokens in prompts:
        start = now()
        contender.key(tokens)
        t0 = now()
        matched = contender.match()
        t1 = now()
        contender.lock()
        t2 = now()
        contender.indices()
        t3 = now()
        need = len(tokens) // page_size * page_size - matched
        if not contender.room(need):
            contender.evict(need)
            times.add("evict", now() - t3)
        t4 = now()
        contender.alloc(need)
        t5 = now()
        contender.prepare_insert()
        t6 = now()
        contender.insert()
        t7 = now()
        contender.unlock()
        t8 = now()
        for operation, spent in (
            ("key", t0 - start),
            ("match", t1 - t0),
            ("lock", t2 - t1),
            ("indices", t3 - t2),
            ("alloc", t5 - t4),
            ("insert", t7 - t6),
            ("unlock", t8 - t7),
        ):
            times.add(operation, spent)
        times.requests += 1
    return times


def miss(contender: Contender, times: Times) -> None:
    """Match prompts that share nothing with what is cached."""
    for prompt in unique(MISSES, 4096, seed=99):
        contender.key(array("q", prompt.tobytes()))
        start = perf_counter_ns()
        contender.match()
        times.add("miss", perf_counter_ns() - start)


def run(
    workload: Workload, page_size: int, makers: dict[str, Maker], rounds: int, seed: int
) -> dict[str, dict[str, float]]:
    """Return the median of each operation for each contender, in microseconds."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in makers}
    order = random.Random(seed)
    prompts = [array("q", prompt.tobytes()) for prompt in workload.prompts()]
    for _ in range(rounds):
        names = list(makers)
        order.shuffle(names)
        for name in names:
            contender = makers[name](workload.pool_tokens, page_size)
            gc.collect()
            times = serve(contender, prompts, page_size)
            miss(contender, times)
            found[name].append(times.microseconds())
    return {
        name: {op: median(one[op] for one in runs) for op in runs[0]}
        for name, runs in found.items()
    }


def table(results: dict[str, dict[str, float]]) -> list[list[str]]:
    """Return a line per contender; the others' carry the ratio to the first."""
    first = next(iter(results.values()))
    lines = []
    for name, line in results.items():
        lines.append([name, *(f"{line[c]:.1f}" if c in line else "-" for c in COLUMNS)])
        if line is not first:
            lines.append(
                ["", *(f"{line[c] / first[c]:.1f}x" if c in line else "" for c in COLUMNS)]
            )
    return lines


def contenders(peer: Path | None) -> dict[str, Maker]:
    """Return what makes each contender."""
    makers: dict[str, Maker] = {
        "ours": lambda size, page: Ours(size, page),
        "match + lock": lambda size, page: Ours(size, page, fused=True),
        "from root": lambda size, page: Ours(size, page, use_handle=False),
    }
    if peer is not None:
        from benchmarks import peers

        for backend in peers.find(peer):
            name = f"sglang {backend}"
            makers[name] = lambda size, page, b=backend: peers.SglangCache(b, size, page)
    return makers


@click.command(help=__doc__.splitlines()[0] if __doc__ else None)
@click.option("--workload", "letters", default="a,b,c,d", help="Workloads, by letter.")
@click.option("--page", "pages", default="16,64", help="Page sizes.")
@click.option("--scale", default=0.25, help="Share of the workloads' chats, agents and prompts.")
@click.option("--rounds", default=3, help="Runs of each contender; figures are medians.")
@click.option("--seed", default=0, help="Seed of the order of contenders.")
@click.option("--peer", type=click.Path(path_type=Path, exists=True), help="Folder of a peer.")
@click.option("--json", "json_file", type=click.File("w"), help="Write figures here.")
def main(
    letters: str,
    pages: str,
    scale: float,
    rounds: int,
    seed: int,
    peer: Path | None,
    json_file: IO[str] | None,
) -> None:
    """Run and print."""
    found: list[dict[str, object]] = []
    makers = contenders(peer)
    known = workloads(scale)
    for letter in letters.split(","):
        for page in map(int, pages.split(",")):
            results = run(known[letter], page, makers, rounds, seed)
            title = f"workload {letter}, page {page}: microseconds per call"
            harness.show(title, ["", *COLUMNS], table(results))
            found += [
                {"workload": letter, "page_size": page, "contender": name, **line}
                for name, line in results.items()
            ]
    harness.write_json(json_file, "tree", found)


if __name__ == "__main__":
    main()
