"""A progress bar on standard error: only at a terminal, and only when a run is long."""

from __future__ import annotations

import sys
from time import monotonic
from types import TracebackType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

PATIENCE_SECONDS = 2.0


class LazyProgress:
    """Shows a bar once a run has taken longer than `PATIENCE_SECONDS`.

    Args:
        enabled: False keeps it silent; None asks whether standard error is a terminal.
    """

    def __init__(self, *, enabled: bool | None = None) -> None:
        self._enabled = sys.stderr.isatty() if enabled is None else enabled
        self._start = monotonic()
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> LazyProgress:
        """Start to wait."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Take the bar off the screen."""
        if self._bar is not None:
            self._bar.stop()

    def update(self, share: float) -> None:
        """Say how much of the work is done.

        Args:
            share: 0.0 to 1.0; 0.0 throughout if it is not known.
        """
        if not self._enabled or monotonic() - self._start < PATIENCE_SECONDS:
            return
        if self._bar is None:
            self._show()
        if self._bar is not None and self._task is not None:
            self._bar.update(self._task, completed=share, total=1.0 if share else None)

    def _show(self) -> None:
        from rich.console import Console
        from rich.progress import Progress

        self._bar = Progress(console=Console(stderr=True), transient=True)
        self._task = self._bar.add_task("replay", total=None)
        self._bar.start()
