"""The command line: arguments only. What a command needs is imported when it runs."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from replay.errors import ReplayError
from replay.hits import DEFAULT, MEANINGS

if TYPE_CHECKING:
    from replay.synthetic import Spec

POLICIES = ("lru", "lfu", "fifo", "mru", "filo", "priority", "slru")
DEFAULT_CAPACITIES = "50k,100k,200k,500k,1M,5M"
CAPACITY_HELP = (
    "Tokens (500k, 5M, 512Ki), pages (1000p), or unbounded; a comma list; a range start:stop:step "
    "(1M:5M:1M) or start:stop:xFACTOR (1M:16M:x2). Reserved pages do not count; rounded down to "
    "whole pages."
)
SHARDS_HELP = (
    "Ranks that share one pool of N times the capacity, a number or a comma list (1,4,8). The "
    "capacity is then one rank's, and the replicated pool (1x) is shown beside each."
)
IN_FLIGHT_HELP = (
    "With --shards: requests that overlap, each planned before the others' inserts land; a number "
    "or a comma list. [default: 1]"
)
LAYOUT_HELP = (
    "With --shards: which rank a page lies on. interleave: pages go round the ranks; owner-lane: "
    "the rank that computes the page, in a prefill split zigzag over the ranks; or both, "
    "interleave,owner-lane. [default: interleave]"
)
ROTATION_HELP = (
    "With --layout interleave: where a tail below a cached prefix lies. chain: under its prefix's "
    "rotation base; seam: under a fresh base where it branches off, so that ranks fill evenly; or "
    "both, chain,seam. [default: seam; UnifiedRadixCache's own default is chain]"
)
LEASES_HELP = (
    "With --shards and --rotation chain: let requests in flight that share an uncached prefix "
    "choose their bases alone, to compare."
)
BLIND_HELP = "With --shards: evict in policy order only, whichever ranks are short, to compare."
HOST_HELP = (
    "A host tier of this capacity below each pool (with --shards, of each rank): evicted pages are "
    "copied to it and loaded back. Hits are then shown by tier."
)
DISK_HELP = "With --host-capacity: a disk tier below, which takes what the host evicts."
EXPAND_HELP = (
    "Make every block the token ids it stands for, so that pages hold many tokens: the same hits, "
    "a slower replay."
)
OUTPUT_HELP = "File to write; .gz, .zst and .xz are compressed. [default: stdout]"
EXAMPLES = """\b
Examples:
  rotaradix replay example
  rotaradix replay trace.jsonl.zst --capacity 1M:16M:x2
  rotaradix replay trace.jsonl --capacity 1M --shards 8 --in-flight 1,8
  rotaradix replay trace.jsonl --capacity 1M --host-capacity 10M --json
"""
HIT_HELP = (
    "What a hit is. D1 pages; D2 tokens, a partial tail weighs its length; D3 as an engine: whole "
    "pages, last token recomputed; D4 mean over requests; D5 as D2, second half of the requests."
)

Command = Callable[..., None]


class OneLineErrors(click.Group):
    """A group whose errors are one line on standard error, with exit status 2."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        """Run a command line; a user's mistake ends it with status 2."""
        run = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return run()
        try:
            status: object = run()
        except click.exceptions.NoArgsIsHelpError as error:
            click.echo(error.format_message(), err=True)
            sys.exit(2)
        except click.MissingParameter as error:
            path = error.ctx.command_path if error.ctx else "rotaradix"
            self._fail(f"{error.format_message()} See {path} --help", 2)
        except click.ClickException as error:
            self._fail(error.format_message(), 2)
        except ReplayError as error:
            self._fail(str(error), 2)
        except click.Abort:
            self._fail("interrupted", 130)
        except BrokenPipeError:
            # Whoever reads our output has left; Python would complain once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            sys.exit(1)
        sys.exit(status if isinstance(status, int) else 0)

    def _fail(self, message: str, status: int) -> None:
        line = " ".join(message.split())
        click.echo(f"rotaradix: {line}", err=True)
        sys.exit(status)


@click.group(cls=OneLineErrors)
@click.version_option(package_name="rotaradix")
def main() -> None:
    """Replay LLM request traces on a prefix cache, and generate such traces."""


@main.command(epilog=EXAMPLES)
@click.argument("trace")
@click.option(
    "--capacity",
    metavar="LIST",
    default=DEFAULT_CAPACITIES,
    show_default=True,
    help=CAPACITY_HELP,
)
@click.option(
    "--page-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens in a page. [default: the trace's block size; 16 for a trace of token ids]",
)
@click.option(
    "--policy",
    type=click.Choice(POLICIES),
    default="lru",
    show_default=True,
    help="What is evicted first. Traces carry no priorities, so priority acts as lru.",
)
@click.option(
    "--block-size",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens behind one id of the trace. [default: by format; Mooncake 512, Bailian 16]",
)
@click.option(
    "--hit", type=click.Choice(tuple(MEANINGS)), default=DEFAULT, show_default=True, help=HIT_HELP
)
@click.option("--expand", is_flag=True, help=EXPAND_HELP)
@click.option(
    "--limit", type=click.IntRange(min=1), metavar="N", help="Replay the first N requests only."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; every counter is an integer.")
@click.option("--shards", metavar="N", help=SHARDS_HELP)
@click.option("--in-flight", metavar="K", help=IN_FLIGHT_HELP)
@click.option("--layout", metavar="interleave|owner-lane", help=LAYOUT_HELP)
@click.option("--rotation", metavar="chain|seam", help=ROTATION_HELP)
@click.option("--no-leases", is_flag=True, help=LEASES_HELP)
@click.option("--blind-eviction", is_flag=True, help=BLIND_HELP)
@click.option("--host-capacity", metavar="CAPACITY", help=HOST_HELP)
@click.option("--disk-capacity", metavar="CAPACITY", help=DISK_HELP)
def replay(
    trace: str, capacity: str, block_size: int | None, hit: str, as_json: bool, **options: Any
) -> None:
    """Replay TRACE and report cache hits at each capacity.

    TRACE is a file (plain, gz, zst or xz), '-' for standard input, or the word 'example' for a
    built-in trace. Formats: Mooncake, Bailian, agent sessions, JSON lists of token ids.
    """
    from replay.capacity import parse_capacities
    from replay.commands import replay_trace
    from replay.schedule import ShardOptions
    from replay.sweep import SweepConfig
    from replay.tiered import TierOptions

    below = (options.pop("host_capacity"), options.pop("disk_capacity"))
    names = [field.name for field in fields(ShardOptions)]
    schedules = ShardOptions(**{name: options.pop(name) for name in names}).schedules()
    tiers = TierOptions.read(*below)
    config = SweepConfig(
        parse_capacities(capacity), definition=hit, schedules=schedules, tiers=tiers, **options
    )
    click.echo(replay_trace(trace, config, block_size=block_size, as_json=as_json))


@main.group()
def generate() -> None:
    """Write a seeded synthetic trace. Equal arguments give equal bytes."""


def _shared(command: Command) -> Command:
    """Add the options that all kinds of trace have."""
    options = (
        _count("--requests", 1000, "Prompts to write"),
        click.option(
            "--seed",
            type=click.IntRange(min=0),
            metavar="N",
            default=0,
            show_default=True,
            help="Another seed gives another trace.",
        ),
        click.option("--output", "-o", metavar="FILE", default="-", help=OUTPUT_HELP),
        click.option(
            "--block-size",
            type=click.IntRange(min=1),
            metavar="N",
            help="Write Mooncake lines with one id per N tokens, not token ids.",
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def _range(name: str, default: str, text: str) -> Callable[[Command], Command]:
    return click.option(
        name, metavar="RANGE", default=default, show_default=True, help=f"{text}; N or LOW-HIGH."
    )


def _count(name: str, default: int, text: str) -> Callable[[Command], Command]:
    kind = click.IntRange(min=1)
    return click.option(
        name, type=kind, metavar="N", default=default, show_default=True, help=f"{text}."
    )


@generate.command()
@_count("--systems", 4, "Distinct system prompts; 1 gives one hot prompt")
@_range("--system-tokens", "512-2048", "Length of a system prompt")
@_range("--turn-tokens", "16-256", "Length of a user turn")
@_range("--answer-tokens", "32-384", "Length of an answer, 0 for none")
@_range("--turns", "1-10", "Turns of a chat")
@_count("--concurrent", 64, "Chats in flight")
@_shared
def chat(**options: Any) -> None:
    """Chats in many turns under shared system prompts."""
    from replay.synthetic import ChatSpec

    _write(ChatSpec, options)


@generate.command()
@_count("--tools", 3, "Distinct tool sets, an agent's first tokens")
@_range("--tool-tokens", "4096-8192", "Length of a tool set")
@_range("--task-tokens", "64-1024", "Length of an agent's task")
@_range("--step-tokens", "64-2048", "Growth of the context a step")
@_range("--steps", "5-40", "Steps of an agent")
@_count("--concurrent", 16, "Agents in flight")
@_shared
def agents(**options: Any) -> None:
    """Agents whose context grows at every step."""
    from replay.synthetic import AgentSpec

    _write(AgentSpec, options)


@generate.command()
@_range("--prompt-tokens", "64-2048", "Length of a prompt")
@_shared
def unique(**options: Any) -> None:
    """Prompts that share nothing."""
    from replay.synthetic import UniqueSpec

    _write(UniqueSpec, options)


def _write(make_spec: Callable[..., Spec], options: dict[str, Any]) -> None:
    from replay.commands import Output, write_trace
    from replay.synthetic import Range

    seed, requests = options.pop("seed"), options.pop("requests")
    output = Output(options.pop("output"), options.pop("block_size"))
    fields = {
        name: Range.parse(value) if isinstance(value, str) else value
        for name, value in options.items()
    }
    write_trace(make_spec(**fields), output, seed=seed, requests=requests)
