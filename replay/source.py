"""Lines of a file or of standard input, whatever compression the first bytes show.

Holds one line and the decompressor's window at a time, never a file.
"""

from __future__ import annotations

import gzip
import io
import lzma
import os
import sys
import zlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal, Protocol

import zstandard

from replay.errors import TraceError

STDIN = "-"
MAX_LINE_BYTES = 1 << 28
_CHUNK_BYTES = 1 << 16

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer as Buffer

Compression = Literal["plain", "gzip", "zstd", "xz"]

_MAGIC: tuple[tuple[bytes, Compression], ...] = (
    (b"\x1f\x8b", "gzip"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\xfd7zXZ\x00", "xz"),
)
_DAMAGED = (EOFError, zlib.error, gzip.BadGzipFile, lzma.LZMAError, zstandard.ZstdError)


class ByteLines(Protocol):
    """The part of a binary stream that is used here."""

    def readline(self, size: int, /) -> bytes:
        """Return one line, or at most `size` bytes of it."""
        ...

    def close(self) -> None:
        """Close the stream."""
        ...


def detect_compression(head: bytes) -> Compression:
    r"""Name the compression that the first bytes of a file show.

    >>> detect_compression(b"\x1f\x8b\x08")
    'gzip'
    >>> detect_compression(b'{"a"')
    'plain'
    """
    return next((name for magic, name in _MAGIC if head.startswith(magic)), "plain")


class _ZstdFrames(io.RawIOBase):
    """The content of all zstd frames of a file; an end inside a frame is an EOFError.

    The library's own stream ends silently there, and lines of the trace would be missing.
    """

    def __init__(self, raw: io.BufferedReader) -> None:
        self._raw = raw
        self._frame = zstandard.ZstdDecompressor().decompressobj()
        self._inside = False
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        """It is a source."""
        return True

    def readinto(self, buffer: Buffer, /) -> int:
        """Fill the buffer as far as the next piece of content reaches; 0 at the end."""
        while not self._ready:
            chunk = self._frame.unused_data if self._frame.eof else b""
            chunk = chunk or self._raw.read1(_CHUNK_BYTES)
            if not chunk:
                if self._inside:
                    raise EOFError("it ends inside a frame")
                return 0
            if self._frame.eof:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready = memoryview(self._frame.decompress(chunk))
            self._inside = not self._frame.eof
        view = memoryview(buffer)
        count = min(len(view), len(self._ready))
        view[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count


def _decompress(raw: io.BufferedReader, compression: Compression) -> ByteLines:
    if compression == "gzip":
        return gzip.GzipFile(fileobj=raw)
    if compression == "xz":
        return lzma.LZMAFile(raw)
    if compression == "zstd":
        return io.BufferedReader(_ZstdFrames(raw), _CHUNK_BYTES)
    return raw


class Source:
    """One pass over the lines of a trace file.

    Attributes:
        name: The file as the user named it.
        compression: What the first bytes show.
        rewindable: Whether the file can be opened again and holds the same.
        line_no: Number of the line read last, from 1.

    Args:
        path: File to read, or `-` for standard input.

    Raises:
        TraceError: If the file cannot be opened.
    """

    def __init__(self, path: str) -> None:
        self.name = "<stdin>" if path == STDIN else path
        self._raw = self._open(path)
        self._size = self._size_of(self._raw)
        self.rewindable = path != STDIN and self._raw.seekable()
        self.line_no = 0
        self.compression = detect_compression(self._raw.peek(8))
        self._lines = _decompress(self._raw, self.compression)

    def _open(self, path: str) -> io.BufferedReader:
        if path == STDIN:
            stdin = sys.stdin.buffer
            if isinstance(stdin, io.BufferedReader):
                return stdin
            return io.BufferedReader(stdin)  # type: ignore[arg-type]
        try:
            return open(path, "rb")
        except FileNotFoundError:
            raise TraceError(
                path, 0, "no such file; give a trace file, '-' for standard input, or 'example'"
            ) from None
        except OSError as error:
            raise TraceError(path, 0, f"cannot be opened: {error.strerror}") from None

    def _size_of(self, raw: io.BufferedReader) -> int:
        try:
            return os.fstat(raw.fileno()).st_size if raw.seekable() else 0
        except (OSError, ValueError):
            return 0

    def progress(self) -> float:
        """Return the share of the file's bytes that has been read; 0.0 if unknown."""
        if not self._size or self._raw.closed:
            return 0.0
        return min(1.0, self._raw.tell() / self._size)

    def next_line(self) -> bytes:
        """Return the next line that is not blank, or empty bytes at the end.

        Raises:
            TraceError: If the compressed data is damaged, or a line is too long to be a trace's.
        """
        while True:
            line = self._read_line()
            if not line:
                return b""
            self.line_no += 1
            stripped = line.strip()
            if stripped:
                return stripped

    def _read_line(self) -> bytes:
        try:
            line = self._lines.readline(MAX_LINE_BYTES + 1)
        except _DAMAGED as error:
            raise TraceError(
                self.name,
                self.line_no + 1,
                f"damaged {self.compression} data ({error}); copy it again",
            ) from None
        except OSError as error:
            raise TraceError(self.name, self.line_no + 1, f"cannot be read: {error}") from None
        if len(line) > MAX_LINE_BYTES:
            raise TraceError(
                self.name,
                self.line_no + 1,
                f"line is longer than {MAX_LINE_BYTES >> 20} MiB; put one request a line",
            )
        return line

    def lines(self) -> Iterator[bytes]:
        """Yield the remaining lines that are not blank; `line_no` says where they are."""
        while line := self.next_line():
            yield line

    def close(self) -> None:
        """Close the file; standard input stays open."""
        if self.name != "<stdin>":
            self._lines.close()
            self._raw.close()
