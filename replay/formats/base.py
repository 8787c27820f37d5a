"""What a trace format is, and the reader that all formats share.

A format turns one line into requests and says what it detected. It knows no file and no line
number of its own: the reader adds the place to every error.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Annotated, Literal, Protocol

import msgspec

from replay.errors import ReplayError, TraceError
from replay.source import Source
from replay.trace import Request, TraceInfo

MAX_ID = (1 << 63) - 1
MAX_LENGTH = (1 << 40) - 1

Id = Annotated[int, msgspec.Meta(ge=0, le=MAX_ID)]
Length = Annotated[int, msgspec.Meta(ge=0, le=MAX_LENGTH)]
Time = Annotated[float, msgspec.Meta(ge=0)]
Tail = Literal["ceil", "floor", "unknown", "none"]

_COMMON_BLOCK_SIZES = (512, 16, 64, 128, 256, 32, 1024, 2048)


@dataclass(frozen=True, slots=True)
class Facts:
    """What a format detected; the fields are those of `TraceInfo`."""

    block_size: int
    tail: Tail
    scope: Literal["global", "local"]
    time_unit: Literal["ms", "s", "none"]


class Format(Protocol):
    """One trace format, reading one file."""

    name: str
    shape: str

    def facts(self) -> Facts:
        """Return what was detected so far."""
        ...

    def parse(self, line: bytes, line_no: int) -> Iterable[Request]:
        """Turn one line into its requests.

        Raises:
            ReplayError: If the values contradict each other.
            msgspec.MsgspecError: If the line is no JSON or has wrong types.
        """
        ...


class TailRule:
    """Checks the number of ids against the prompt length, and settles ceil or floor.

    The first prompt that ends inside a block decides; every later one must agree.

    Args:
        block_size: Tokens behind one id.
        tail: The rule, if the format fixes it; `unknown` to detect it.
    """

    def __init__(self, block_size: int, tail: Tail = "unknown") -> None:
        self.block_size = block_size
        self.tail: Tail = tail

    def check(self, num_ids: int, input_length: int, names: tuple[str, str]) -> None:
        """Accept one request or say what is wrong with it.

        Args:
            num_ids: Ids in the request.
            input_length: Prompt length in tokens.
            names: What the file calls the ids and the length.

        Raises:
            ReplayError: If the count fits neither the settled rule nor, before that, any rule.
        """
        floor, rest = divmod(input_length, self.block_size)
        wanted = {"ceil": floor + (rest > 0), "floor": floor}
        if self.tail in wanted:
            if num_ids == wanted[self.tail]:
                return
        elif num_ids in wanted.values():
            if rest:
                self.tail = "ceil" if num_ids > floor else "floor"
            return
        rule = self.tail if self.tail in wanted else "ceil"
        raise ReplayError(
            f"{num_ids} {names[0]} for {names[1]}={input_length}; blocks of {self.block_size} "
            f"tokens ({rule}) make {wanted[rule]}; {self._remedy(num_ids, input_length)}"
        )

    def _remedy(self, num_ids: int, input_length: int) -> str:
        if self.tail != "unknown":
            return "mend the line"
        for size in _COMMON_BLOCK_SIZES:
            if num_ids == -(-input_length // size):
                return f"--block-size {size} would fit this line"
        return "mend the line, or give the trace's --block-size"


class LineReader:
    """A trace in a file of lines, read as a stream.

    A file is opened anew for each reading and closed at its end, or where the reading is left. A
    stream that cannot seek (standard input, a pipe) is read once, from where detection left it.

    Args:
        path: File, or `-` for standard input.
        source: The file, opened, with its first line already taken.
        first: That first line.
        format: The format detected from it.
    """

    def __init__(self, path: str, source: Source, first: bytes, format: Format) -> None:
        self._path = path
        self._source = source
        self._first = first
        self._format = format
        self._started = False
        if source.rewindable:
            source.close()

    @property
    def info(self) -> TraceInfo:
        """Facts detected so far."""
        facts = self._format.facts()
        return TraceInfo(
            self._source.name,
            self._format.name,
            self._source.compression,
            facts.block_size,
            facts.tail,
            facts.scope,
            facts.time_unit,
        )

    @property
    def rewindable(self) -> bool:
        """Say whether the trace can be read twice."""
        return self._source.rewindable

    def progress(self) -> float:
        """Return the share of the file that has been read."""
        return self._source.progress()

    def __iter__(self) -> Iterator[Request]:
        """Yield the requests in file order.

        Raises:
            TraceError: At the first bad line, or on a second reading of standard input.
        """
        source, first = self._begin()
        try:
            if first:
                yield from self._parse(first, source)
            for line in source.lines():
                yield from self._parse(line, source)
        finally:
            source.close()

    def _begin(self) -> tuple[Source, bytes]:
        """Return the source to read, and a line that was already taken from it."""
        if self._source.rewindable:
            self._source = Source(self._path)
            return self._source, b""
        if self._started:
            raise TraceError(self._source.name, 0, "cannot be read twice; save it to a file first")
        self._started = True
        return self._source, self._first

    def _parse(self, line: bytes, source: Source) -> Iterator[Request]:
        try:
            yield from self._format.parse(line, source.line_no)
        except ReplayError as error:
            raise TraceError(source.name, source.line_no, str(error)) from None
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            problem = f"{error}; a line of {self._format.name} is {self._format.shape}"
            raise TraceError(source.name, source.line_no, problem) from None
