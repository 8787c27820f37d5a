"""What a trace is: a stream of requests, and the facts that were detected about it.

A request holds ids. In a block trace an id stands for `block_size` tokens, in a token trace for
one. Ids are unique in the whole trace: a format with local ids makes them so. This module knows
no file format, no cache and no definition of a hit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt as a trace tells it.

    Attributes:
        input_length: Prompt length in tokens.
        ids: One non-negative int64 per block or per token, in prompt order.
        output_length: Answer length in tokens; 0 where the trace does not say.
        timestamp_ms: Arrival in milliseconds; 0.0 where the trace does not say.
    """

    input_length: int
    ids: Sequence[int]
    output_length: int = 0
    timestamp_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class TraceInfo:
    """What was detected about a trace; every report prints it.

    Attributes:
        name: File as the user named it, or `example`.
        format: Name of the format.
        compression: `plain`, `gzip`, `zstd` or `xz`.
        block_size: Tokens behind one id; 1 for a token trace.
        tail: `ceil` if a partial last block has an id, `floor` if not, `unknown` if no prompt so
            far ended inside a block, `none` for a token trace.
        scope: `global` if equal ids mean equal content in the whole trace, `local` if only within
            one session.
        time_unit: Unit of the timestamps in the file, or `none`.

    >>> TraceInfo("t.jsonl", "Mooncake", "plain", 512, "ceil", "global", "ms").describe()
    't.jsonl: Mooncake (plain), blocks of 512 tokens, partial tail has an id (ceil), ids global, \
time in ms'
    """

    name: str
    format: str
    compression: Literal["plain", "gzip", "zstd", "xz"]
    block_size: int
    tail: Literal["ceil", "floor", "unknown", "none"]
    scope: Literal["global", "local"]
    time_unit: Literal["ms", "s", "none"]

    @property
    def has_blocks(self) -> bool:
        """Say whether an id stands for a block of tokens."""
        return self.tail != "none"

    def describe(self) -> str:
        """Return the detected facts in one line."""
        return ", ".join(
            [f"{self.name}: {self.format} ({self.compression})", *self._content(), self._time()]
        )

    def _content(self) -> list[str]:
        if not self.has_blocks:
            return [] if self.format == "token ids" else ["token ids"]
        tails = {
            "ceil": "partial tail has an id (ceil)",
            "floor": "partial tail has no id (floor)",
            "unknown": "no partial tail seen",
        }
        scopes = {"global": "ids global", "local": "ids local to a session"}
        return [f"blocks of {self.block_size} tokens", tails[self.tail], scopes[self.scope]]

    def _time(self) -> str:
        return "no timestamps" if self.time_unit == "none" else f"time in {self.time_unit}"


class Reader(Protocol):
    """A trace that can be read from its start, more than once if `rewindable`."""

    @property
    def info(self) -> TraceInfo:
        """Facts detected so far; `tail` may settle while the trace is read."""
        ...

    @property
    def rewindable(self) -> bool:
        """Say whether a second iteration is possible (not for standard input)."""
        ...

    def progress(self) -> float:
        """Return the share of the trace that has been read, 0.0 to 1.0; 0.0 if unknown."""
        ...

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in file order, holding one line at a time.

        Raises:
            TraceError: At the first line that breaks the format.
        """
        ...
