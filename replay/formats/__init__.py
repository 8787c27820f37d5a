"""Trace formats: one file each, and the detection that picks one from the first line."""

from __future__ import annotations

from typing import Protocol

import msgspec

from replay.errors import ReplayError, TraceError
from replay.formats.bailian import BailianFormat
from replay.formats.base import Format, LineReader
from replay.formats.mooncake import MooncakeFormat
from replay.formats.sessions import SessionsFormat
from replay.formats.tokens import TokensFormat
from replay.source import Source

__all__ = ["FORMATS", "open_trace"]


class FormatFactory(Protocol):
    """A format class: recognises a first line, and is built from it."""

    name: str
    shape: str

    def matches(self, first: object) -> bool:
        """Say whether a decoded first line looks like this format."""
        ...

    def __call__(self, first: object, block_size: int | None) -> Format:
        """Build the format for one file."""
        ...


FORMATS: tuple[FormatFactory, ...] = (TokensFormat, SessionsFormat, BailianFormat, MooncakeFormat)


def open_trace(path: str, *, block_size: int | None = None) -> LineReader:
    """Open a trace and detect compression and format from its first line.

    Args:
        path: File, or `-` for standard input.
        block_size: Tokens behind one id, where the format leaves it open; None for its default.

    Returns:
        A reader that holds one line at a time.

    Raises:
        TraceError: If the file is missing, empty, damaged or of no known format, or if the block
            size contradicts it.
    """
    source = Source(path)
    try:
        first = source.next_line()
        if not first:
            raise TraceError(source.name, 0, "holds no request; a trace has one JSON value a line")
        format = _detect(source, first, block_size)
    except TraceError:
        source.close()
        raise
    return LineReader(path, source, first, format)


def _detect(source: Source, first: bytes, block_size: int | None) -> Format:
    try:
        decoded = msgspec.json.decode(first)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        problem = f"{error}; a trace has one JSON value a line"
        raise TraceError(source.name, source.line_no, problem) from None
    for factory in FORMATS:
        if factory.matches(decoded):
            return _build(factory, decoded, source, block_size)
    known = ", ".join(f"{factory.name} {factory.shape}" for factory in FORMATS)
    raise TraceError(source.name, source.line_no, f"unknown format; known are: {known}")


def _build(
    factory: FormatFactory, decoded: object, source: Source, block_size: int | None
) -> Format:
    try:
        return factory(decoded, block_size)
    except ReplayError as error:
        raise TraceError(source.name, 0, str(error)) from None
    except msgspec.MsgspecError as error:
        problem = f"{error}; a line of {factory.name} is {factory.shape}"
        raise TraceError(source.name, source.line_no, problem) from None
