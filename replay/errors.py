"""Errors that are the user's to mend: each is one line, shown without a traceback."""

from __future__ import annotations


class ReplayError(ValueError):
    """A mistake in a trace, an option or a file, told in one line.

    The text follows the form "value, rule, remedy" and holds no line break.
    """


class TraceError(ReplayError):
    """A mistake at a known place of a trace.

    Args:
        name: The file as the user named it.
        line: Line number, counted from 1; 0 if the whole file is meant.
        problem: What is wrong, the rule, the remedy.
    """

    def __init__(self, name: str, line: int, problem: str) -> None:
        place = f"{name}:{line}" if line else name
        super().__init__(f"{place}: {problem}")
        self.name = name
        self.line = line
        self.problem = problem
