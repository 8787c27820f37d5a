"""`python -m benchmarks` runs every benchmark in turn; `python -m benchmarks NAME ...` runs one."""

from __future__ import annotations

from importlib import import_module

import click

BENCHMARKS = ("alloc_classed", "plan", "gather", "stranding", "aimed_eviction", "tree", "growth")
"""Modules of this package; each has a click command `main` whose defaults take a minute or so."""


class Registry(click.Group):
    """Imports a benchmark when it is asked for."""

    def list_commands(self, context: click.Context) -> list[str]:
        """Return the names."""
        return list(BENCHMARKS)

    def get_command(self, context: click.Context, name: str) -> click.Command | None:
        """Return one benchmark's command."""
        if name not in BENCHMARKS:
            return None
        command: click.Command = import_module(f"benchmarks.{name}").main
        return command


@click.group(cls=Registry, invoke_without_command=True)
@click.pass_context
def main(context: click.Context) -> None:
    """Run every benchmark in turn, or the one that is named."""
    if context.invoked_subcommand is None:
        for name in BENCHMARKS:
            click.echo(f"\n== {name}\n")
            import_module(f"benchmarks.{name}").main(args=[], standalone_mode=False)


if __name__ == "__main__":
    main(prog_name="python -m benchmarks")
