"""A table as text, for reports and benchmarks."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence

_TABLE_WIDTH = 200


def render(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table of right-aligned columns as text, no wider than its cells.

    Args:
        headings: One per column; a line break makes the head taller.
        rows: One cell per column each.
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1))
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True, vertical="bottom")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=_TABLE_WIDTH, force_terminal=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())
