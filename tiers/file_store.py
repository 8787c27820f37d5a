"""A blob a file: checksummed, written atomically, limited in size, there again after a restart.

    file   magic 8 | header bytes u32 | body bytes u64 | header | digest 16 | body | digest 16

A file appears under its name only when it is whole and on disk: it is written under a temporary
name, synchronised, and renamed. So a process that is killed at any point leaves whole files and
temporary ones, which the next start removes. A file that is not exactly what was written is removed
with one warning and is a miss. One that the system can't read just now is a miss, and stays.
"""

from __future__ import annotations

import fcntl
import hashlib
import logging
import os
import struct
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

logger = logging.getLogger(__name__)

_MAGIC = b"RRADIX\x00\x01"
_SIZES = struct.Struct("<8sIQ")
_DIGEST_BYTES = 16
_SUFFIX = ".kv"
_TEMPORARY = ".tmp"
_LOCK = "lock"


class _DamagedError(Exception):
    """A file is not what was written."""


@dataclass(slots=True)
class FileCounters:
    """What happened to files since the start.

    Attributes:
        written: files written.
        failed: writes, reads and uses that the system refused: a full disk, a missing right, too
            many open files.
        too_large: blobs larger than the whole store.
        evicted: files removed to make room.
        corrupted: files removed because they were not what was written.
    """

    written: int = 0
    failed: int = 0
    too_large: int = 0
    evicted: int = 0
    corrupted: int = 0


class FileStore:
    """Blobs in the files of one directory, the least recently used go first.

    The order of use survives a restart as the files' modification times. One process owns a
    directory at a time; each rank has its own.

    Args:
        directory: made if it is not there.
        capacity_bytes: limit of all files together.
        sync: synchronise each file and its name with the disk; without it a power cut, but not a
            killed process, may leave files that are found corrupted.

    Attributes:
        counters: what happened so far.

    Raises:
        ValueError: the capacity is negative.
        RuntimeError: another process uses the directory.
        OSError: the directory can't be made or read.
    """

    def __init__(
        self, directory: str | os.PathLike[str], capacity_bytes: int, *, sync: bool = True
    ) -> None:
        if capacity_bytes < 0:
            raise ValueError(f"capacity_bytes={capacity_bytes} must not be negative")
        self.counters = FileCounters()
        self._directory = Path(directory)
        self._capacity = capacity_bytes
        self._sync = sync
        self._directory.mkdir(parents=True, exist_ok=True)
        self._lock_fd = _lock(self._directory / _LOCK)
        self._sizes: OrderedDict[str, int] = OrderedDict(self._scan())
        self._total = sum(self._sizes.values())
        self._make_room(0)

    def __enter__(self) -> FileStore:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Let another process have the directory; the files stay, and this store knows none."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1
        self._sizes.clear()
        self._total = 0

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, name: str) -> bool:
        return name in self._sizes

    @property
    def total_bytes(self) -> int:
        """Bytes of all files."""
        return self._total

    def names(self) -> list[str]:
        """Return the names, the least recently used first."""
        return list(self._sizes)

    # Writes

    def put(self, name: str, header: bytes, body: bytes) -> bool:
        """Write a file, in place of one of its name.

        A failure of the system is counted and warned of once, and leaves nothing new behind. A
        closed store writes nothing.
        """
        if self._lock_fd < 0:
            return False
        parts = [
            _SIZES.pack(_MAGIC, len(header), len(body)) + header,
            _digest(len(header), len(body), header),
            body,
            _digest(len(body), 0, body),
        ]
        size = sum(len(part) for part in parts)
        if size > self._capacity:
            self.counters.too_large += 1
            return False
        if name in self._sizes:
            self._sizes.move_to_end(name, last=False)  # the first to go
        self._make_room(size)
        temporary = self._directory / (name + _TEMPORARY)
        try:
            self._write(temporary, parts)
            os.replace(temporary, self._path(name))
        except OSError as error:
            self._remove(temporary)
            self._refused(error)
            return False
        self._total += size - self._sizes.pop(name, 0)
        self._sizes[name] = size
        try:
            self._sync_directory()
        except OSError as error:
            self._forget(name)
            self._refused(error)
            return False
        self.counters.written += 1
        return True

    def _write(self, path: Path, parts: list[bytes]) -> None:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            for part in parts:
                rest = memoryview(part)
                while rest:
                    rest = rest[os.write(fd, rest) :]
            if self._sync:
                os.fsync(fd)
        finally:
            os.close(fd)

    def _sync_directory(self) -> None:
        if not self._sync:
            return
        fd = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def _make_room(self, size: int) -> None:
        while self._sizes and self._total + size > self._capacity:
            self._forget(next(iter(self._sizes)))
            self.counters.evicted += 1

    # Reads

    def header(self, name: str) -> bytes | None:
        """Return a header whose digest is right, or None; a bad file is removed."""
        found = self._read(name, whole=False)
        return None if found is None else found[0]

    def body(self, name: str) -> bytes | None:
        """Return a body whose digest is right, or None; a bad file is removed."""
        found = self._read(name, whole=True)
        return None if found is None else found[1]

    def use(self, name: str) -> None:
        """Count a use, which the file's modification time remembers."""
        if name not in self._sizes:
            return
        self._sizes.move_to_end(name)
        try:
            os.utime(self._path(name))
        except FileNotFoundError as error:
            self._corrupted(name, str(error))
        except OSError as error:
            self._refused(error)

    def _read(self, name: str, *, whole: bool) -> tuple[bytes, bytes] | None:
        if name not in self._sizes:
            return None
        try:
            with open(self._path(name), "rb") as file:
                return _parse(file, whole)
        except (FileNotFoundError, _DamagedError) as error:
            self._corrupted(name, str(error))
        except OSError as error:
            self._refused(error)
        return None

    def _refused(self, error: OSError) -> None:
        self.counters.failed += 1
        if self.counters.failed == 1:
            logger.warning("%s: the system refuses: %s", self._directory, error)

    def _corrupted(self, name: str, reason: str) -> None:
        self.counters.corrupted += 1
        logger.warning("%s: removed, %s", self._path(name), reason)
        self._forget(name)

    # Private

    def _scan(self) -> list[tuple[str, int]]:
        """Remove temporary files; return the others, the least recently used first."""
        found: list[tuple[int, str, int]] = []
        for path in sorted(self._directory.iterdir()):
            if path.suffix == _TEMPORARY:
                self._remove(path)
            elif path.suffix == _SUFFIX:
                stat = path.stat()
                found.append((stat.st_mtime_ns, path.stem, stat.st_size))
        return [(name, size) for _, name, size in sorted(found)]

    def _forget(self, name: str) -> None:
        self._total -= self._sizes.pop(name)
        self._remove(self._path(name))

    def _remove(self, path: Path) -> None:
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            logger.warning("%s: can't be removed: %s", path, error)

    def _path(self, name: str) -> Path:
        return self._directory / (name + _SUFFIX)


def _lock(path: Path) -> int:
    """Return an open, locked file; the lock goes with the process."""
    fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise RuntimeError(
            f"{path.parent} is used by another process; give each rank a directory of its own"
        ) from None
    return fd


def _lengths(data: bytes) -> tuple[int, int] | None:
    if len(data) != _SIZES.size:
        return None
    magic, header, body = _SIZES.unpack(data)
    return (header, body) if magic == _MAGIC else None


def _parse(file: BinaryIO, whole: bool) -> tuple[bytes, bytes]:
    """Return header and body; without ``whole`` the body is neither read nor checked."""
    lengths = _lengths(file.read(_SIZES.size))
    if lengths is None or os.fstat(file.fileno()).st_size != _file_size(*lengths):
        raise _DamagedError("it is not a whole file")
    header, digest = file.read(lengths[0]), file.read(_DIGEST_BYTES)
    if digest != _digest(*lengths, header):
        raise _DamagedError("its header is damaged")
    if not whole:
        return header, b""
    body, digest = file.read(lengths[1]), file.read(_DIGEST_BYTES)
    if digest != _digest(lengths[1], 0, body):
        raise _DamagedError("its body is damaged")
    return header, body


def _file_size(header: int, body: int) -> int:
    return _SIZES.size + header + body + 2 * _DIGEST_BYTES


def _digest(first: int, second: int, data: bytes) -> bytes:
    digest = hashlib.blake2b(f"{first},{second};".encode(), digest_size=_DIGEST_BYTES)
    digest.update(data)
    return digest.digest()
