"""The command line: runs the same chats in every mode and prints what each saved."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import click
import torch
from rich import box
from rich.console import Console
from rich.table import Table

from examples.tiny_engine.compare import Agreement, compare, smallest_margin
from examples.tiny_engine.engine import EngineConfig, RunResult
from examples.tiny_engine.model import ModelConfig, Variant
from examples.tiny_engine.ranks import Job, Meeting, run_ranks
from examples.tiny_engine.workload import Chat, WorkloadConfig, make_chats

VARIANTS: tuple[Variant, ...] = get_args(Variant)


@dataclass(frozen=True, slots=True)
class Mode:
    """One way to serve the chats."""

    name: str
    engine: EngineConfig
    ranks: int = 1


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a mode did with one variant."""

    mode: Mode
    results: list[RunResult]
    agreement: Agreement


def make_modes(engine: EngineConfig, ranks: Sequence[int], meeting: Meeting) -> list[Mode]:
    """Return no cache, one rank, and each number of ranks; the first is the reference."""
    return [
        Mode("no cache", replace(engine, use_cache=False)),
        Mode("1 rank", engine),
        *(Mode(f"{n} {meeting}", engine, n) for n in ranks),
    ]


def run_modes(
    models: Sequence[ModelConfig], modes: Sequence[Mode], chats: Sequence[Chat], meeting: Meeting
) -> list[list[Outcome]]:
    """Run every mode with every model; return each model's outcomes in the order of the modes."""
    by_mode = [
        run_ranks([Job(model, mode.engine, chats) for model in models], mode.ranks, meeting)
        for mode in modes
    ]
    return [
        [
            Outcome(mode, runs[i], compare(runs[i], by_mode[0][i][0]))
            for mode, runs in zip(modes, by_mode, strict=True)
        ]
        for i in range(len(models))
    ]


def make_table(outcomes: Sequence[Outcome]) -> Table:
    """Return a column a mode."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("")
    for outcome in outcomes:
        table.add_column(outcome.mode.name, justify="right")
    figures = [_figures(outcome) for outcome in outcomes]
    for name in figures[0]:
        table.add_row(name, *(figure[name] for figure in figures))
    return table


def _figures(outcome: Outcome) -> dict[str, str]:
    result, agreement = outcome.results[0], outcome.agreement
    stats = result.stats
    overhead = result.gathered_pages / result.prefix_pages if result.prefix_pages else None
    return {
        "pages in the pool": f"{outcome.mode.ranks * outcome.mode.engine.pages_per_rank}",
        "prefill tokens computed": f"{stats.computed_tokens}",
        "prefill tokens saved": f"{stats.saved_tokens}",
        "  of all": f"{stats.saved_tokens / stats.prompt_tokens:.0%}",
        "pages evicted": f"{stats.evicted_pages}",
        "inserts declined": f"{stats.declined_inserts}",
        "requests preempted": f"{stats.preemptions}",
        "prefill batches": f"{stats.batches}",
        "  planned ahead": f"{stats.overlapped_batches}",
        "pages gathered / needed": "-" if overhead is None else f"{overhead:.2f}",
        "same tokens": "yes" if agreement.same_answers else "NO",
        "same state on all ranks": "yes" if agreement.same_state else "NO",
        "largest logit difference": f"{agreement.logit_difference:.1e}",
    }


def parse_ranks(_context: click.Context, _option: click.Parameter, value: str) -> list[int]:
    """Read numbers of ranks: ``2,4``, or nothing for no sharded mode."""
    try:
        ranks = [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        ranks = [0]
    if any(n < 2 for n in ranks):
        raise click.BadParameter(f"{value!r}: give numbers of ranks from 2 on, as in 2,4")
    return ranks


def choose_meeting(device: str, wanted: Meeting | None, ranks: int) -> Meeting:
    """Return what the ranks are; the default is a process each where they can have one.

    Raises:
        click.BadParameter: there is no GPU, or not one for each of the processes asked for.
    """
    if device == "cpu":
        return wanted or "processes"
    if not torch.cuda.is_available():
        raise click.BadParameter("--device cuda needs a GPU that torch can use")
    gpus = torch.cuda.device_count()
    if wanted == "processes" and gpus < ranks:
        raise click.BadParameter(
            f"--meeting processes needs a GPU a rank: {ranks} ranks, {gpus} here; "
            f"take fewer --ranks, or leave --meeting out for threads"
        )
    return wanted or ("processes" if gpus >= ranks else "threads")


@click.command()
@click.option("--variant", type=click.Choice([*VARIANTS, "both"]), default="both")
@click.option("--ranks", callback=parse_ranks, default="2,4", help="Sharded modes, as 2,4.")
@click.option("--rotation", type=click.Choice(["seam", "chain"]), default="seam")
@click.option("--seed", default=0, help="Seed of the weights and of the chats.")
@click.option("--chats", "num_chats", default=16, help="Number of chats.")
@click.option("--pages", default=48, help="Pages of each rank's pool.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option(
    "--meeting",
    type=click.Choice(["processes", "threads"]),
    help="What ranks are. Default: processes, over Gloo on a CPU and over NCCL where every rank "
    "can have a GPU; else threads on one GPU.",
)
def main(
    variant: str,
    ranks: list[int],
    rotation: str,
    seed: int,
    num_chats: int,
    pages: int,
    device: str,
    meeting: Meeting | None,
) -> None:
    """Serve seeded chats with no cache, one rank, and N ranks; all must say the same."""
    meeting = choose_meeting(device, meeting, max(ranks, default=1))
    torch.set_num_threads(1)
    started = time.perf_counter()
    chosen = VARIANTS if variant == "both" else [v for v in VARIANTS if v == variant]
    chats = make_chats(WorkloadConfig(seed=seed, num_chats=num_chats))
    engine = EngineConfig(rotation=rotation, pages_per_rank=pages, device=device)
    models = [ModelConfig(v, seed=seed) for v in chosen]
    console = Console()
    with console.status("serving"):
        by_model = run_modes(models, make_modes(engine, ranks, meeting), chats, meeting)
    for model, outcomes in zip(models, by_model, strict=True):
        _report(console, model, engine, outcomes)
    console.print(f"{time.perf_counter() - started:.0f} s")
    if not all(outcome.agreement.holds for outcomes in by_model for outcome in outcomes):
        sys.exit("the modes disagree")


def _report(
    console: Console, model: ModelConfig, engine: EngineConfig, outcomes: Sequence[Outcome]
) -> None:
    reference = outcomes[0].results[0]
    answers = reference.answers
    console.print(
        f"{model.variant.upper()}, {model.num_layers} layers: {len(answers)} turns of chats, "
        f"{reference.stats.prompt_tokens} prompt tokens,\n"
        f"{sum(len(answer) for answer in answers.values())} tokens generated; "
        f"{engine.pages_per_rank} pages of {engine.page_size} tokens a rank, "
        f"{engine.rotation} rotation",
        highlight=False,
    )
    console.print(make_table(outcomes))
    console.print(
        f"No token's best two logits are closer than {smallest_margin(reference):.1e}.\n",
        highlight=False,
    )
