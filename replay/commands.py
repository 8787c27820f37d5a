"""What the commands do, once their arguments are read; imports numpy and the tree."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import BinaryIO

from replay.errors import ReplayError
from replay.formats import open_trace
from replay.progress import LazyProgress
from replay.report import to_json, to_table
from replay.sweep import SweepConfig, sweep
from replay.synthetic import EXAMPLE_NAME, Spec, example_reader, generate
from replay.trace import Reader
from replay.write import compressing, mooncake_lines, token_lines


def replay_trace(path: str, config: SweepConfig, *, block_size: int | None, as_json: bool) -> str:
    """Replay a trace and return the text to print.

    Raises:
        ReplayError: If the trace or an option is wrong.
    """
    reader = _reader(path, block_size)
    with LazyProgress() as progress:
        report = sweep(reader, config, progress.update)
    return to_json(report) if as_json else to_table(report)


def _reader(path: str, block_size: int | None) -> Reader:
    if path != EXAMPLE_NAME:
        return open_trace(path, block_size=block_size)
    if block_size is not None:
        raise ReplayError(
            f"--block-size {block_size}: the example holds token ids and has no blocks; "
            "use --page-size"
        )
    return example_reader()


@dataclass(frozen=True, slots=True)
class Output:
    """Where a generated trace goes.

    Attributes:
        path: File, compressed by its suffix, or `-` for standard output.
        block_size: Write Mooncake ids of blocks of this many tokens; None for token ids.
    """

    path: str
    block_size: int | None = None


def write_trace(spec: Spec, output: Output, *, seed: int, requests: int) -> None:
    """Generate a trace and write it, a line at a time.

    Raises:
        ReplayError: If the file cannot be written.
    """
    prompts = generate(spec, seed=seed, requests=requests)
    if output.block_size is None:
        lines = token_lines(prompts)
    else:
        lines = mooncake_lines(prompts, output.block_size)
    with _opened(output.path) as stream:
        for line in lines:
            stream.write(line)


@contextmanager
def _opened(path: str) -> Iterator[BinaryIO]:
    if path == "-":
        stream = sys.stdout.buffer
        yield stream
        stream.flush()
        return
    try:
        with open(path, "wb") as file, compressing(file, path) as stream:
            yield stream
    except OSError as error:
        raise ReplayError(f"{path}: cannot be written: {error.strerror}") from None
